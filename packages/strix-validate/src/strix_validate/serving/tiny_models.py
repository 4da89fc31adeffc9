# SPDX-License-Identifier: BSD-3-Clause
"""Create small random models in the formats that people serve, without a network or a GPU.

Quantized weights have the layout of their format, and a GGUF file has the layout of llama.cpp's
converter. All else, such as config.json, is as transformers writes it. The reference is
transformers' output in float32 with the same weights, dequantized.

torch is imported only inside functions, because the checks of a running server need no torch, but
their tier imports this module.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

_VOCABULARY = 512
#: How many numbers share a scale in int4 and in fp4, and the side of the square blocks of fp8.
_INT4_GROUP = 32
_FP4_GROUP = 32
_FP8_BLOCK = 128
_WEIGHTS = "model.safetensors"
GGUF = "model.gguf"

_COMMON = {
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # this range is larger than the default, with which logits are so similar that any token passes
    # the checks
    "initializer_range": 0.08,
}
_SMALL = _COMMON | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_LLAMA = _COMMON | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 128,
}
#: A quantized weight: its tensors by the suffix that follows the weight's name, and its dequantized
#: float32 values.
_Quantized: TypeAlias = "tuple[dict[str, Tensor], Tensor]"


@dataclass(frozen=True)
class TinyModel:
    """A tiny model.

    Attributes:
        kind: transformers' model_type.
        architecture: Name of transformers' class.
        config: Keys of its config.json.
        bug: The bug that serving the model would catch.
        quantize: Returns the quantized weight for a weight's name and values, or None for a weight
            that stays in bfloat16.
        quantization: quantization_config of its config.json.
        plugin: Import name of the plugin that vLLM needs to read the model; "" for none.
    """

    kind: str
    architecture: str
    config: dict
    bug: str
    quantize: Callable[[str, Tensor], _Quantized | None] = lambda name, weight: None
    quantization: dict | None = None
    plugin: str = ""


def int4(name: str, weight: Tensor) -> _Quantized | None:
    """Quantize to compressed-tensors' pack-quantized W4A16.

    Eight numbers share an int32, and a group of numbers shares a scale.
    """
    import torch

    if not name.endswith("proj.weight"):
        return None
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, _INT4_GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (groups / scale.float()).round().clamp(-8, 7)
    nibbles = (codes + 8).long().view(rows, columns // 8, 8) << torch.arange(0, 32, 4)
    packed = nibbles.sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    tensors = {
        "_packed": packed,
        "_scale": scale.squeeze(-1),
        "_shape": torch.tensor([rows, columns]),
    }
    return tensors, (codes * scale.float()).view(rows, columns)


def fp8(name: str, weight: Tensor) -> _Quantized | None:
    """Quantize to FP8 in blocks of 128 by 128 with a scale each, as Qwen and DeepSeek do."""
    import torch

    if not name.endswith("proj.weight"):
        return None
    dtype = torch.float8_e4m3fn
    blocks = weight.float().view(len(weight) // _FP8_BLOCK, _FP8_BLOCK, -1, _FP8_BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(dtype).max
    of_rows = scale.repeat_interleave(_FP8_BLOCK, 0)
    of_weights = of_rows.repeat_interleave(_FP8_BLOCK, 1)
    codes = (weight.float() / of_weights).to(dtype)
    return {"": codes, "_scale_inv": scale}, codes.float() * of_weights


def mxfp4(name: str, weight: Tensor) -> _Quantized | None:
    """Quantize like gpt-oss's experts: each block of 32 fp4 numbers is scaled by a power of two.

    The shape of a weight is (experts, in, out).
    """
    import torch

    from strix_validate.vllm.mxfp4 import FP4

    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, _FP4_GROUP))
    power = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled = groups[..., None] / power.exp2()[..., None]
    codes = (scaled - FP4.float()).abs().argmin(-1)
    values = (FP4.float()[codes] * power.exp2()).flatten(-2).transpose(1, 2)
    low = codes[..., ::2]
    high = codes[..., 1::2]
    blocks = (low | high << 4).to(torch.uint8)
    scales = (power.squeeze(-1) + 127).to(torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, values


def q4_0(name: str, weight: Tensor) -> _Quantized | None:
    """Quantize to llama.cpp's Q4_0: blocks of 32 numbers with a scale each."""
    import torch
    from gguf import GGMLQuantizationType, quants

    if weight.dim() == 1:
        return None
    codes = quants.quantize(weight.float().numpy(), GGMLQuantizationType.Q4_0)
    values = quants.dequantize(codes, GGMLQuantizationType.Q4_0)
    return {"": torch.from_numpy(codes)}, torch.from_numpy(values)


def _packed_int4(ignore: list[str]) -> dict:
    """Return the quantization_config of compressed-tensors' W4A16.

    Args:
        ignore: Names of the layers that stay in 16 bits.
    """
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": _INT4_GROUP,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
    }


MODELS = {
    "bf16": TinyModel(
        kind="llama",
        architecture="LlamaForCausalLM",
        config=_LLAMA,
        bug="kernels that are correct only in fp16. Models are published in bfloat16, but the "
        "checks of the default model use fp16: https://github.com/lemonade-sdk/vllm-rocm/issues/24",
    ),
    "w4a16": TinyModel(
        kind="llama",
        architecture="LlamaForCausalLM",
        config=_LLAMA,
        bug="a 4-bit model, the usual format on Strix Halo, that answers garbage or finds no "
        "kernel: https://github.com/lemonade-sdk/vllm-rocm/issues/24",
        quantize=int4,
        quantization=_packed_int4(ignore=["lm_head"]),
    ),
    "w4a16-moe": TinyModel(
        kind="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config=_SMALL | _EXPERTS,
        bug="a kernel that reads the scales of another expert or tile. Mixtures of experts need "
        "least memory if their experts have 4 bits",
        quantize=int4,
        quantization=_packed_int4(ignore=["lm_head", "re:.*mlp.gate$"]),
    ),
    "fp8-moe": TinyModel(
        kind="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config=_SMALL | _EXPERTS,
        bug="a layer of experts in FP8 that vLLM cannot construct on RDNA 3: "
        "https://github.com/lemonade-sdk/vllm-rocm/issues/44",
        quantize=fp8,
        quantization={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.0.mlp.gate",
                "model.layers.1.mlp.gate",
            ],
        },
    ),
    "mxfp4-moe": TinyModel(
        kind="gpt_oss",
        architecture="GptOssForCausalLM",
        config=_SMALL
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "max_position_embeddings": 131072,
        },
        bug="a version of triton_kernels, which gpt-oss needs, that does not fit Triton: "
        "https://github.com/vllm-project/vllm/issues/49779",
        quantize=mxfp4,
        quantization={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    ),
    "gdn": TinyModel(
        kind="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        config=_SMALL
        | _EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 128,
        },
        bug="a hybrid model whose cache blocks of 1056 tokens need more LDS than the GPU has: "
        "https://github.com/vllm-project/vllm/pull/56232",
    ),
    "gguf": TinyModel(
        kind="llama",
        architecture="LlamaForCausalLM",
        config=_LLAMA,
        bug="a Llama whose GGUF file gives wrong answers without a message, because the "
        "converter reorders the rows of each head: "
        "https://github.com/vllm-project/vllm-metal/pull/480",
        quantize=q4_0,
        plugin="vllm_gguf_plugin",
    ),
}


def make(name: str, folder: Path, prompt: list[int]) -> dict:
    """Write the model; return the log probability, in float32, of every token after the prompt.

    Args:
        name: Key of MODELS.
        folder: The folder to which the model is written.
        prompt: Token ids.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = MODELS[name]
    reference_folder = folder / "dequantized"
    torch.manual_seed(0)
    config = AutoConfig.for_model(model.kind, **model.config)
    initial = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    initial.save_pretrained(reference_folder)
    reference_file = reference_folder / _WEIGHTS
    tensors: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for key, weight in load_file(reference_file).items():
        quantized = model.quantize(key, weight)
        if quantized is None:
            tensors[key] = weight
            dequantized[key] = weight.float()
            continue
        parts, values = quantized
        for suffix, part in parts.items():
            tensors[key + suffix] = part.contiguous()
        dequantized[key] = values.contiguous()
    if model.plugin:
        write_gguf(folder / GGUF, config, tensors)
    else:
        save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    save_file(dequantized, reference_file, {"format": "pt"})
    written = json.loads((reference_folder / "config.json").read_text())
    if model.quantization:
        written["quantization_config"] = model.quantization
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    network = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    shutil.rmtree(reference_folder)
    network.requires_grad_(False)
    logits = network(torch.tensor([prompt])).logits[0, -1]
    return {"logprobs": logits.log_softmax(-1).tolist()}


def write_gguf(
    file: Path,
    config: LlamaConfig,
    tensors: dict[str, Tensor],
) -> None:
    """Write a Llama in the layout of llama.cpp's converter.

    The converter reorders the rows of queries and keys, so that rope rotates neighbouring rows.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

    writer = GGUFWriter(file, "llama")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in tensors.items():
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        name = names.get_name(key, try_suffixes=(".weight",))
        if tensor.is_floating_point():
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(
                name,
                tensor.numpy(),
                raw_dtype=GGMLQuantizationType.Q4_0,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
