# SPDX-License-Identifier: BSD-3-Clause
"""The format of a model's weights, as the quantization_config of its config.json describes it."""

from collections.abc import Mapping
from typing import Any

from strix_validate.models.defaults import NoModel

#: Formats of compressed-tensors by type and bits of a weight, whatever the strategy.
_WEIGHTS = {("float", 8): "fp8", ("int", 4): "w4a16", ("int", 8): "w8a16"}
#: Quark's dtypes: type and bits.
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
#: ModelOpt's algorithms, where vLLM reads them.
_MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "nvfp4 by modelopt",
    "MXFP8": "mxfp8 by modelopt",
}
#: What AutoRound's files are called.
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")


def quantization_of(config: Mapping) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json, wherever it is; empty without one.

    Raises:
        NoModel: It is not an object.
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


def format_of(config: Mapping) -> str:
    """Return the format of a model's weights, in the words of table.toml or its own method's.

    Raises:
        NoModel: quantization_config is not an object, or a number in it is none.
    """
    quantization = quantization_of(config)
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
    nested = quantization.get("quantization")
    if method.startswith("modelopt") or (not method and producer.get("name") == "modelopt"):
        nested = nested if isinstance(nested, Mapping) else {}
        algorithm = str(quantization.get("quant_algo") or nested.get("quant_algo") or "").upper()
        return _MODELOPT.get(algorithm, f"modelopt {algorithm}".strip())
    if method == "fp8":
        return "fp8-blocks" if quantization.get("weight_block_size") else "fp8"
    if method == "mxfp8":
        return "mxfp8, its head too"
    if method == "compressed-tensors":
        return _of_groups(quantization)
    if method == "quark":
        return _of_quark(quantization)
    bits = int(quantization.get("bits") or quantization.get("w_bit") or 0)
    if method in ("gptq", "auto_gptq", "gptq_marlin"):
        return _of_gptq(quantization, bits)
    if method in ("awq", "auto_awq", "awq_marlin"):
        return "awq" if bits == 4 else f"awq of {bits} bits"
    if method in _AUTO_ROUND:
        return "auto-round" if bits == 4 else f"auto-round of {bits} bits"
    return method or "no quant_method"


def _of_gptq(quantization: Mapping, bits: int) -> str:
    if quantization.get("desc_act"):
        return "gptq, with desc_act"
    if bits not in (4, 8) or not quantization.get("sym", True):
        return "gptq, of other bits or asymmetric"
    return "gptq" if bits == 4 else "w8a16"  # the same kernels


def _of_groups(quantization: Mapping) -> str:
    """Return the format of a compressed-tensors file, whose groups have one format each."""
    groups = quantization.get("config_groups") or {}
    kinds = {_of_group(group) for group in groups.values()}
    if len(kinds) != 1:
        return "compressed-tensors, mixed" if kinds else "compressed-tensors, without groups"
    return kinds.pop()


def _of_group(group: Mapping) -> str:
    weights = group.get("weights") or {}
    inputs = group.get("input_activations") or {}
    type_, bits = str(weights.get("type")), int(weights.get("num_bits") or 0)
    strategy, size = weights.get("strategy"), int(weights.get("group_size") or 0)
    if (type_, bits) == ("float", 4):
        if size == 16:
            return "nvfp4" if inputs else "nvfp4, weights alone"
        return "mxfp4, not of experts alone"
    if (type_, bits) == ("float", 8) and size == 32:
        return "mxfp8"
    if (type_, bits, strategy) == ("float", 8, "block"):
        return "fp8-blocks"
    if type_ == "int" and inputs:
        if int(inputs.get("num_bits") or 0) != 8 or inputs.get("type") != "int":
            return f"{bits} bits of weights, activations in {inputs.get('type')!s:.10}"
        if bits == 8:
            return "w8a8, of a tensor" if strategy == "tensor" else "w8a8"
        return "w4a8" if bits == 4 else f"{bits} bits of weights"
    if type_ == "int" and bits not in (4, 8):
        return f"{bits} bits of weights"
    name = _WEIGHTS.get((type_, bits), f"{type_} of {bits} bits")
    if strategy == "channel" and name in ("w8a16", "w4a16"):
        return f"{name}-channels"
    return name


def _of_quark(quantization: Mapping) -> str:
    layers = quantization.get("global_quant_config") or {}
    weight, inputs = layers.get("weight") or {}, layers.get("input_tensors") or {}
    weight = weight[0] if isinstance(weight, list) else weight
    type_, bits = _QUARK.get(str(weight.get("dtype")), ("", 0))
    if (type_, bits) == ("float", 4):
        return "mxfp4, not of experts alone"
    if (type_, bits) == ("float", 8):
        return "fp8"
    if (type_, bits) == ("int", 8) and inputs:
        return "w8a8"
    return "w4a16" if (type_, bits) == ("int", 4) else f"quark {weight.get('dtype')!s:.20}"
