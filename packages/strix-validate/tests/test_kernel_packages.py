# SPDX-License-Identifier: BSD-3-Clause
"""How packages of kernels are written and listed, and which kernels the command `warm` compiles."""

import hashlib
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import strix_emulate
import torch
from models import CONFIGS, FORMATS
from strix_validate import cli, testing
from strix_validate.doctor import kernel_lists
from strix_validate.layers.config import read_layers
from strix_validate.layers.table import Attention
from strix_validate.precompiled import costs, flash_calls, warm, workload
from strix_validate.precompiled import packages as kernel_packages
from strix_validate.triton.modes import CallAnswer, CallAnswers, CompiledKernel
from strix_validate.triton.stand_in import Lookup
from strix_validate.vllm.experts import Experts, mixture
from typer.testing import CliRunner

#: A matrix product in the intermediate code of Triton 3.7.1.
PRODUCT = (
    "%4 = tt.dot %x, %y, %c : "
    "tensor<16x16xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 16}>> * "
    "tensor<16x16xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 16}>> -> "
    "tensor<16x16xf32, #mma>\n"
)
META = {"extern_libs": [["ocml", "/build/lib/ocml.bc"]], "shared": 64}


def lookup(folder: Path, key: str = "KEY", compiled: bool = True) -> Lookup:
    """Return a kernel in Triton's cache, with files of stages that no package needs."""
    place = folder / key
    place.mkdir(parents=True, exist_ok=True)
    files = {
        "k.hsaco": b"\x7fELF code",
        "k.json": json.dumps(META).encode(),
        "k.amdgcn": b"v_wmma_f32_16x16x16_f16 v[0:7]",
        "k.ttir": b"module",
        "k.ttgir": PRODUCT.encode(),
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    paths = {name: str(place / name) for name in files}
    types = {"x": "*fp16:16", "n": "i32"}
    return Lookup("k", key, types, {"BLOCK": "64"}, {"num_warps": 4}, paths, compiled)


def metadata(*_) -> dict:
    """Return the AMDGPU note of a code object with one kernel."""
    kernel = {
        ".vgpr_count": 200,
        ".sgpr_count": 40,
        ".vgpr_spill_count": 3,
        ".sgpr_spill_count": 1,
        ".private_segment_fixed_size": 16,
        ".group_segment_fixed_size": 1024,
        ".max_flat_workgroup_size": 128,
        ".wavefront_size": 32,
    }
    return {"amdhsa.kernels": [kernel]}


@pytest.mark.parametrize(
    "layout, number, lost",
    [
        ("mma", "f16", []),
        ("mma1", "bf16", []),
        ("blocked", "f16", ["f16"]),
        ("blocked2", "i8", ["i8"]),
        ("blocked", "f32", []),  # the matrix unit has no products of float32
    ],
)
def test_a_product_without_the_matrix_unit_is_found(layout: str, number: str, lost: list) -> None:
    text = PRODUCT.replace("#mma", f"#{layout}").replace("xf16", f"x{number}")
    assert costs.find_lost_products(text) == lost


def test_a_kernel_that_lost_the_matrix_unit_is_not_packaged(tmp_path: Path) -> None:
    kernel = lookup(tmp_path / "cache")
    Path(kernel.files["k.ttgir"]).write_text(PRODUCT.replace("#mma", "#blocked"))
    with pytest.raises(
        kernel_packages.LostProduct, match="k BLOCK=64 num_warps=4: 1 products of f16"
    ):
        kernel_packages.write(tmp_path / "package", [kernel])
    assert not (tmp_path / "package").exists()


def test_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strix_emulate, "elf_metadata", metadata, raising=False)
    monkeypatch.setattr("elftools.elf.elffile.ELFFile", lambda stream: stream)
    package = tmp_path / kernel_lists.FOLDER / "some-kernels"
    assert kernel_packages.write(package, [lookup(tmp_path / "cache")]) == 1
    (kernel,) = kernel_lists.read_lists(tmp_path)["some-kernels"].values()
    assert sorted(kernel["files"]) == ["k.hsaco", "k.json"]
    assert kernel["cost"] == {
        "vgprs": 200,
        "sgprs": 40,
        "vgpr_spills": 3,
        "sgpr_spills": 1,
        "scratch": 16,
        "lds": 1024 + META["shared"],
        "waves": 7,
        "wmma": 1,
    }
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    assert testing.packaged_kernels("some-kernels") == (package, {"KEY": kernel})
    for name, digest in kernel["files"].items():
        content = (package / "KEY" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert b"/build" not in content
    assert kernel_lists.describe(kernel) == "k(*fp16:16, i32) BLOCK=64 num_warps=4"
    done = CliRunner().invoke(cli.app, ["list", "--kernels"])
    assert done.exit_code == 0
    assert "some-kernels: 1 kernels\n    k(*fp16:16, i32)" in done.output


@pytest.mark.parametrize(
    ("set_name", "shipped"), [("sample", "sample"), ("core", "full"), ("full", "full")]
)
def test_each_set_of_the_triton_packages(
    set_name: str, shipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These packages have no set `core`. If kernels_set is `core`, their full set is compiled."""
    package = SimpleNamespace(
        MODULE="pytest", SHIPPED={"sample": [("s", "a")], "full": [("f", "b")]}
    )
    monkeypatch.setattr(kernel_packages, "SHIPPING", (package,))
    monkeypatch.setattr(kernel_packages, "defer", lambda build, dtype: (build, dtype))
    calls = kernel_packages.list_calls("triton-packages", set_name, "")
    assert calls == package.SHIPPED[shipped]


@pytest.mark.parametrize("library", ["flash-attn", "vllm", "triton-packages"])
def test_an_unknown_set_of_kernels_is_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["packages", library, "all", str(tmp_path / "kernels"), str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="no set 'all' of kernels; the sets are: sample, core, f"):
        runpy.run_path(kernel_packages.__file__, run_name="__main__")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "vllm: no source was passed"),
        ([""], "vllm: no source was passed"),
        (["other"], "other has no vllm/platforms"),
    ],
)
def test_vllm_is_not_searched_in_the_current_folder(
    source: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "platforms").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    arguments = ["packages", "vllm", "core", str(tmp_path / "kernels"), *source]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(kernel_packages.__file__, run_name="__main__")


@pytest.mark.parametrize("content", ["", "[]", '{"kernels": 3}', '{"other": {}}'])
def test_damaged_list(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / kernel_lists.FOLDER / "some-kernels" / kernel_lists.LIST
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert kernel_lists.read_lists(tmp_path) == {}
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    assert CliRunner().invoke(cli.app, ["list", "--kernels"]).exit_code == 3


def test_answers_come_in_the_order_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring calls run in different processes, but their answers keep the order."""
    batches = []

    def run(calls: list[str], mode: str, cache: Path, variables: None) -> CallAnswers:
        batches.append(calls)
        return CallAnswers("", [CallAnswer(kernel_keys=(call,)) for call in calls])

    monkeypatch.setattr(kernel_packages.triton_modes, "run", run)
    calls: list = [str(i) for i in range(2 * kernel_packages.BATCH + 3)]
    answers = kernel_packages.look_up(calls, tmp_path, jobs=1)
    assert [answer.kernel_keys for answer in answers] == [(call,) for call in calls]
    assert len(batches) == 3
    assert batches[0][:3] == ["0", "3", "6"]
    assert kernel_packages.look_up([], tmp_path) == []


def test_a_sample_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of n calls has the kernels of the first n calls. None of these calls may fail."""
    answers = [CallAnswer(kernels=(CompiledKernel("k", b"", "", n),)) for n in range(3)]
    monkeypatch.setattr(
        kernel_packages.triton_modes,
        "run",
        lambda calls, mode: CallAnswers("", answers[: len(calls)]),
    )
    assert [kernel.launch_lds for kernel in testing.compile_sample(3)] == [0, 1, 2]
    answers[1] = CallAnswer(error=("OutOfResources", "LDS"))
    assert len(testing.compile_sample(1)) == 1
    with pytest.raises(RuntimeError, match="LDS"):
        testing.compile_sample(3)


def test_a_wrong_result_of_flash_attn_is_told() -> None:
    tensors = [torch.randn(1, 9, 2, 16, dtype=torch.float16) for _ in range(4)]
    call, expected = testing.flash_attention(*tensors, causal=True)
    correct = expected(call.dtype)
    assert testing.find_flash_fault(call, correct, expected)[0] == ""
    wrong_results = correct | {"dk": correct["dk"] * 1.1}
    assert testing.find_flash_fault(call, wrong_results, expected)[0] == "wrong: dk"


def test_origins(tmp_path: Path) -> None:
    shipped = lookup(tmp_path / kernel_lists.FOLDER / "some-kernels", compiled=False)
    answers = [
        CallAnswer(lookups=(shipped, shipped, lookup(tmp_path / "cache", "A"))),
        CallAnswer(lookups=(lookup(tmp_path / "cache", "B", compiled=False),)),
    ]
    counts = kernel_packages.count_origins(answers, tmp_path)
    assert counts == {"packages": 2, "compiled": 1, "cache": 1}


@pytest.mark.parametrize(("kind", "size"), [({}, 2), ({"block": 128}, 1), ({"group": 128}, 0.5)])
def test_both_products_of_experts_are_launched(
    kind: dict, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the launches have as many bytes as the model's weights."""
    launched = []
    module = MagicMock(invoke_fused_moe_triton_kernel=lambda x, w, *_, **__: launched.append(w))
    module.invoke_fused_moe_wna16_triton_kernel = module.invoke_fused_moe_triton_kernel
    module._prepare_expert_assignment.return_value = ()
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe", module)
    call, _ = mixture(
        lambda *x: torch.zeros(x).bfloat16(), layer=Experts(4, 2, 256, 128, **kind), tokens=3
    )
    call.launch(**call.tensors, **call.options)
    assert [weight.nbytes for weight in launched] == [4 * 256 * n * size for n in (256, 128)]


LLAMA = CONFIGS["Llama-3.1-8B"]
QWEN = CONFIGS["Qwen3-30B-A3B"]


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"sliding_window": 512, "use_sliding_window": False, "dtype": "float32"}, torch.bfloat16),
    ],
)
def test_layers_of_a_model(change: dict, dtype: torch.dtype) -> None:
    layers = read_layers(LLAMA | change)
    assert (layers.attention, layers.dtype) == ([Attention(32, 8, 128)], dtype)


INT4 = {"bits": 4, "group_size": 128}
EXPERTS = Experts(128, 8, 2048, 768)
INT4_WITHOUT_ZEROS = Experts(128, 8, 2048, 768, 128)
INT4_WITH_ZEROS = Experts(128, 8, 2048, 768, 128, zeros=True)
FP8_EXPERTS = Experts(128, 8, 2048, 768, block=128)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (LLAMA, []),
        (QWEN, [EXPERTS]),
        (QWEN | {"moe_intermediate_size": None}, [Experts(128, 8, 2048, 6144)]),
        ({"text_config": QWEN, "quantization_config": INT4}, [Experts(128, 8, 2048, 768, 128)]),
        (QWEN | {"quantization_config": INT4 | {"zero_point": True}}, [INT4_WITH_ZEROS]),
        (QWEN | {"quantization_config": INT4 | {"sym": False}}, [INT4_WITH_ZEROS]),
        (QWEN | {"quantization_config": {"quant_method": "mxfp4"}}, []),
        (QWEN | {"quantization_config": {"quant_method": "fp8", "bits": 8}}, []),
        ({"text_config": QWEN | {"quantization_config": INT4}}, [INT4_WITHOUT_ZEROS]),
    ],
)
def test_experts_of_a_model(config: dict, experts: list) -> None:
    layers = read_layers(config)
    assert layers.experts == experts
    assert layers.lacks_experts == (config != LLAMA and not experts)


def group(weights: dict, **change: object) -> dict:
    """Return a quantization_config of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "input_activations": None} | change},
    }


W4A16 = FORMATS["w4a16"]["config_groups"]["group_0"]["weights"]
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MIXED = {"config_groups": {"a": {"weights": W4A16}, "b": {"weights": W4A16 | {"num_bits": 8}}}}


@pytest.mark.parametrize(
    ("quantization", "experts"),
    [
        (FORMATS["w4a16"], INT4_WITHOUT_ZEROS),
        (FORMATS["w4a16 asymmetric"], INT4_WITH_ZEROS),
        (group(FP8_BLOCKS | {"block_structure": [128, 128]}), FP8_EXPERTS),
        (group(FP8_BLOCKS | {"block_structure": [1, 128]}), None),
        (group(W4A16 | {"actorder": "group"}), None),
        (group(W4A16 | {"actorder": "static"}), INT4_WITHOUT_ZEROS),
        (MIXED, None),
        (GPTQ, INT4_WITHOUT_ZEROS),
        (GPTQ | {"desc_act": True}, None),
        (GPTQ | {"group_size": -1}, None),
        (GPTQ | {"dynamic": {"-:.*attn.*": {}}}, INT4_WITHOUT_ZEROS),
        (FORMATS["w4a16"] | {"ignore": ["re:.*mlp.experts.*"]}, EXPERTS),
        (FORMATS["w8a16"] | {"ignore": ["re:.*mlp.experts.*"]}, EXPERTS),
        (FORMATS["w4a16"] | {"ignore": ["mtp.layers.0.mlp.experts"]}, INT4_WITHOUT_ZEROS),
        (FORMATS["fp8-blocks"], FP8_EXPERTS),
        (FORMATS["w8a16"], None),
        (FORMATS["w4a16-channels"], None),
        (FORMATS["w4a8"], None),
        (FORMATS["w8a8"], None),
        (FORMATS["fp8"], None),
        (FORMATS["mxfp8"], None),
        (FORMATS["mxfp8 of compressed-tensors"], None),
        (FORMATS["nvfp4"], None),
        (FORMATS["modelopt nvfp4"], None),
        (FORMATS["quark int4"], None),
    ],
)
def test_experts_by_format(quantization: dict, experts: Experts | None) -> None:
    layers = read_layers(QWEN | {"quantization_config": quantization})
    assert layers.experts == ([experts] if experts else [])
    assert layers.lacks_experts == (experts is None)


@pytest.mark.parametrize(
    ("form", "known"), [("w4a16", [INT4_WITHOUT_ZEROS, EXPERTS]), ("w8a16", [EXPERTS])]
)
def test_experts_of_some_layers_are_in_16_bits(form: str, known: list[Experts]) -> None:
    quantization = FORMATS[form] | {"ignore": [r"re:model\.layers\.[0-3]\..*"]}
    layers = read_layers(QWEN | {"quantization_config": quantization})
    assert layers.experts == known
    assert layers.lacks_experts == (form == "w8a16")


@pytest.mark.parametrize(("form", "is_left_out"), [("w4a16", False), ("w8a16", True)])
def test_warm_says_that_it_leaves_out_experts(
    form: str, is_left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm.vllm_calls.vllm_source, "find", lambda folder: tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN | {"quantization_config": FORMATS[form]}))
    estimate = warm.estimate_compilation(file, None, 1)
    assert estimate.startswith("all of vLLM's kernels for this model")
    assert ("the kernels of its experts are left out" in estimate) == is_left_out


@pytest.mark.parametrize(
    "change",
    [
        {"linear_key_head_dim": 32},
        {"linear_num_key_heads": 0},
        {"linear_conv_kernel_dim": 9},
        {"linear_value_head_dim": None},
        {"vocab_size": -1},
        {"vocab_size": "many"},
        {"num_attention_heads": 0},
        {"text_config": 3},
        {"sliding_window": "wide"},
        {"num_experts": "many"},
        {"num_experts_per_tok": None},
        {"quantization_config": {"bits": 4}},
        {"quantization_config": INT4 | {"ignore": ["re:("]}},
    ],
)
def test_wrong_layers_of_a_model(change: dict) -> None:
    hybrid = CONFIGS["Qwen3-Next-80B-A3B"]
    with pytest.raises(ValueError, match="no layers can be read from config.json"):
        read_layers(hybrid | change)


@pytest.mark.parametrize("config", ["", "[]", "{}"])
def test_no_model(tmp_path: Path, config: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(config)
    done = CliRunner().invoke(cli.app, ["warm", "--model", str(file)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_a_models_windows_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels for its window, Mistral's first call with flash-attn would compile."""
    monkeypatch.setattr(warm.packages, "has", lambda name: True)
    monkeypatch.setattr(flash_calls, "has_aiter", lambda: True)
    file = tmp_path / "config.json"
    for window, expected in ((4096, 3), (None, 1)):
        file.write_text(json.dumps({**LLAMA, "sliding_window": window}))
        calls = warm.calls(file, None)["flash-attn"]
        for function in ("fixed", "varlen", "kv_cache"):
            function_options = [
                call.build.keywords for call in calls if call.name.startswith(function)
            ]
            assert (
                len({options.get("window", (-1, -1)) for options in function_options}) == expected
            )


def test_the_workload() -> None:
    assert len(set(workload.LENGTHS)) == 40
    assert len(workload.SHAPES) == 4
    groups = {group for group, _ in workload.flash_workload()}
    assert len(groups) == 16
    assert len(list(workload.flash_workload())) == 16 * 40
