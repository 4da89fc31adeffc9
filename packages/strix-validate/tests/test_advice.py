# SPDX-License-Identifier: BSD-3-Clause
"""The advice of `models` about vLLM's parsers, speculative decoding and speeds."""

import json
import os
import re
from pathlib import Path

import pytest
from models import FORMATS, SHAPES, THREADS
from strix_validate.doctor.tree import Tree
from strix_validate.layers import defaults
from strix_validate.models import answer, serving, table
from test_model_counts import CONFIGS

ADVICE = serving.advice()
LLAMA = CONFIGS["Llama-3.1-8B"]


def test_each_parser_is_in_vllms_registries() -> None:
    for row in ADVICE["parsers"]:
        assert row["tool"] in ADVICE["registries"]["tool"], row
        assert row.get("reasoning", "qwen3") in ADVICE["registries"]["reasoning"], row
        flags = re.findall(r"--(tool-call|reasoning)-parser ([\w-]+)", row.get("note", ""))
        for kind, name in flags:
            assert name in ADVICE["registries"][kind.removesuffix("-call")], row


def test_each_family_is_one_of_transformers_or_vllms() -> None:
    """A family name that neither transformers nor vLLM has would never match a model."""
    kinds = [kind for row in ADVICE["parsers"] for kind in row["types"]]
    assert len(kinds) == len(set(kinds))
    # These names come from vLLM, or from the files of models.
    other_types = {"deepseek_v32", "kimi_k2", "mimo", "step3p5"}
    types = defaults.contents()["types"].keys() | other_types
    assert {*kinds, *ADVICE["speculation"]["mtp"]} <= types


@pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
def test_the_registries_are_vllms() -> None:
    source = Path(os.environ["VLLM_SOURCE"]) / "vllm"
    for name, folder in (("tool", "tool_parsers"), ("reasoning", "reasoning")):
        text = (source / folder / "__init__.py").read_text()
        names = re.findall(r'^    "([\w.-]+)": \(', text, re.MULTILINE)
        assert sorted(names) == ADVICE["registries"][name]
    speculative = (source / "config" / "speculative.py").read_text()
    for kind in ADVICE["speculation"]["mtp"]:
        assert f'"{kind}"' in speculative or f'"{kind}_mtp"' in speculative, kind
    methods = (source / "platforms" / "rocm.py").read_text()
    assert all(f'"{method}"' in methods for method in table.read_table()["methods"])


@pytest.mark.parametrize(
    ("name", "tool", "reasoning"),
    [
        ("Qwen3.6-35B-A3B", "qwen3_coder", "qwen3"),
        ("Qwen3-30B-A3B", "hermes", "qwen3"),
        ("gpt-oss-120b", "openai", "openai_gptoss"),
        ("GLM-4.7-Flash", "glm47", "glm47"),
        ("GLM-4.5-Air", "glm45", "glm45"),
        ("Gemma-4-31B", "gemma4", "gemma4"),
        ("Mistral-Small-3.2-24B", "mistral", ""),
        ("DeepSeek-V4-Flash", "deepseek_v4", "deepseek_v4"),
        ("Nemotron-3-Nano-30B-A3B", "qwen3_coder", "nemotron_v3"),
        ("Granite-4.0-H-Small", "granite4", ""),
        ("MiniMax-M2-AWQ", "minimax_m2", "minimax_m2"),
    ],
)
def test_parsers_by_family(name: str, tool: str, reasoning: str) -> None:
    flags, _ = serving.find_parsers(CONFIGS[name])
    words = f"--enable-auto-tool-choice --tool-call-parser {tool}"
    assert flags == words + f" --reasoning-parser {reasoning}" * bool(reasoning)


def test_no_parser_is_made_up() -> None:
    assert serving.find_parsers(CONFIGS["multilingual-e5-large"]) == ("", "")
    assert serving.find_parsers({"model_type": "new", "hidden_size": 1}) == ("", "")


def describe_answer(config: dict) -> str:
    return "\n".join(answer.describe("NAME", answer.answer(config, None, None), Tree()))


def test_drafts_of_a_hybrid_model_go_without_prefix_caching() -> None:
    """In hybrid models, drafts with prefix caching give wrong text and lose tool calls.

    See vllm-project/vllm#43559, vllm-project/vllm#53912 and vllm-project/vllm#47194.
    """
    text = describe_answer(SHAPES["Qwen3.6-35B-A3B"])
    assert '"method":"mtp"' in text
    assert "--no-enable-prefix-caching" in text
    assert "vllm#53912 is open" in text
    # Drafts from the prompt gave wrong text even without prefix caching: vllm-project/vllm#39273.
    assert '"method":"ngram"' not in text
    dense = describe_answer(SHAPES["GLM-4.5-Air"])
    assert '"method":"mtp"' in dense
    assert "prefix-caching" not in dense
    plain = describe_answer(CONFIGS["Llama-3.1-8B"])
    assert '"method":"ngram"' in plain
    assert '"method":"mtp"' not in plain
    for config in (SHAPES["Qwen3.6-35B-A3B"], CONFIGS["Llama-3.1-8B"]):
        for flags in serving.list_draft_flags(config):
            value = re.search(r"--speculative-config '(.*?)'", flags)
            assert value
            assert json.loads(value[1])["num_speculative_tokens"] > 0


def test_blocks_of_fp8_are_slow() -> None:
    """`models` warns that FP8 in blocks is slow: 0.5 tokens/s in lemonade-sdk/vllm-rocm#36.

    With weights of 8 bits in groups instead, a 27B model generates 3.7 tokens/s.
    """
    config = SHAPES["Qwen3.8-27B"]
    text = describe_answer(config | {"quantization_config": FORMATS["fp8-blocks"]})
    assert "0.5 tokens/s (27B)" in text
    assert "vllm-rocm#36" in text
    text = describe_answer(config | {"quantization_config": FORMATS["w8a16"]})
    assert "3.7 tokens/s (27B)" in text
    assert "ConchLinearKernel" in text


def test_each_speed_has_a_source_and_a_format() -> None:
    forms = {row.of for row in table.read_rows() if row.part in ("linear", "experts")}
    for row in ADVICE["speed"]:
        assert row["source"]
        assert set(row["formats"]) <= forms


#: For formats that vLLM refuses on gfx1151, the start of vLLM's message, and a part of the advice
#: about what to use instead.
REFUSED = {
    "fp8 static": ("Failed to find a kernel that can implement the ScaledMM", "FP8 in blocks"),
    "modelopt fp8": ("Failed to find a kernel that can implement the ScaledMM", "FP8 in blocks"),
    "quark fp8": ("Failed to find a kernel that can implement the ScaledMM", "FP8 in blocks"),
    "quark mxfp4": ("Failed to find a kernel that can implement the MXFP4", "gpt-oss"),
    "nvfp4, weights alone": ("Forced NVFP4 kernel", "W4A16"),
    "bitsandbytes of 4 bits": ("Unknown quantization method: bitsandbytes", "-e formats"),
    "exl3": ("Unknown quantization method: exl3", "GGUF"),
    "auto-round of 2 bits": ("INC quantization", "4 bits"),
    "gptq with desc_act": ("GPTQ group activation ordering", "desc_act=false"),
}
#: Formats that vLLM accepts on gfx1151, and the kernel that vLLM uses.
ACCEPTED = {
    "nvfp4": "EmulationNvFp4LinearKernel",
    "modelopt nvfp4": "EmulationNvFp4LinearKernel",
    "w8a8": "TritonInt8ScaledMMLinearKernel",
    "quark int8": "TritonInt8ScaledMMLinearKernel",
    "auto-round": "INCLinearMethod",
    "quark int4": "RDNAHybridW4A16LinearKernel",
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_format_that_is_refused_has_an_instead(form: str) -> None:
    words, instead = REFUSED[form]
    result = answer.answer(LLAMA | {"quantization_config": FORMATS[form]}, None, None)
    assert result.refusal.startswith(words)
    assert result.weights
    assert instead in "\n".join(answer.describe("NAME", result, Tree()))


@pytest.mark.parametrize("form", ACCEPTED)
def test_a_format_that_is_taken_has_a_kernel(form: str) -> None:
    """`models` accepts the formats of ROCm/vllm#958 and other issues, and names their kernels."""
    result = answer.answer(LLAMA | {"quantization_config": FORMATS[form]}, None, None)
    assert not result.refusal
    assert ACCEPTED[form] in result.parts["linear"]


def test_threads_that_were_right() -> None:
    """`models` accepts models that start in vLLM.

    Users started them in vllm#57712, vllm#49141 and kyuz0/amd-strix-halo-toolboxes#41. In
    lemonade#2368, vLLM 0.20 refuses AWQ with bfloat16, which vLLM 0.33 supports.
    """
    gemma = answer.answer(THREADS["Gemma-3-27B-QAT-W4A16"], None, None)
    assert "RDNAHybridW4A16LinearKernel" in gemma.parts["linear"]
    assert not gemma.refusal
    minimax = answer.answer(THREADS["MiniMax-M2-AWQ"], None, None)
    assert minimax.parts["experts"] == ["TritonWNA16Experts"]
    assert not minimax.refusal
    assert minimax.weights / 1e9 == pytest.approx(121, rel=0.02)
    experts = CONFIGS["Qwen3-30B-A3B"] | {"quantization_config": FORMATS["gptq"]}
    assert answer.answer(experts, None, None).parts["experts"] == ["TritonWNA16Experts"]
    awq = CONFIGS["Llama-3.1-8B"] | {"quantization_config": FORMATS["awq"]}
    assert awq["torch_dtype"] == "bfloat16"
    assert not answer.answer(awq, None, None).refusal
