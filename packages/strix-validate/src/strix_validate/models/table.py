# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM and diffusers choose on gfx1151: a table's rows, and how far each is proven."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from strix_validate import NAMED, TARGET
from strix_validate.models.defaults import NoModel
from strix_validate.models.formats import format_of, quantization_of
from strix_validate.models.parts import ATTENTION, encoders_of, layers_of, text_of

#: What a check proves by the start of its id; gemm, sdpa and conv prove something on a GPU alone.
PROVES = {
    "kernels": "compiled",
    "attention": "interpreted",
    "flash-attn": "interpreted",
    "emulated": "emulated",
}
#: Encoders without a decoder: their attention sees all tokens.
_ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class Row:
    """A part of a model, and what is chosen for it, or the words in which vLLM refuses."""

    part: str
    of: str
    chosen: str = ""
    refused: str = ""
    instead: str = ""
    checks: tuple[str, ...] = ()
    record: str = ""

    @property
    def proven(self) -> str:
        """How far: in the words of :data:`PROVES`."""
        if self.refused:
            return "does not start"
        tiers = {check.partition("/")[0] for check in self.checks}
        levels = list(dict.fromkeys(level for tier, level in PROVES.items() if tier in tiers))
        if self.record:
            levels.append("emulated by hand")
        return ", ".join(levels) or "not at all"


@cache
def contents() -> dict:
    """Return what table.toml has."""
    return tomllib.loads(files(__package__).joinpath("table.toml").read_text())


def about_target() -> None:
    """Raise NoModel where the variable gpu_arch names another GPU than the table's."""
    if TARGET != "gfx1151":
        raise NoModel(f"the table is about gfx1151, not {TARGET}: only vLLM's own code can say")


def rows() -> list[Row]:
    """Return all rows, in the file's order."""
    return [Row(**row | {"checks": tuple(row.get("checks", ()))}) for row in contents()["row"]]


def version() -> str:
    """Return the release of vLLM whose code the table was compared with."""
    return contents()["vllm"]


def was_compared(config: Mapping) -> bool:
    """Return whether the table was compared with a model of the same architecture."""
    if text_of(config).get("model_type") in contents()["unanswered"]:
        return False
    names = config.get("architectures")
    known = contents()["architectures"]
    return isinstance(names, list) and any(name in known for name in names)


#: How vLLM's tables of tiles name a format of experts; those of other formats have no table.
_TILED = {
    "16 bits": "",
    "fp8-blocks": ",dtype=fp8_w8a8,block_shape=[128,128]",
    "w4a16": ",dtype=int4_w4a16",
    "gptq": ",dtype=int4_w4a16",
    "awq": ",dtype=int4_w4a16",
    "auto-round": ",dtype=int4_w4a16",
}


def tiles_of(config: Mapping, source: Path | None = None) -> str:
    """Say whether vLLM has tiles for the model's experts that were tuned on this GPU.

    Empty without experts, or where their kernel reads no table.

    Args:
        source: of the vLLM that answers, instead of the release that was compared.
    """
    text = text_of(config)
    count = text.get("num_experts")
    size = text.get("moe_intermediate_size") or text.get("intermediate_size")
    form = "mxfp4" if text.get("expert_dtype") == "fp4" else format_of(config)
    if not count or form not in _TILED:
        return ""
    name, tuned = f"E={count},N={size}{_TILED[form]}", set(contents()["tuned"])
    if source:
        folder = source / "vllm/model_executor/layers/fused_moe/configs"
        found = folder.glob(f"*device_name={NAMED}*.json")
        tuned = {file.stem.replace(f",device_name={NAMED}", "") for file in found}
    return f"tuned for {name}" if name in tuned else f"vLLM's defaults, no table of {name}"


def _attention(config: Mapping, text: Mapping, kind: str) -> list[str]:
    """Return what the rows of a model's attention are of."""
    if text.get("o_lora_rank"):
        return ["compressed", "compressed, of a window"]
    if text.get("kv_lora_rank"):
        return ["latent, of chosen tokens" if text.get("index_topk") else "latent"]
    if kind in _ENCODERS:
        return ["across"]
    found = ["sinks" if kind == "gpt_oss" else "heads"]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        found += ["windows"]
    return found + (["across"] if config.get("is_encoder_decoder") else [])


def rows_of(config: Mapping) -> list[Row]:
    """Return the rows of a model.

    Raises:
        NoModel: it has no layers that the table knows.
    """
    text = text_of(config)
    kind = str(text.get("model_type"))
    encoder_decoder = "decoder_attention_heads" in text
    if not text.get("num_attention_heads") and not text.get("mamba_d_state"):
        raise NoModel("no attention heads are in it: is it the config.json of a language model?")
    layers = [] if encoder_decoder else layers_of(text)
    attends = encoder_decoder or any(layer.mixer in ATTENDS for layer in layers)
    keys = [("attention", of) for of in _attention(config, text, kind) if attends]
    if text.get("kv_lora_rank"):
        keys += [("prefill", "latent")]
    if text.get("linear_num_value_heads"):
        keys += [("linear attention", "gated delta rule")]
    encodes = encoders_of(config) or text.get("encoder_attention_heads")
    if encodes and not kind.startswith("gemma4"):  # whose encoders are transformers' own
        keys += [("encoder", "images or sound")]
    form = format_of(config)
    # gpt-oss keeps all but its experts in 16 bits
    keys += [("linear", "16 bits" if form == "mxfp4" else form)]
    if any(layer.feed_forward == "sparse" for layer in layers) and not _row(keys[-1]).refused:
        keys += [("experts", _experts_format(text, kind, form))]
    mixed = text.get("linear_num_value_heads") or text.get("o_lora_rank") or form in _HEAD_APART
    if (mixed or _keeps_encoder(config)) and form != "16 bits" and not _row(keys[-1]).refused:
        keys += [("linear", "16 bits")]  # projections of decay and gates, of compression; a head
    return [_row(key) for key in keys]


def _keeps_encoder(config: Mapping) -> bool:
    """Return whether a packed model names layers of its encoder as left in 16 bits."""
    quantization = quantization_of(config)
    names = (
        quantization.get("ignore")
        or quantization.get("modules_to_not_convert")
        or quantization.get("exclude")
        or ()
    )
    return bool(encoders_of(config)) and any("vis" in str(name) for name in names)


#: Formats in which vLLM finds the head a layer of its own, in 16 bits.
_HEAD_APART = ("auto-round", "auto-round of 8 bits", "nvfp4 by modelopt", "mxfp8 by modelopt")
#: Mixers that attend to tokens by heads.
ATTENDS = {*ATTENTION, "mamba and attention", "compressed 4", "compressed 128"}


def _experts_format(text: Mapping, kind: str, form: str) -> str:
    if text.get("expert_dtype") == "fp4":
        return "mxfp4 beside fp8-blocks"  # DeepSeek-V4's
    return "mxfp4, not gpt-oss" if form == "mxfp4" and kind != "gpt_oss" else form


@cache
def _row(key: tuple[str, str]) -> Row:
    """Return a row of the table, or for a format that it lacks what vLLM's registry says."""
    part, of = key
    known = {(row.part, row.of): row for row in rows()}
    if key in known:
        return known[key]
    if re.split("[ ,]", of)[0] in contents()["methods"]:
        return Row(part, of, chosen=NOT_COMPARED, instead=_ADVICE)
    return Row(part, of, refused=f"Unknown quantization method: {of:.60}", instead=_ADVICE)


#: What is said of a format that vLLM reads, and that was not tried.
NOT_COMPARED = "a format that was not compared"
_ADVICE = "4 bits in compressed-tensors, GPTQ or AWQ, FP8 in blocks, or a GGUF file"
