# SPDX-License-Identifier: BSD-3-Clause
"""What `vllm bench serve` measures of a running server, where vLLM is installed."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import LIMIT, Endpoint

#: Requests, and how many at a time; tokens that each has and gets.
_REQUESTS, _LOAD, _READ, _WRITTEN = 32, 16, 512, 64
#: Of its result, what is kept; times are in milliseconds.
_KEPT = (
    "completed", "failed", "request_throughput", "output_throughput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
)  # fmt: skip


def measure(server: Endpoint) -> dict:
    """Run `vllm bench serve`, and return its numbers under its own names.

    Raises:
        CannotRun: there is no command vllm. CheckFailed: it ends with an error, or a request did.
    """
    program = shutil.which("vllm")
    if program is None:
        raise CannotRun("vllm is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program, "bench", "serve", "--base-url", server.url, "--model", server.model,
            "--dataset-name", "random", "--random-input-len", str(_READ),
            "--random-output-len", str(_WRITTEN), "--num-prompts", str(_REQUESTS),
            "--max-concurrency", str(_LOAD), "--ignore-eos", "--disable-tqdm", "--save-result",
            "--result-dir", folder, "--result-filename", "found.json",
        ]  # fmt: skip
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"vllm bench serve took more than {LIMIT:.0f} s") from error
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
            raise CheckFailed(f"vllm bench serve ended with {ended.returncode}: {' '.join(last)}")
        try:
            found = json.loads(Path(folder, "found.json").read_bytes())
            kept = {name: float(found[name]) for name in _KEPT if name in found}
            done = int(found["completed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckFailed(f"vllm bench serve wrote no result: {error!r:.200}") from error
    require(done == _REQUESTS, f"{done} of {_REQUESTS} requests of vllm bench serve were answered")
    return kept
