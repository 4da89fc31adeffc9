# SPDX-License-Identifier: BSD-3-Clause
"""Create a tiny model, run it with vLLM offline, and serve it or another model on a free port.

Each stage is a child process. If a stage fails, the error contains the end of its log.
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
from strix_validate.doctor.vllm_memory import read_memory_budget
from strix_validate.limits import read_last_lines
from strix_validate.serving.endpoint import Endpoint, Generation
from strix_validate.serving.tiny_llama import PROMPT, SHARE, TOKENS
from strix_validate.serving.web import open_url

#: Time limits in seconds. The first start compiles kernels, which took up to 12 minutes in reports
#: from gfx1151.
_START_LIMIT = 900
_STOP_LIMIT = 60
_NETWORK_OFF = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
#: Settings to capture HIP graphs for decoding, without torch.compile, which rounds differently from
#: eager mode.
_GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}'
#: Flags of the tiny model's server: little memory, and HIP graphs.
_TINY = [
    "--dtype=float16",
    "--max-model-len=256",
    "--max-num-seqs=4",
    "--compilation-config",
    _GRAPHS,
    f"--kv-cache-memory-bytes={256 << 20}",
    f"--gpu-memory-utilization={SHARE}",
]


@dataclass(frozen=True)
class _Outcome:
    """The value of a property, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


def _computed_once(compute: Callable) -> property:
    """Return a property that is computed when it is first read.

    A failure is stored as well, because it may have taken minutes.
    """
    name = compute.__name__

    def get(self):
        if name not in self.outcomes:
            try:
                self.outcomes[name] = _Outcome(compute(self))
            except Exception as error:
                self.outcomes[name] = _Outcome(error=error)
        outcome = self.outcomes[name]
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    return property(get, doc=compute.__doc__)


@dataclass
class ServerSession:
    """The model, vLLM's offline output (without a server), and the server.

    Each of these is created when it is first used.

    Attributes:
        device: "cuda", or another name if the run uses no GPU.
        start_limit: Seconds within which the server must answer.
        stop_limit: Seconds within which the server must end.
        model: A folder to serve instead of the tiny model.
        flags: Flags of `vllm serve` for the tiny model.
        outcomes: Properties that were computed, by name.
    """

    device: str
    start_limit: float = _START_LIMIT
    stop_limit: float = _STOP_LIMIT
    model: str = ""
    flags: Sequence[str] = tuple(_TINY)
    outcomes: dict[str, _Outcome] = field(default_factory=dict)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "ServerSession":
        return self

    def __exit__(self, *error) -> None:
        self._closing.close()

    def need_vllm(self, *plugins: str) -> None:
        """Require a GPU and the modules that vLLM needs.

        Args:
            *plugins: Further modules to require.

        Raises:
            CannotRun: A module is not installed, or the run uses no GPU.
        """
        for name in ("vllm", "transformers", *plugins):
            if importlib.util.find_spec(name) is None:
                raise CannotRun(f"{name} is not installed")
        if self.device != "cuda":
            raise CannotRun("strix-validate starts vLLM only on a GPU, and this run uses no GPU")

    @_computed_once
    def folder(self) -> Path:
        """Folder of the model and the log, which exists as long as the session."""
        return Path(self._closing.enter_context(tempfile.TemporaryDirectory()))

    @_computed_once
    def reference(self) -> list[float]:
        """Log probability of each token that can follow the prompt, as transformers computes it.

        The first use of this property also writes the tiny model.
        """
        self.need_vllm()
        return in_child("make", self.folder / "model")["logprobs"]

    @_computed_once
    def offline(self) -> dict:
        """The output that vLLM generates offline; see tiny_llama._generate."""
        self._write_model()
        return in_child("generate", self.folder / "model")

    def _write_model(self) -> None:
        _ = self.reference

    def generate(self, name: str) -> tuple[list[float], dict]:
        """Write a model of tiny_models and let vLLM generate offline.

        Returns:
            The log probability of each token after PROMPT, as transformers computes it, and the
            output that vLLM generates.
        """
        self.need_vllm()
        folder = self.folder / name
        reference = in_child("make", folder, name)["logprobs"]
        return reference, in_child("generate", folder, name)

    def score(self, tokens: list[int]) -> dict:
        """Score tokens that follow PROMPT with transformers in float32; see tiny_llama._score."""
        return in_child("score", self.folder / "model", json.dumps(tokens))

    @_computed_once
    def answer(self) -> Generation:
        """The server's answer to the prompt."""
        return self.server.endpoint.generate(PROMPT, TOKENS)

    @_computed_once
    def server(self) -> "VllmServer":
        """A server of the model, which is started when this property is first read."""
        if self.model:
            folder = Path(self.model)
            memory = read_memory_budget(Tree())
            flags: Sequence[str] = []
            if memory:
                flags = ["--gpu-memory-utilization", f"{memory.utilization:.2f}"]
        else:
            self._write_model()
            folder = self.folder / "model"
            flags = self.flags
        server = VllmServer(folder, self.folder / "server.log", flags)
        self._closing.callback(server.kill)
        server.start(self.start_limit)
        return server


class VllmServer:
    """`vllm serve` on a free local port, in its own process group.

    Attributes:
        model: Folder of the model.
        log: File of the server's output.
        flags: Further flags of `vllm serve`.
        port: The server's port on 127.0.0.1.
        endpoint: The client of the server.
        process: The process; None until it is started.
        start_seconds: Seconds until it answered.
    """

    def __init__(self, model: Path, log: Path, flags: Sequence[str]) -> None:
        self.model = model
        self.log = log
        self.flags = flags
        # The socket stays open, so that no other program gets the port. The server can bind it
        # nevertheless, because of SO_REUSEADDR.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.port}", "tiny")
        self.process: Any = None
        self.start_seconds = 0.0

    def start(self, limit: float) -> None:
        """Start the server and wait until it answers.

        Args:
            limit: Seconds to wait.

        Raises:
            CheckFailed: The server does not answer; the message has the end of its log.
        """
        begin = time.perf_counter()
        variables = os.environ | _NETWORK_OFF
        # With this variable, the server would require a key, which the checks do not send.
        variables.pop("VLLM_API_KEY", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while time.perf_counter() - begin < limit:
            status = self.process.poll()
            if status is not None:
                last = read_last_lines(self.log, 5)
                raise CheckFailed(f"vllm serve ended with status {status}: {last}")
            with contextlib.suppress(OSError), open_url(f"{self.endpoint.url}/health", 5):
                self.start_seconds = time.perf_counter() - begin
                return
            time.sleep(0.2)
        last = read_last_lines(self.log, 5)
        raise CheckFailed(f"vllm serve gave no answer within {limit:.0f} s: {last}")

    def _command(self) -> list[str]:
        beside_python = str(Path(sys.executable).parent)
        program = shutil.which("vllm", path=beside_python) or "vllm"
        command = [program, "serve", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--served-model-name",
            "tiny",
            "--enable-prefix-caching",
            "--seed",
            "0",
        ]
        return command + list(self.flags)

    def stop(self, limit: float) -> int:
        """Send SIGTERM, and return the exit status.

        Args:
            limit: Seconds to wait for the server, and then for the processes that it started.

        Raises:
            CheckFailed: The server does not end, or leaves a process.
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
        """Kill the server and the processes that it started."""
        self._reserved.close()
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


def in_child(task: str, folder: Path, *arguments: str) -> dict:
    """Run a task of tiny_llama in a child process, and return its answer.

    Args:
        task: "make", "generate" or "score".
        folder: Folder of the model.
        *arguments: Further arguments; see tiny_llama.

    Raises:
        CheckFailed: The task failed, or takes more than _START_LIMIT seconds; the message has the
            end of its log.
    """
    search_path = os.pathsep.join(filter(None, sys.path))
    command: list[str | Path] = [
        sys.executable,
        "-P",  # otherwise, libraries would be imported from the current folder
        "-m",
        "strix_validate.serving.tiny_llama",
        task,
        folder,
        *arguments,
    ]
    variables = os.environ | _NETWORK_OFF | {"PYTHONPATH": search_path}
    try:
        process = subprocess.run(command, env=variables, capture_output=True, timeout=_START_LIMIT)
    except subprocess.TimeoutExpired as error:
        last = _last_lines(error.stderr)
        raise CheckFailed(f"{task} did not end within {_START_LIMIT} s: {last}") from None
    last = _last_lines(process.stderr)
    require(process.returncode == 0, f"{task} ended with status {process.returncode}: {last}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def _last_lines(log: bytes | None) -> str:
    """Return the last three lines of a log; None is an empty log."""
    lines = (log or b"").decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])
