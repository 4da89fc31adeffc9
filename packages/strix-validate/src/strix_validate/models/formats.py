# SPDX-License-Identifier: BSD-3-Clause
"""The format of a model's weights, as the quantization_config of its config.json describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strix_validate.layers.defaults import NoModel

#: Formats of compressed-tensors by type and bits of a weight. `_group_format` names the formats of
#: certain strategies and group sizes.
_WEIGHTS = {
    ("float", 8): "fp8",
    ("int", 4): "w4a16",
    ("int", 8): "w8a16",
}
#: Type and bits of a weight by Quark's dtype.
_QUARK = {
    "fp8_e4m3": ("float", 8),
    "fp8_e5m2": ("float", 8),
    "int8": ("int", 8),
    "uint8": ("int", 8),
    "int4": ("int", 4),
    "uint4": ("int", 4),
    "fp4": ("float", 4),
    "mxfp4": ("float", 4),
}
#: Formats by quant_algo of ModelOpt. The function `_modelopt_format` names the formats of other
#: values.
_MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "nvfp4 by modelopt",
    "MXFP8": "mxfp8 by modelopt",
}
#: Values of quant_method in files of AutoRound, GPTQ and AWQ.
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")
_GPTQ = ("gptq", "auto_gptq", "gptq_marlin")
_AWQ = ("awq", "auto_awq", "awq_marlin")


def find_quantization(config: Mapping) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json or of a part of it; empty if it has none.

    Raises:
        NoModel: The quantization_config is not an object.
    """
    for part in (config, config.get("text_config"), config.get("thinker_config")):
        if not isinstance(part, Mapping):
            continue
        quantization = part.get("quantization_config") or part.get("compression_config")
        if not quantization:
            continue
        if not isinstance(quantization, Mapping):
            raise NoModel(f"quantization_config is not an object: {quantization!a:.60}")
        return quantization
    return {}


def read_format(config: Mapping) -> str:
    """Return the format of a model's weights: its name in table.toml, or else a phrase.

    The phrase may be the quant_method alone.

    Raises:
        NoModel: quantization_config is not an object, or has a value of a wrong type.
    """
    return name_format(find_quantization(config))


def name_format(quantization: Mapping) -> str:
    """Return the format that a quantization_config describes, as read_format does.

    Raises:
        NoModel: A value has a wrong type.
    """
    if not quantization:
        return "16 bits"
    try:
        return _format(quantization)
    except (TypeError, ValueError, AttributeError) as error:
        raise NoModel(f"quantization_config cannot be read: {error!s:.100}") from error


def _format(quantization: Mapping) -> str:
    method = str(quantization.get("quant_method") or "").lower()
    method = method.replace("compressed_tensors", "compressed-tensors")
    producer = quantization.get("producer") or {}
    if method.startswith("modelopt") or (not method and producer.get("name") == "modelopt"):
        return _modelopt_format(quantization)
    if method == "fp8":
        return "fp8-blocks" if quantization.get("weight_block_size") else "fp8"
    if method == "mxfp8":
        return "mxfp8, its head too"
    if method == "compressed-tensors":
        return _compressed_tensors_format(quantization)
    if method == "quark":
        return _quark_format(quantization)
    bits = int(quantization.get("bits") or quantization.get("w_bit") or 0)
    if method in _GPTQ:
        return _gptq_format(quantization, bits)
    if method in _AWQ:
        return "awq" if bits == 4 else f"awq of {bits} bits"
    if method in _AUTO_ROUND:
        return "auto-round" if bits == 4 else f"auto-round of {bits} bits"
    return method or "no quant_method"


def _modelopt_format(quantization: Mapping) -> str:
    algorithm = quantization.get("quant_algo")
    nested = quantization.get("quantization")
    if not algorithm and isinstance(nested, Mapping):
        algorithm = nested.get("quant_algo")
    name = str(algorithm or "").upper()
    return _MODELOPT.get(name, f"modelopt {name}".strip())


def _gptq_format(quantization: Mapping, bits: int) -> str:
    if quantization.get("desc_act"):
        return "gptq, with desc_act"
    if bits not in (4, 8) or not quantization.get("sym", True):
        return "gptq, of other bits or asymmetric"
    return "gptq" if bits == 4 else "w8a16"  # vLLM uses w8a16's kernels for 8 bits


def _compressed_tensors_format(quantization: Mapping) -> str:
    """Return the format of compressed-tensors weights, or say that their groups' formats differ."""
    groups = quantization.get("config_groups") or {}
    formats = {_group_format(_read_group(group)) for group in groups.values()}
    if not formats:
        return "compressed-tensors, without groups"
    if len(formats) > 1:
        return "compressed-tensors, mixed"
    return formats.pop()


@dataclass(frozen=True)
class _Group:
    """A group of layers that compressed-tensors quantizes alike (a value of config_groups).

    Attributes:
        type: Type of a weight: "int" or "float".
        bits: Bits of a weight.
        strategy: Which weights share a scale, such as "tensor", "channel", "group" or "block"; None
            if the file does not state it.
        size: Number of weights that share a scale; 0 if the file does not state it.
        inputs: Format of the activations; empty if they stay in 16 bits.
    """

    type: str
    bits: int
    strategy: str | None
    size: int
    inputs: Mapping


def _read_group(group: Mapping) -> _Group:
    weights = group.get("weights") or {}
    return _Group(
        type=str(weights.get("type")),
        bits=int(weights.get("num_bits") or 0),
        strategy=weights.get("strategy"),
        size=int(weights.get("group_size") or 0),
        inputs=group.get("input_activations") or {},
    )


def _group_format(group: _Group) -> str:
    kind = (group.type, group.bits)
    if kind == ("float", 4):
        if group.size != 16:
            return "mxfp4, not of experts alone"
        return "nvfp4" if group.inputs else "nvfp4, weights alone"
    if kind == ("float", 8) and group.size == 32:
        return "mxfp8"
    if kind == ("float", 8) and group.strategy == "block":
        return "fp8-blocks"
    if group.type == "int" and group.inputs:
        return _int_activations_format(group)
    if group.type == "int" and group.bits not in (4, 8):
        return f"{group.bits} bits of weights"
    name = _WEIGHTS.get(kind, f"{group.type} of {group.bits} bits")
    if group.strategy == "channel" and name in ("w8a16", "w4a16"):
        return f"{name}-channels"
    return name


def _int_activations_format(group: _Group) -> str:
    """Return the format of integer weights whose activations are quantized too."""
    inputs = group.inputs
    if int(inputs.get("num_bits") or 0) != 8 or inputs.get("type") != "int":
        return f"{group.bits} bits of weights, activations in {inputs.get('type')!s:.10}"
    if group.bits == 8:
        return "w8a8, of a tensor" if group.strategy == "tensor" else "w8a8"
    if group.bits == 4:
        return "w4a8"
    return f"{group.bits} bits of weights"


def _quark_format(quantization: Mapping) -> str:
    layers = quantization.get("global_quant_config") or {}
    inputs = layers.get("input_tensors") or {}
    weight = layers.get("weight") or {}
    if isinstance(weight, list):
        weight = weight[0]
    dtype = weight.get("dtype")
    kind = _QUARK.get(str(dtype))
    if kind == ("float", 4):
        return "mxfp4, not of experts alone"
    if kind == ("float", 8):
        return "fp8"
    if kind == ("int", 8) and inputs:
        return "w8a8"
    if kind == ("int", 4):
        return "w4a16"
    return f"quark {dtype!s:.20}"
