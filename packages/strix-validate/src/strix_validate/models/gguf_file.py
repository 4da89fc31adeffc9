# SPDX-License-Identifier: BSD-3-Clause
"""A GGUF file: its header and tensors, read by the package gguf, in the words of a config.json."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strix_validate.installing import install_advice
from strix_validate.models.defaults import NoModel
from strix_validate.models.table import Row, contents

SUFFIX = ".gguf"
#: model_type by general.architecture, where the name differs by more than a sign.
_KINDS = {
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa",
    "deepseek2": "deepseek_v3",
    "command-r": "cohere",
    "granitehybrid": "granitemoehybrid",
    "nemotron_h_moe": "nemotron_h",
    "lfm2moe": "lfm2_moe",
    "ernie4_5-moe": "ernie4_5_moe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "llama4": "llama4_text",
}
#: Types whose numbers are not packed.
_PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
#: Numbers of an array, and reads of a header, that no known file has: a damaged one has no end.
_LONGEST, _MOST_READS = 1 << 24, 1 << 22
#: Numbers of an array that is kept.
_SHORT = 1000
#: One file of several.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds.

    Attributes:
        config: Its header, in the words of a config.json.
        weights: Bytes of all tensors.
        token: Bytes of a token's keys and values in 16 bits.
        types: The packed types of its tensors.
        base: The model that it was made of, as OWNER/NAME, or "".
    """

    config: dict[str, Any]
    weights: int
    token: int
    types: list[str]
    base: str

    @property
    def rows(self) -> list[Row]:
        """The rows of its linear layers, one a type."""
        return [row_of(name) for name in self.types]


def row_of(name: str) -> Row:
    """Return the row of a packed type, by its name in the package gguf."""
    kind = name.lower()
    if kind not in contents()["gguf_types"]:
        refused = f"vllm-gguf-plugin has no kernel for {name}"
        return Row("linear", name, refused=refused, instead="a file in Q4_K_M, Q6_K or Q8_0")
    checks = tuple(f"{tier}/gguf-{kind}" for tier in ("kernels", "attention", "emulated"))
    return Row("linear", name, chosen="vllm-gguf-plugin", checks=checks)


def read(path: Path) -> GgufModel:
    """Read a GGUF file, with the others of its shards.

    Raises:
        NoModel: It is none, is not whole, or the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise NoModel(
            f"{path.name} is read by the package gguf, which is not installed here: "
            f"{install_advice('gguf')}, or use the vllm stack's environment formats"
        ) from error
    readers = [_open(shard, gguf) for shard in _shards(path)]
    fields = {name: field for reader in readers for name, field in reader.fields.items()}
    try:
        return _describe(path, fields, [tensor for r in readers for tensor in r.tensors])
    except NoModel:
        raise
    except Exception as error:
        raise _damaged(path, error) from error


def _shards(path: Path) -> Iterator[Path]:
    """Return a file, or all files of a model that is split."""
    match = _SHARD.search(path.name)
    if not match:
        yield path
        return
    start, count = path.name[: match.start()], int(match[2])
    for number in range(1, min(count, 1000) + 1):
        shard = path.with_name(f"{start}-{number:05}-of-{count:05}.gguf")
        if not shard.is_file():
            raise NoModel(f"{shard} is missing: the model is split into {count} files")
        yield shard


def _open(path: Path, gguf: Any) -> Any:
    """Open a file with bounds that the package does not keep.

    Raises:
        NoModel: It cannot be read.
    """

    class Reader(gguf.GGUFReader):
        reads = 0
        is_header = True

        def _get(self, offset, dtype, count=1, override_order=None):
            import numpy

            count, size = int(count), numpy.dtype(dtype).itemsize
            self.reads += 1
            if self.is_header and (count > _LONGEST or self.reads > _MOST_READS):
                raise ValueError("its header is longer than any")
            if not 0 <= offset + size * count <= len(self.data):
                raise ValueError("it ends too early: is it still being downloaded?")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs, raw_type):
            """Pass over long arrays of numbers, which nobody asks for, as one piece."""
            if raw_type == gguf.GGUFValueType.ARRAY:
                kind = int(self._get(orig_offs, "<u4")[0])
                length = int(self._get(orig_offs + 4, "<u8")[0])
                if kind in self.gguf_scalar_to_np and length > _SHORT:
                    numbers = self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], length)
                    types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
                    return 12 + numbers.nbytes, [numbers], [], types
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_tensors(self, start_offs, fields):
            self.is_header = False
            super()._build_tensors(start_offs, fields)

    if not path.is_file():
        raise NoModel(f"{path} is not a file")
    try:
        return Reader(path)
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> NoModel:
    return NoModel(f"{path} cannot be read as a GGUF file: {error!s:.100}")


def _describe(path: Path, fields: dict[str, Any], tensors: list[Any]) -> GgufModel:
    values = {name: field.contents() for name, field in fields.items() if _is_short(field)}
    arch = values.get("general.architecture")
    if not isinstance(arch, str) or not tensors:
        raise NoModel(f"{path} has no general.architecture or no tensors: is it a model?")
    if arch == "clip":
        raise NoModel(f"{path} is the encoder of a model (mmproj): name the model's own file")
    own = {key.removeprefix(f"{arch}."): value for key, value in values.items()}
    config = _config_of(arch, own)
    words = fields.get("tokenizer.ggml.tokens")
    config["vocab_size"] = own.get("vocab_size") or (len(words.data) if words else 0)
    packed = {tensor.tensor_type.name for tensor in tensors} - set(_PLAIN)
    weights = sum(int(tensor.n_bytes) for tensor in tensors)
    return GgufModel(config, weights, _token_of(own), sorted(packed), _base_of(values))


def _is_short(field: Any) -> bool:
    return 0 < len(field.data) <= _SHORT


def _config_of(arch: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return a header in the words of a config.json."""
    heads = own.get("attention.head_count")
    keys = own.get("attention.head_count_kv", heads)
    config = {
        "model_type": _KINDS.get(arch, arch.replace("-", "_")),
        "architectures": [f"GGUF {arch}"],
        "num_hidden_layers": own.get("block_count"),
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": _largest(own.get("feed_forward_length")),
        "num_attention_heads": _largest(heads),
        "num_key_value_heads": _largest(keys),
        "head_dim": own.get("attention.key_length"),
        "max_position_embeddings": own.get("context_length"),
        "sliding_window": own.get("attention.sliding_window"),
        "num_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "moe_intermediate_size": own.get("expert_feed_forward_length"),
        "kv_lora_rank": own.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": own.get("rope.dimension_count"),
        "quantization_config": {"quant_method": "gguf"},
    }
    if isinstance(keys, list):  # of a hybrid model: no keys, no attention
        other = "mamba" if own.get("ssm.state_size") else "linear_attention"
        config["layer_types"] = ["full_attention" if count else other for count in keys]
    # a header leaves out what is off
    off = {"sliding_window": None, "num_experts": 0, "kv_lora_rank": None}
    return off | {key: value for key, value in config.items() if value is not None}


def _largest(value: Any) -> Any:
    return max(value) if isinstance(value, list) and value else value


def _token_of(own: dict[str, Any]) -> int:
    """Return bytes of a token's keys and values in 16 bits."""
    layers, heads = own["block_count"], _largest(own.get("attention.head_count")) or 0
    if "attention.kv_lora_rank" in own:
        rank = own["attention.kv_lora_rank"]
        return 2 * layers * (rank + own.get("rope.dimension_count", 0))
    if not heads:
        return 0
    size = own["embedding_length"] // heads
    keys = own.get("attention.head_count_kv", heads)
    total = sum(keys) if isinstance(keys, list) else layers * keys
    if "full_attention_interval" in own:
        total = total // own["full_attention_interval"]
    sizes = own.get("attention.key_length", size) + own.get("attention.value_length", size)
    return 2 * total * sizes


def _base_of(values: dict[str, Any]) -> str:
    """Return the model that a file was made of, where it says so."""
    url = values.get("general.base_model.0.repo_url")
    name = url.removeprefix("https://huggingface.co/") if isinstance(url, str) else ""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
