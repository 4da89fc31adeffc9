# SPDX-License-Identifier: BSD-3-Clause
"""Read the files of the small models with code that did not write them. vLLM does not run here.

Set VLLM_SOURCE to a folder of vLLM's source to look the models up in vLLM's registries.
"""

import ast
import json
import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from strix_validate.serving import tiny_models
from strix_validate.serving.tiny_llama import PROMPT
from strix_validate.serving.tiny_models import MODELS
from strix_validate.serving.vllm_server import in_child

REAL = Path(os.environ.get("VLLM_SOURCE", ""))


def unpack_int4(stored):
    """Unpack as compressed-tensors does: number i of an int32 is bits 4i to 4i + 3, minus 8."""
    packed = stored["_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([(packed >> shift) % 16 for shift in range(0, 32, 4)], -1).flatten(-2) - 8
    assert list(codes.shape) == stored["_shape"].tolist()
    return codes * stored["_scale"].float().repeat_interleave(32, 1)


def unpack_fp8(stored):
    scale = torch.kron(stored["_scale_inv"], torch.ones(128, 128))
    return stored[""].float() * scale


def unpack_mxfp4(stored):
    """Unpack OCP's MXFP4. Each half of a byte is a number in e2m1, and the low half comes first."""
    blocks = stored["_blocks"].int()
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2)
    sign = 1 - 2 * (codes // 8)
    exponent = codes // 2 % 4
    mantissa = codes % 2
    low = mantissa * 0.5
    high = (1 + mantissa * 0.5) * torch.exp2(exponent - 1.0)
    values = sign * torch.where(exponent == 0, low, high)
    scaled = values * torch.exp2(stored["_scales"].float() - 127)[..., None]
    return scaled.flatten(-2).transpose(1, 2)


def unpack_q4_0(stored):
    """Unpack llama.cpp's Q4_0.

    A block is a float16 and 16 bytes. The low halves of the bytes are the numbers 0 to 15, and the
    high halves are the numbers 16 to 31.
    """
    blocks = stored[""].unflatten(1, (-1, 18))
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    codes = torch.cat([blocks[..., 2:] % 16, blocks[..., 2:] // 16], -1).int() - 8
    return (codes * scale).flatten(1)


UNPACK = {
    tiny_models.int4: (unpack_int4, (256, 512), "x_proj.weight", 1 / 7),
    tiny_models.fp8: (unpack_fp8, (256, 384), "x_proj.weight", 1 / 16),
    tiny_models.mxfp4: (unpack_mxfp4, (2, 64, 96), "experts.down_proj", 1 / 3),
    tiny_models.q4_0: (unpack_q4_0, (256, 512), "x_proj.weight", 1 / 7),
}


@pytest.mark.parametrize("quantize", UNPACK, ids=lambda quantize: quantize.__name__)
def test_what_is_written_is_what_the_reference_computes_with(quantize):
    unpack, shape, name, step = UNPACK[quantize]
    if quantize is tiny_models.q4_0:
        pytest.importorskip("gguf", reason="gguf is not installed")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, values = quantize(name, weight)
    torch.testing.assert_close(unpack(stored), values)
    # The values differ from the weight only by rounding.
    assert 0 < (values - weight.float()).abs().max() < step * weight.float().abs().max()
    first = next(iter(stored))
    spoilt = stored | {first: stored[first].flip(0)}
    assert not torch.allclose(unpack(spoilt), values)
    assert quantize("model.norm.weight", weight[0]) is None


def find_unlisted(quantization, tensors):
    """Return the unquantized matrices that are not in a quantization's list of exceptions.

    vLLM would read these matrices as quantized matrices, but they have no scales.
    """
    exceptions = quantization.get("ignore") or quantization.get("modules_to_not_convert", [])
    matrices = {
        key.removesuffix(".weight")
        for key, tensor in tensors.items()
        if key.endswith(".weight") and tensor.dim() == 2 and tensor.dtype == torch.bfloat16
    }
    matrices.discard("model.embed_tokens")
    return {key for key in matrices if not any(is_match(name, key) for name in exceptions)}


def is_match(name, key):
    """Return whether an exception names a module or a parent of the module."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), key)
    return fnmatch(key, name) or fnmatch(key, f"{name}.*")


def test_a_gate_that_is_not_left_out_is_found():
    gate = {"model.layers.0.mlp.gate.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}
    assert find_unlisted({"modules_to_not_convert": ["lm_head"]}, gate)
    assert not find_unlisted({"modules_to_not_convert": ["model.layers.*.mlp"]}, gate)
    assert not find_unlisted({"ignore": ["re:.*mlp.gate$"]}, gate)
    assert find_unlisted({"ignore": ["re:.*self_attn.*"]}, gate)


def test_the_reference_is_transformers_own(monkeypatch, tmp_path):
    """fla must not be imported, because transformers would use its GPU kernels."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    (tmp_path / "fla.py").write_text("raise SystemExit('fla is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(in_child("make", tmp_path / "model", "gdn")["logprobs"]) == 512


def test_the_small_llama_scores_a_token_as_it_was_made_with(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    logprobs = in_child("make", tmp_path / "model")["logprobs"]
    scored = in_child("score", tmp_path / "model", "[7, 9]")
    assert scored["logprobs"][0] == pytest.approx(logprobs[7], abs=1e-4)
    assert scored["best"][0] == pytest.approx(max(logprobs), abs=1e-4)
    assert len(scored["best"]) == 2


@pytest.mark.parametrize("name", MODELS)
def test_files_are_loadable(name, tmp_path, monkeypatch):
    # The program makes the files in a process that cannot import fla.
    monkeypatch.setitem(sys.modules, "fla", None)
    model = MODELS[name]
    if model.plugin:
        pytest.importorskip("gguf", reason="gguf is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    logprobs = torch.tensor(tiny_models.make(name, tmp_path, PROMPT)["logprobs"])
    assert len(logprobs) == 512
    assert abs(logprobs.exp().sum() - 1) < 1e-4
    assert -4 < logprobs.max() < -0.1, (
        "if all tokens are about as likely, any token passes the check; if one token is certain, "
        "wrong logits pass"
    )
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.architectures) == (model.kind, [model.architecture])
    config_json = json.loads((tmp_path / "config.json").read_text())
    assert config_json.get("quantization_config") == model.quantization
    if model.plugin:
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", tiny_models.GGUF}
        return
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    quantized = {key for key in tensors if key.endswith(("_packed", "_scale_inv", "_blocks"))}
    assert bool(quantized) == bool(model.quantization)
    assert not any(key.endswith(".weight") and f"{key}_packed" in tensors for key in tensors)
    assert not (model.quantization and find_unlisted(model.quantization, tensors))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_gguf_files_heads_are_interleaved(tmp_path):
    """In each head of q and k, the file has rows i and i + head_dim / 2 as rows 2i and 2i + 1."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = SimpleNamespace(num_hidden_layers=1, head_dim=64)
    rows = torch.arange(128)[:, None].expand(128, 18).to(torch.uint8).contiguous()
    tensors = {f"model.layers.0.self_attn.{name}_proj.weight": rows for name in "qkv"}
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    tiny_models.write_gguf(tmp_path / "model.gguf", config, tensors)
    stored = {x.name: x for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    interleaved = [row for i in range(32) for row in (i, i + 32)]
    expected = interleaved + [64 + row for row in interleaved]
    assert stored["blk.0.attn_q.weight"].data[:, 0].tolist() == expected
    assert stored["blk.0.attn_k.weight"].data[:, 0].tolist() == expected
    assert stored["blk.0.attn_v.weight"].data[:, 0].tolist() == list(range(128))
    assert {x.name: x.tensor_type.name for x in stored.values()} == {
        "blk.0.attn_q.weight": "Q4_0",
        "blk.0.attn_k.weight": "Q4_0",
        "blk.0.attn_v.weight": "Q4_0",
        "output_norm.weight": "F32",
    }


@pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
@pytest.mark.parametrize("name", MODELS)
def test_vllm_knows_architecture_and_quantization(name):
    """The test reads the source of vLLM's registries, and imports nothing of vLLM."""
    model = MODELS[name]
    layers = REAL / "vllm" / "model_executor"
    registry = ast.parse((layers / "models" / "registry.py").read_text())
    keys = {node.value for node in ast.walk(registry) if isinstance(node, ast.Constant)}
    assert model.architecture in keys
    assert "NoSuchForCausalLM" not in keys
    source = ast.parse((layers / "layers" / "quantization" / "__init__.py").read_text())
    methods = next(
        ast.literal_eval(node.value.slice)
        for node in source.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "QuantizationMethods"
    )
    if model.quantization:
        assert model.quantization["quant_method"] in methods
