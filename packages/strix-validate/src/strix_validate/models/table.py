# SPDX-License-Identifier: BSD-3-Clause
"""The table of what vLLM and diffusers choose on gfx1151, and how far each choice is proven."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from strix_validate import TARGET, VLLM_DEVICE_NAME
from strix_validate.layers.defaults import NoModel
from strix_validate.layers.parts import ATTENTION, Layer, find_encoders, find_text, list_layers
from strix_validate.layers.quantization import LayerQuantization, find_mixer_part
from strix_validate.models.formats import find_quantization, name_format, read_format

#: What a check that passed without a GPU proves about a kernel, by the first part of the check's
#: id. Checks such as gemm, sdpa and conv prove something only on a GPU.
PROVES = {
    "kernels": "compiled",
    "attention": "interpreted",
    "flash-attn": "interpreted",
    "emulated": "emulated",
}
#: Types of encoders without a decoder: their attention sees all tokens.
_ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
#: Mixers with attention heads.
ATTENDS = {
    *ATTENTION,
    "mamba and attention",
    "compressed 4",
    "compressed 128",
}
#: Keys of the sizes or the number of shared experts.
_SHARED_EXPERTS = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "n_shared_experts",
)
#: Formats in which vLLM treats the output head as a layer of its own, in 16 bits.
_SEPARATE_HEAD = ("auto-round", "auto-round of 8 bits", "nvfp4 by modelopt", "mxfp8 by modelopt")
#: How the names of vLLM's tables of tiles state the experts' format. `describe_tiles` says nothing
#: about formats that are not listed.
_TILED = {
    "16 bits": "",
    "fp8-blocks": ",dtype=fp8_w8a8,block_shape=[128,128]",
    "w4a16": ",dtype=int4_w4a16",
    "gptq": ",dtype=int4_w4a16",
    "awq": ",dtype=int4_w4a16",
    "auto-round": ",dtype=int4_w4a16",
}
#: Replaces the name of the kernel for a format that vLLM reads, if the format was not compared with
#: vLLM's code.
NOT_COMPARED = "a format that was not compared"
_OTHER_FORMATS = "4 bits in compressed-tensors, GPTQ or AWQ, FP8 in blocks, or a GGUF file"


@dataclass(frozen=True)
class Row:
    """A row of the table: the choice for a part of a model.

    Attributes:
        part: The part, such as "attention" or "linear".
        of: The kind of the part; for "linear" and "experts", the format of the weights.
        chosen: Name of the backend or kernel, or "".
        refused: The message with which vLLM refuses the part, or "".
        instead: What to use instead of a part that is refused or was not compared.
        checks: Ids of the checks that launch the backend or kernel.
        record: Name of the record of a run by hand, or "".
    """

    part: str
    of: str
    chosen: str = ""
    refused: str = ""
    instead: str = ""
    checks: tuple[str, ...] = ()
    record: str = ""

    @property
    def proven(self) -> str:
        """How far the choice is proven.

        These are words of :data:`PROVES`, and "emulated by hand" for a record; without them, "not
        at all". For a refused part, it is "does not start".
        """
        if self.refused:
            return "does not start"
        groups = {check.partition("/")[0] for check in self.checks}
        levels = []
        for group, level in PROVES.items():
            if group in groups and level not in levels:
                levels.append(level)
        if self.record:
            levels.append("emulated by hand")
        return ", ".join(levels) or "not at all"


@cache
def read_table() -> dict:
    """Return the contents of table.toml."""
    return tomllib.loads(files(__package__).joinpath("table.toml").read_text())


def require_target(advice: str = "") -> None:
    """Require that the variable gpu_arch names the table's GPU.

    Args:
        advice: What to do about another GPU; appended to the message.

    Raises:
        NoModel: The variable names another GPU.
    """
    if TARGET != "gfx1151":
        raise NoModel(f"the table of choices is for gfx1151, not {TARGET}{advice}")


def read_rows() -> list[Row]:
    """Return all rows, in the file's order."""
    listed = []
    for values in read_table()["row"]:
        checks = tuple(values.get("checks", ()))
        listed.append(Row(**values | {"checks": checks}))
    return listed


def version() -> str:
    """Return the release of vLLM whose code the table was compared with."""
    return read_table()["vllm"]


def was_compared(config: Mapping) -> bool:
    """Return whether the table was compared with vLLM for the model's architecture."""
    if find_text(config).get("model_type") in read_table()["unanswered"]:
        return False
    names = config.get("architectures")
    compared = read_table()["architectures"]
    return isinstance(names, list) and any(name in compared for name in names)


def describe_tiles(config: Mapping, source: Path | None = None) -> str:
    """Say whether vLLM has tiles, tuned on this GPU, for the model's experts.

    Args:
        config: A config.json.
        source: vLLM's source folder; None for the release that the table was compared with.

    Returns:
        A phrase; empty if the model has no experts, or if _TILED lacks their format.
    """
    text = find_text(config)
    count = text.get("num_experts")
    size = text.get("moe_intermediate_size") or text.get("intermediate_size")
    if not count:
        return ""
    _, expert_formats = _list_formats(config, text, list_layers(text))
    form = "mxfp4" if text.get("expert_dtype") == "fp4" else next(iter(expert_formats), "")
    if form not in _TILED:
        return ""
    name = f"E={count},N={size}{_TILED[form]}"
    if name in _tuned_tables(source):
        return f"tuned for {name}"
    return f"vLLM's defaults, no table of {name}"


def _tuned_tables(source: Path | None) -> set[str]:
    """Return the names of vLLM's tables of tiles for this GPU, without the GPU's name."""
    if not source:
        return set(read_table()["tuned"])
    folder = source / "vllm/model_executor/layers/fused_moe/configs"
    device = f"device_name={VLLM_DEVICE_NAME}"
    return {file.stem.replace(f",{device}", "") for file in folder.glob(f"*{device}*.json")}


def _attention(config: Mapping, text: Mapping) -> list[str]:
    """Return the kinds of a model's attention, as rows name them."""
    kind = str(text.get("model_type"))
    if text.get("o_lora_rank"):
        return ["compressed", "compressed, of a window"]
    if text.get("kv_lora_rank"):
        return ["latent, of chosen tokens" if text.get("index_topk") else "latent"]
    if kind in _ENCODERS:
        return ["across"]
    kinds = ["sinks" if kind == "gpt_oss" else "heads"]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        kinds.append("windows")
    if config.get("is_encoder_decoder"):
        kinds.append("across")
    return kinds


def find_rows(config: Mapping) -> list[Row]:
    """Return the rows of a model.

    Raises:
        NoModel: The config has neither attention heads nor Mamba's states.
    """
    text = find_text(config)
    if not text.get("num_attention_heads") and not text.get("mamba_d_state"):
        raise NoModel(
            "the model has neither attention heads nor Mamba states: is it a language model?"
        )
    is_encoder_decoder = "decoder_attention_heads" in text
    layers = [] if is_encoder_decoder else list_layers(text)
    chosen = []
    if is_encoder_decoder or any(layer.mixer in ATTENDS for layer in layers):
        chosen += [_row("attention", kind) for kind in _attention(config, text)]
    if text.get("kv_lora_rank"):
        chosen.append(_row("prefill", "latent"))
    if text.get("linear_num_value_heads"):
        chosen.append(_row("linear attention", "gated delta rule"))
    has_encoder = find_encoders(config) or text.get("encoder_attention_heads")
    # the encoders of Gemma 4 are transformers' own, so vLLM chooses no backend for them
    if has_encoder and not str(text.get("model_type")).startswith("gemma4"):
        chosen.append(_row("encoder", "images or sound"))
    return chosen + _matrix_rows(config, text, layers)


def _matrix_rows(config: Mapping, text: Mapping, layers: Sequence[Layer]) -> list[Row]:
    """Return the rows of a model's linear layers and experts, up to the first that is refused."""
    form = read_format(config)
    linear_formats, expert_formats = _list_formats(config, text, layers)
    # Some layers of a quantized model stay in 16 bits: projections of decay, gates or compression,
    # the output head, layers of an encoder, or those that the config excludes.
    has_16_bits = (
        "16 bits" in linear_formats
        or text.get("linear_num_value_heads")
        or text.get("o_lora_rank")
        or form in _SEPARATE_HEAD
        or _keeps_encoder(config)
    )
    rows = [_row("linear", name) for name in linear_formats if name != "16 bits"]
    experts_rows = [_row("experts", _experts_format(text, name)) for name in expert_formats]
    if rows:
        rows += experts_rows
        if has_16_bits:
            rows.append(_row("linear", "16 bits"))
    else:
        rows = [_row("linear", "16 bits"), *experts_rows]
    chosen = []
    for row in rows:
        chosen.append(row)
        if row.refused:
            break
    return chosen


def _list_formats(
    config: Mapping, text: Mapping, layers: Sequence[Layer]
) -> tuple[list[str], list[str]]:
    """Return the distinct formats of linear layers, and those of experts.

    The formats of an encoder-decoder, whose layers are not known, are those of the whole model.
    """
    form = read_format(config)
    if not layers:
        return [form], []
    quantization = LayerQuantization(find_quantization(config))
    has_shared_experts = any(text.get(key) for key in _SHARED_EXPERTS)
    linear_formats = []
    expert_formats = []
    for number, layer in enumerate(layers):
        parts = [find_mixer_part(layer.mixer)] if layer.mixer else []
        if layer.feed_forward == "dense":
            parts.append("dense")
        if layer.feed_forward == "sparse":
            expert_formats.append(name_format(quantization.read("experts", number)))
            if has_shared_experts:
                parts.append("shared experts")
        linear_formats += [name_format(quantization.read(part, number)) for part in parts]
    if form == "mxfp4":
        # gpt-oss keeps everything except its experts in 16 bits
        linear_formats = ["16 bits"]
    return list(dict.fromkeys(linear_formats)), list(dict.fromkeys(expert_formats))


def _keeps_encoder(config: Mapping) -> bool:
    """Return whether a quantized model lists layers of its encoder as left in 16 bits."""
    quantization = find_quantization(config)
    names = (
        quantization.get("ignore")
        or quantization.get("modules_to_not_convert")
        or quantization.get("exclude")
        or ()
    )
    return bool(find_encoders(config)) and any("vis" in str(name) for name in names)


def _experts_format(text: Mapping, form: str) -> str:
    """Return the format of a model's experts, as rows name it."""
    if text.get("expert_dtype") == "fp4":
        return "mxfp4 beside fp8-blocks"  # DeepSeek-V4's
    if form == "mxfp4" and text.get("model_type") != "gpt_oss":
        return "mxfp4, not gpt-oss"
    return form


@cache
def _row(part: str, of: str) -> Row:
    """Return a row of the table or, without one, a row that says whether vLLM reads the format."""
    for row in read_rows():
        if (row.part, row.of) == (part, of):
            return row
    method = re.split("[ ,]", of)[0]
    if method in read_table()["methods"]:
        return Row(part, of, chosen=NOT_COMPARED, instead=_OTHER_FORMATS)
    refused = f"Unknown quantization method: {of:.60}"
    return Row(part, of, refused=refused, instead=_OTHER_FORMATS)
