# SPDX-License-Identifier: BSD-3-Clause
"""Measure how fast a running server is. A slow server fails no check."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strix_validate.checks import CannotRun, CheckFailed, require
from strix_validate.serving.endpoint import Endpoint
from strix_validate.serving.web import is_local

#: Numbers of concurrent requests that are measured.
LOADS = (1, 4, 16)
#: Number of requests of `vllm bench serve`, and how many of them are concurrent.
_REQUESTS = 32
_CONCURRENCY = 16
#: Numbers of tokens of the prompt and of the answer in each request of `vllm bench serve`.
_INPUT_TOKENS = 512
_OUTPUT_TOKENS = 64
#: Keys of the result of `vllm bench serve` that are recorded; times are in milliseconds.
_RECORDED = (
    "completed",
    "failed",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
)


def measure(
    server: Endpoint,
    load: int,
    prompts: Sequence,
    number: int = 64,
) -> dict:
    """Measure the time to the first token, and tokens per second.

    Args:
        server: The server.
        load: Number of concurrent requests.
        prompts: Texts, used in turn. The current time is put before each text, so that the prefix
            cache has none of the prompts.
        number: Tokens to generate for each request.
    """
    numbered = [f"{time.time_ns()} {prompts[i % len(prompts)]}" for i in range(load)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        answers = list(pool.map(lambda prompt: server.stream(prompt, number), numbered))
    elapsed = time.perf_counter() - begin
    require(all(answer.seconds for answer in answers), "a stream had no tokens")
    first_tokens = [answer.seconds[0] for answer in answers]
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "first_token_ms": 1e3 * statistics.median(first_tokens),
        "tokens_per_second": num_tokens / elapsed,
        "requests": load,
    }


def bench_serve(server: Endpoint, tokenizer: str = "") -> dict:
    """Run `vllm bench serve`, and return its numbers under its own names.

    Args:
        server: The server.
        tokenizer: The folder of the model's tokenizer; "" if the server's name for the model is
            also the name or the folder of the tokenizer.

    Raises:
        CannotRun: There is no command vllm.
        CheckFailed: The command or a request failed.
    """
    beside_python = str(Path(sys.executable).parent)
    program = shutil.which("vllm", path=beside_python) or shutil.which("vllm")
    if program is None:
        raise CannotRun("vllm is not installed here")
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder, "found.json")
        command = [
            program,
            "bench",
            "serve",
            *_bench_flags(server, tokenizer, result_file),
        ]
        # no time limit is needed, because vllm's own requests end after six hours
        variables = dict(os.environ)
        if is_local(server.url):
            variables["no_proxy"] = "*"
        process = subprocess.run(command, env=variables, capture_output=True, text=True)
        if process.returncode:
            output = process.stderr.strip() or process.stdout.strip()
            last = " ".join(output.splitlines()[-1:])
            raise CheckFailed(f"vllm bench serve ended with status {process.returncode}: {last}")
        try:
            result = json.loads(result_file.read_bytes())
            recorded = {name: float(result[name]) for name in _RECORDED if name in result}
            completed = int(result["completed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckFailed(f"vllm bench serve wrote no result: {error!r:.200}") from error
    require(
        completed == _REQUESTS,
        f"{completed} of {_REQUESTS} requests of vllm bench serve were answered",
    )
    return recorded


def _bench_flags(server: Endpoint, tokenizer: str, result_file: Path) -> list[str]:
    values = {
        "--base-url": server.base,
        "--model": server.model,
        "--tokenizer": tokenizer or server.model,
        "--dataset-name": "random",
        "--random-input-len": str(_INPUT_TOKENS),
        "--random-output-len": str(_OUTPUT_TOKENS),
        "--num-prompts": str(_REQUESTS),
        "--max-concurrency": str(_CONCURRENCY),
        "--result-dir": str(result_file.parent),
        "--result-filename": result_file.name,
    }
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result"]
    for flag, value in values.items():
        flags += [flag, value]
    return flags
