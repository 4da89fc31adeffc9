# SPDX-License-Identifier: BSD-3-Clause
"""vLLM 0.33.0 accepts each command line of `vllm serve` that `models` prints.

vLLM refuses to start if one request of the model's length does not fit into the cache. The tests
apply vLLM's arithmetic to each line. This arithmetic is in _max_memory_usage_bytes_from_groups and
in its callers (_check_enough_kv_cache_memory, get_kv_cache_configs) of
v1/core/kv_cache_planning.py, with the sizes of v1/kv_cache_interface.py. With VLLM_SOURCE set,
vLLM's own code, including its argument parser, judges the lines (serve_lines.py).
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from calls import skip_without
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, MemoryBudget
from strix_validate.layers.parts import find_text, list_layers
from strix_validate.models import answer, serving
from test_model_counts import CONFIGS as PLAIN
from test_models import CASES, CONFIGS

TESTS = Path(__file__).parent
ALL = PLAIN | CASES
#: GiB that the GPU may use, on machines with 32, 64, 96 and 128 GiB.
MACHINES = (24, 56, 88, 120)
#: Number of tokens in a block of the KV cache, and in a chunk into which vLLM cuts a prompt.
BLOCK, CHUNK = 16, 2048


def find_arguments(name: str, gib: int, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """Return the arguments printed for a model on a machine, or None if it cannot start."""
    budget = MemoryBudget(gib * GIB, gib * GIB, True)
    monkeypatch.setattr(answer, "read_memory_budget", lambda tree: budget)
    result = answer.answer(ALL[name], None, None)
    line = answer.describe("MODEL", result, Tree())[-1]
    if result.refusal or "vllm serve MODEL" not in line:
        return None
    assert line.startswith("  here")
    arguments = line.split("vllm serve MODEL ")[1].split(", room")[0]
    tools = [" " + result.parsers[0]] if result.parsers[0] else []
    return shlex.split(arguments + "".join(tools))


def flags(arguments: list[str]) -> dict[str, str]:
    """Return the values of a line's flags."""
    return dict(zip(arguments[::2], arguments[1::2], strict=False))


def count_cache_bytes(config: dict, length: int) -> int:
    """Return the bytes of cache that vLLM needs for one request, including a null block."""
    text = find_text(config)
    kinds: dict[tuple, int] = {}
    for layer in list_layers(text):
        page = describe_page(text, layer.mixer)
        if page:
            kinds[page] = kinds.get(page, 0) + 1
    if not kinds:
        return 0
    # vLLM divides the layers of each kind into groups of equal size. This size is the count of the
    # rarest kind, or that of the most frequent kind if it is less than 1.5 times as large. The last
    # group of a kind is padded.
    size = min(kinds.values())
    if max(kinds.values()) < 1.5 * size:
        size = max(kinds.values())
    largest = max(page for page, _ in kinds)
    blocks = 1
    for (_, window), count in kinds.items():
        tokens = min(window - 1 + CHUNK, length) if window else length
        blocks += math.ceil(count / size) * (math.ceil(tokens / BLOCK) + bool(window))
    return blocks * size * largest


def describe_page(text: dict, mixer: str) -> tuple[int, int] | None:
    """Return the bytes of a block of 16-bit numbers, and the window; None if nothing is cached."""
    if mixer in ("linear_attention", "mamba", "conv", ""):
        return None
    if rank := text.get("kv_lora_rank"):
        return 2 * BLOCK * (rank + text["qk_rope_head_dim"]), 0
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    window = text.get("sliding_window") if mixer == "sliding_attention" else 0
    return 2 * 2 * BLOCK * heads * size, int(window or 0)


def refusal(config: dict, arguments: list[str]) -> str:
    """Return the start of vLLM's error message for a line, or "" if vLLM accepts the line."""
    options = flags(arguments)
    cache = int(options["--kv-cache-memory-bytes"].removesuffix("G")) * GIB
    text = find_text(config)
    if "type_vocab_size" in text or "encoder_layers" in text:
        return ""
    max_length = options.get("--max-model-len") or str(serving.read_length(config))
    length = 1 if max_length == "auto" else int(max_length)
    if count_cache_bytes(config, length) > cache:
        return f"To serve at least one request with the model's max seq len ({length})"
    return ""


def list_lines(
    machines: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, int], list[str]]:
    """Return the arguments by model and machine, for the models that can start."""
    lines = {}
    for name, gib in product(ALL, machines):
        line = find_arguments(name, gib, monkeypatch)
        if line:
            lines[name, gib] = line
    return lines


def test_vllm_takes_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list_lines(MACHINES, monkeypatch)
    assert len(lines) > 250
    refusals = {key: refusal(ALL[key[0]], line) for key, line in lines.items()}
    assert {key: message for key, message in refusals.items() if message} == {}
    # Not every line has --max-model-len. Many lines that have it would be refused without it.
    short = {key: line for key, line in lines.items() if "--max-model-len" in line}
    assert 20 < len(short) < len(lines)
    refused = []
    for (name, gib), line in short.items():
        without_length = [x for x in line if x not in ("--max-model-len", "auto")]
        if refusal(ALL[name], without_length):
            refused.append((name, gib))
    assert len(refused) > 20


def test_a_cache_below_the_models_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lemonade-sdk/vllm-rocm#5, the line set no length, and vLLM refused to start."""
    line = find_arguments("Gemma-4-31B", 88, monkeypatch)
    assert line
    assert flags(line)["--max-model-len"] == "auto"
    assert "--max-model-len" not in (find_arguments("Qwen3-8B", 88, monkeypatch) or [])


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 131072),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": None}, 2048),
        ({"model_max_length": 300_000}, 300_000),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 524288),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, 131072),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 262144),
        (
            {
                "rope_scaling": {"type": "longrope", "factor": 2.0},
                "original_max_position_embeddings": 8192,
            },
            8192,
        ),
    ],
)
def test_the_length_of_a_model(keys: dict, length: int) -> None:
    """vLLM's _get_and_verify_max_len (vllm/config/model.py) derives these lengths, too."""
    assert serving.read_length(CONFIGS["Llama-3.1-8B"] | keys) == length


@pytest.mark.parametrize(("value", "length"), [("1000", 1000), ("1e30", 131072), ("{", 131072)])
def test_a_tokenizer_may_shorten_a_model(value: str, length: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": {value}}}')
    assert serving.read_length(CONFIGS["Llama-3.1-8B"], tmp_path) == length


@pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
@skip_without("transformers", "compressed_tensors", "xgrammar")
def test_vllms_own_code_takes_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list_lines([int(os.environ.get("VLLM_LINES_GIB", "88"))], monkeypatch)
    source = os.environ["VLLM_SOURCE"]
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, TESTS / "serve_lines.py", source],
        input=json.dumps([[ALL[name], line] for (name, _), line in lines.items()]),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    messages = dict(zip(lines, json.loads(done.stdout), strict=True))
    refused = {key: message for key, message in messages.items() if message}
    assert not refused, f"{len(refused)} of {len(lines)}"
