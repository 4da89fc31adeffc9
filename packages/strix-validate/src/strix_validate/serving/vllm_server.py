# SPDX-License-Identifier: BSD-3-Clause
"""A tiny model, what vLLM makes of it offline, and `vllm serve` on a free port with it or another.

Each stage is one child process; if one fails, the error has the end of its log.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import memory_of
from strix_validate.limits import last_lines
from strix_validate.serving.endpoint import Endpoint, Generation
from strix_validate.serving.tiny_llama import PROMPT, TOKENS
from strix_validate.serving.web import open_url

#: Seconds; the first start compiles kernels, up to 12 minutes were reported on gfx1151.
_START_LIMIT = 900
_STOP_LIMIT = 60
_NETWORK_OFF = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
#: HIP graphs of decoding, of kernels as they are: torch.compile would round otherwise than eager.
_GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}'

#: Of the tiny model: little memory, and HIP graphs.
_TINY = [
    "--dtype", "float16", "--max-model-len", "256", "--max-num-seqs", "4", "--compilation-config",
    _GRAPHS, "--kv-cache-memory-bytes", str(256 << 20),
]  # fmt: skip


def _once(make: Callable) -> property:
    """Make a property computed on first use. Failures are kept too: one may have taken minutes."""

    def get(self):
        if make.__name__ not in self.made:
            try:
                self.made[make.__name__] = make(self), None
            except Exception as error:
                self.made[make.__name__] = None, error
        value, failure = self.made[make.__name__]
        if failure is not None:
            raise failure
        return value

    return property(get, doc=make.__doc__)


@dataclass
class ServerSession:
    """The model, its offline output, and the server, each made on first use.

    start_limit and stop_limit are in seconds. model: a folder to serve instead of the tiny one.
    flags: of `vllm serve` for the tiny one.
    """

    device: str
    start_limit: float = _START_LIMIT
    stop_limit: float = _STOP_LIMIT
    model: str = ""
    flags: Sequence[str] = tuple(_TINY)
    made: dict = field(default_factory=dict)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "ServerSession":
        return self

    def __exit__(self, *error) -> None:
        self._closing.close()

    def need_vllm(self, *plugins: str) -> None:
        """Raise CannotRun where vLLM cannot be started, or lacks one of these modules."""
        for name in ("vllm", "transformers", *plugins):
            if importlib.util.find_spec(name) is None:
                raise CannotRun(f"{name} is not installed")
        if self.device != "cuda":
            raise CannotRun("vLLM serves only on a GPU here, and torch sees none")

    @_once
    def folder(self) -> Path:
        """Holds the model and the log, as long as this is open."""
        return Path(self._closing.enter_context(tempfile.TemporaryDirectory()))

    @_once
    def reference(self) -> list[float]:
        """Log probability of each token after the prompt; writes the model."""
        self.need_vllm()
        return in_child("make", self.folder / "model")["logprobs"]

    @_once
    def offline(self) -> dict:
        """See tiny_llama._generate."""
        _ = self.reference  # writes the model
        return in_child("generate", self.folder / "model")

    def generate(self, name: str) -> tuple[list[float], dict]:
        """Generate offline by a model of tiny_models; return its reference, and what vLLM gives."""
        self.need_vllm()
        folder = self.folder / name
        return in_child("make", folder, name)["logprobs"], in_child("generate", folder, name)

    def score(self, tokens: list[int]) -> dict:
        """See tiny_llama._score: these tokens after the prompt, by transformers in float32."""
        return in_child("score", self.folder / "model", json.dumps(tokens))

    @_once
    def answer(self) -> Generation:
        """What the server makes of the prompt."""
        return self.server.endpoint.generate(PROMPT, TOKENS)

    @_once
    def server(self) -> "VllmServer":
        """A server of the model, started when first asked for."""
        if not self.model:
            _ = self.reference
        folder, flags = Path(self.model or self.folder / "model"), self.flags
        if self.model:
            memory = memory_of(Tree())
            flags = ["--gpu-memory-utilization", f"{memory.utilization:.2f}"] if memory else []
        server = VllmServer(folder, self.folder / "server.log", flags)
        self._closing.callback(server.kill)
        server.start(self.start_limit)
        return server


class VllmServer:
    """`vllm serve` on a free local port, in its own process group."""

    def __init__(self, model: Path, log: Path, flags: Sequence[str]) -> None:
        self.model, self.log, self.flags = model, log, flags
        # kept: nobody else is given the port before the server, which may share it, binds it
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port = self._kept.getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.port}", "tiny")
        self.process: Any = None  # until it is started
        self.start_seconds = 0.0

    def start(self, limit: float) -> None:
        """Start the server; return when it answers.

        Raise CheckFailed with the end of the log otherwise.
        """
        program = shutil.which("vllm", path=str(Path(sys.executable).parent)) or "vllm"
        command = [
            program, "serve", str(self.model), "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", "tiny", "--enable-prefix-caching", "--seed", "0", *self.flags,
        ]  # fmt: skip
        begin = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | _NETWORK_OFF,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while time.perf_counter() - begin < limit:
            ended = self.process.poll()
            if ended is not None:
                raise CheckFailed(
                    f"vllm serve ended with status {ended}: {last_lines(self.log, 5)}"
                )
            address = f"{self.endpoint.url}/health"
            with contextlib.suppress(OSError), open_url(address, 5):
                self.start_seconds = time.perf_counter() - begin
                return
            time.sleep(0.2)
        raise CheckFailed(f"no answer within {limit:.0f} s: {last_lines(self.log, 5)}")

    def stop(self, limit: float) -> int:
        """Send SIGTERM; return the exit status.

        Raise CheckFailed if the server stays, or leaves a process.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"still running {limit:.0f} s after SIGTERM") from None
        deadline = time.perf_counter() + limit
        while self._group_lives():
            require(time.perf_counter() < deadline, "the server left a process behind")
            time.sleep(0.1)
        return status

    def kill(self) -> None:
        """End the server and what it started."""
        self._kept.close()
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def in_child(task: str, folder: Path, *model: str) -> dict:
    """Return tiny_llama's answer. Raise CheckFailed with the end of its log if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "strix_validate.serving.tiny_llama", task, folder, *model],
        env=os.environ | _NETWORK_OFF | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=_START_LIMIT,
    )
    last = " | ".join(done.stderr.strip().splitlines()[-3:])
    require(done.returncode == 0, f"{task} ended with status {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])
