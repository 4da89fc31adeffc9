# SPDX-License-Identifier: BSD-3-Clause
"""How fast a running server is. No check fails by it."""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import Endpoint

#: Requests at a time that are measured.
LOADS = (1, 4, 16)
#: Requests, and how many at a time; tokens that each has and gets.
_REQUESTS, _LOAD, _READ, _WRITTEN = 32, 16, 512, 64
#: Of its result, what is kept; times are in milliseconds.
_KEPT = (
    "completed", "failed", "request_throughput", "output_throughput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
)  # fmt: skip


def measure(server: Endpoint, load: int, prompts: Sequence, number: int = 64) -> dict:
    """Measure the time to the first token, and tokens a second, of so many requests at a time.

    Other prompts each time: what a prefix cache holds would take no time.
    """
    numbered = [f"{time.time_ns()} {prompts[i % len(prompts)]}" for i in range(load)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        found = list(pool.map(lambda prompt: server.stream(prompt, number), numbered))
    taken = time.perf_counter() - begin
    require(all(each.seconds for each in found), "a stream had no tokens")
    return {
        "first_token_ms": 1e3 * statistics.median(each.seconds[0] for each in found),
        "tokens_per_second": sum(len(each.tokens) for each in found) / taken,
        "requests": load,
    }


def bench_serve(server: Endpoint) -> dict:
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
        # without a limit of ours: vllm's requests end after six hours
        ended = subprocess.run(command, capture_output=True, text=True)
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
