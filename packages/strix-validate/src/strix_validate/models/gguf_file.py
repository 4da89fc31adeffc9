# SPDX-License-Identifier: BSD-3-Clause
"""Read a GGUF file: its header, converted to the keys of a config.json, and its tensors.

The package gguf parses the file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strix_validate.installing import suggest_installation
from strix_validate.layers.defaults import NoModel
from strix_validate.models.table import Row, read_table

SUFFIX = ".gguf"
#: model_type by general.architecture, where they differ by more than a hyphen.
MODEL_TYPES = {
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
#: How many numbers an array may have, and how many reads a header may take. No real file exceeds
#: these limits. Without limits, reading a damaged file may not end.
_MAX_NUMBERS = 1 << 24
_MAX_READS = 1 << 22
#: Maximum length of an array that is read into the config.
_SHORT = 1000
#: Maximum number of files that a model is split into.
_MAX_SHARDS = 1000
#: The end of a file's name if the model is split into several files.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufModel:
    """The contents of a GGUF file.

    Attributes:
        config: Its header, with the keys of a config.json.
        weights: Bytes of all tensors.
        token: Bytes of a token's keys and values in 16 bits.
        types: The packed types of its tensors.
        base: The model from which the file was made, as OWNER/NAME, or "".
    """

    config: dict[str, Any]
    weights: int
    token: int
    types: list[str]
    base: str

    @property
    def rows(self) -> list[Row]:
        """Rows like those of the table for the linear layers, one for each quantization type."""
        return [make_row(name) for name in self.types]


def make_row(name: str) -> Row:
    """Return a row like those of the table; `name` is a quantization type of the package gguf."""
    kind = name.lower()
    if kind not in read_table()["gguf_types"]:
        refused = f"vllm-gguf-plugin has no kernel for {name}"
        return Row(
            "linear",
            name,
            refused=refused,
            instead="a file in Q4_K_M, Q6_K or Q8_0",
        )
    checks = tuple(f"{tier}/gguf-{kind}" for tier in ("kernels", "attention", "emulated"))
    return Row("linear", name, chosen="vllm-gguf-plugin", checks=checks)


def read(path: Path) -> GgufModel:
    """Read a GGUF file, and the other files of a model that is split.

    Raises:
        NoModel: The file is no model or not complete, or the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise NoModel(
            f"{path.name} needs the package gguf, which is not installed: "
            f"{suggest_installation('gguf')}, or use the environment `formats` of the vllm stack"
        ) from error
    fields: dict[str, Any] = {}
    tensors: list[Any] = []
    for shard in _shards(path):
        reader = _open(shard, gguf)
        fields |= reader.fields
        tensors += reader.tensors
    try:
        return _describe(path, fields, tensors)
    except NoModel:
        raise
    except Exception as error:
        raise _damaged(path, error) from error


def _shards(path: Path) -> Iterator[Path]:
    """Yield the file, or all files of a model that is split."""
    match = _SHARD.search(path.name)
    if not match:
        yield path
        return
    start = path.name[: match.start()]
    count = int(match[2])
    for number in range(1, min(count, _MAX_SHARDS) + 1):
        shard = path.with_name(f"{start}-{number:05}-of-{count:05}.gguf")
        if not shard.is_file():
            raise NoModel(f"{shard} is missing: the model is split into {count} files")
        yield shard


def _open(path: Path, gguf: Any) -> Any:
    """Open a GGUF file with limits that the package gguf does not have.

    Raises:
        NoModel: The file cannot be read.
    """

    class Reader(gguf.GGUFReader):
        num_reads = 0
        is_header = True

        def _get(self, offset, dtype, count=1, override_order=None):
            import numpy

            count = int(count)
            self.num_reads += 1
            if self.is_header and (count > _MAX_NUMBERS or self.num_reads > _MAX_READS):
                raise ValueError("its header is longer than any real header")
            end = offset + numpy.dtype(dtype).itemsize * count
            if not 0 <= end <= len(self.data):
                raise ValueError("it ends too early: is it still being downloaded?")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs, raw_type):
            """Read a long array in one piece, because nothing reads its single numbers."""
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
    values = {}
    for name, field in fields.items():
        if 0 < len(field.data) <= _SHORT:
            values[name] = field.contents()
    arch = values.get("general.architecture")
    if not isinstance(arch, str) or not tensors:
        raise NoModel(f"{path} has no general.architecture or no tensors: is it a model?")
    if arch == "clip":
        raise NoModel(f"{path} is the encoder of a model (mmproj): pass the model's own file")
    header = {key.removeprefix(f"{arch}."): value for key, value in values.items()}
    config = _convert_header(arch, header)
    words = fields.get("tokenizer.ggml.tokens")
    num_words = len(words.data) if words else 0
    config["vocab_size"] = header.get("vocab_size") or num_words
    types = {tensor.tensor_type.name for tensor in tensors}
    return GgufModel(
        config=config,
        weights=sum(int(tensor.n_bytes) for tensor in tensors),
        token=_token_bytes(header),
        types=sorted(types - set(_PLAIN)),
        base=_find_base(values),
    )


def _convert_header(arch: str, header: dict[str, Any]) -> dict[str, Any]:
    """Convert a header to the keys of a config.json.

    Args:
        arch: general.architecture.
        header: Values by key, without the architecture's prefix.
    """
    heads = header.get("attention.head_count")
    kv_heads = header.get("attention.head_count_kv", heads)
    values = {
        "model_type": MODEL_TYPES.get(arch, arch.replace("-", "_")),
        "architectures": [f"GGUF {arch}"],
        "num_hidden_layers": header.get("block_count"),
        "hidden_size": header.get("embedding_length"),
        "intermediate_size": _largest(header.get("feed_forward_length")),
        "num_attention_heads": _largest(heads),
        "num_key_value_heads": _largest(kv_heads),
        "head_dim": header.get("attention.key_length"),
        "max_position_embeddings": header.get("context_length"),
        "sliding_window": header.get("attention.sliding_window"),
        "num_experts": header.get("expert_count"),
        "num_experts_per_tok": header.get("expert_used_count"),
        "moe_intermediate_size": header.get("expert_feed_forward_length"),
        "kv_lora_rank": header.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": header.get("rope.dimension_count"),
        "quantization_config": {"quant_method": "gguf"},
    }
    # a header has no keys for features that are off, so these defaults turn them off
    config: dict[str, Any] = {
        "sliding_window": None,
        "num_experts": 0,
        "kv_lora_rank": None,
    }
    config |= {key: value for key, value in values.items() if value is not None}
    if isinstance(kv_heads, list):
        # in a hybrid model, layers without key heads have Mamba or linear attention
        other = "mamba" if header.get("ssm.state_size") else "linear_attention"
        kinds = []
        for count in kv_heads:
            kind = "full_attention" if count else other
            kinds.append(kind)
        config["layer_types"] = kinds
    return config


def _largest(value: Any) -> Any:
    """Return the largest value in a list of one value per layer, or a single value as it is."""
    if isinstance(value, list) and value:
        return max(value)
    return value


def _token_bytes(header: dict[str, Any]) -> int:
    """Return the bytes of a token's keys and values in 16 bits."""
    layers = header["block_count"]
    heads = _largest(header.get("attention.head_count")) or 0
    if "attention.kv_lora_rank" in header:
        rank = header["attention.kv_lora_rank"]
        return 2 * layers * (rank + header.get("rope.dimension_count", 0))
    if not heads:
        return 0
    kv_heads = header.get("attention.head_count_kv", heads)
    total_heads = sum(kv_heads) if isinstance(kv_heads, list) else layers * kv_heads
    if "full_attention_interval" in header:
        total_heads = total_heads // header["full_attention_interval"]
    head_dim = header["embedding_length"] // heads
    key_length = header.get("attention.key_length", head_dim)
    value_length = header.get("attention.value_length", head_dim)
    return 2 * total_heads * (key_length + value_length)


def _find_base(values: dict[str, Any]) -> str:
    """Return the model from which a file was made, as OWNER/NAME, or "" if it is unknown."""
    url = values.get("general.base_model.0.repo_url")
    if not isinstance(url, str):
        return ""
    name = url.removeprefix("https://huggingface.co/")
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
