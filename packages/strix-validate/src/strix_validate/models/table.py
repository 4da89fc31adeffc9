# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM and diffusers choose on gfx1151: a table's rows, and how far each is proven."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from strix_validate import NAMED, TARGET

#: What a check proves by the start of its id; gemm, sdpa and conv prove something on a GPU alone.
PROVES = {
    "kernels": "compiled",
    "attention": "interpreted",
    "flash-attn": "interpreted",
    "emulated": "emulated",
}
#: The keys of config.json that count experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Encoders without a decoder: their attention sees all tokens.
_ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")


class NoModel(ValueError):
    """A config.json without a model in it that this table can place."""


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
    if (config.get("text_config") or config).get("model_type") in contents()["unanswered"]:
        return False
    return bool(set(config.get("architectures") or ()) & set(contents()["architectures"]))


#: How vLLM's tables of tiles name a format of experts; those of other formats have no table.
_TILED = {
    "16 bits": "", "fp8-blocks": ",dtype=fp8_w8a8,block_shape=[128,128]",
    "w4a16": ",dtype=int4_w4a16", "gptq": ",dtype=int4_w4a16", "awq": ",dtype=int4_w4a16",
}  # fmt: skip


def tiles_of(config: Mapping, source: Path | None = None) -> str:
    """Say whether vLLM has tiles for the model's experts that were tuned on this GPU.

    Empty without experts, or where their kernel reads no table.

    Args:
        source: of the vLLM that answers, instead of the release that was compared.
    """
    text = config.get("text_config") or config
    count = next((n for key in EXPERTS if (n := text.get(key))), 0)
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


def format_of(config: Mapping) -> str:
    """Return the format of a model's weights.

    Raises:
        NoModel: it is in none of the table's.
    """
    said = config.get("quantization_config")
    if not said:
        return "16 bits"
    method = str(said.get("quant_method"))
    if method == "fp8":
        return "fp8-blocks" if said.get("weight_block_size") else "fp8"
    if method == "compressed-tensors":
        groups = said.get("config_groups") or {}
        kinds = {
            (str(w.get("type")), w.get("num_bits") or 0, w.get("strategy"))
            for w in (group.get("weights") or {} for group in groups.values())
        }
        known = {("float", 8): "fp8", ("int", 4): "w4a16", ("int", 8): "w8a16"}
        found = {known.get((type_, bits), "") for type_, bits, _ in kinds}
        if ("float", 8, "block") in kinds:
            found = {"fp8-blocks"} if len(kinds) == 1 else {""}
        activations = any(group.get("input_activations") for group in groups.values())
        if activations and found & {"w4a16", "w8a16"}:
            found = {""}
        if ("int", 8, "channel") in kinds and found == {"w8a16"}:
            found = {"w8a16-channels"} if len(kinds) == 1 else {""}
        if len(found) == 1 and (name := found.pop()):
            return name
    if method == "gptq" and int(said.get("bits") or 0) == 8:
        return "w8a16"  # the same kernels
    four_bits = method in ("awq", "gptq") and int(said.get("bits") or 0) == 4
    if four_bits or method in ("mxfp4", "gguf"):
        return method
    raise NoModel(f"a quantization_config that was not compared: {method:.100}")


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
        NoModel: it has no attention, or a format, that the table knows.
    """
    text = config.get("text_config") or config
    kind = str(text.get("model_type"))
    if not (text.get("num_attention_heads") or text.get("decoder_attention_heads")):
        raise NoModel("no attention heads are in it: is it the config.json of a language model?")
    wanted = [("attention", of) for of in _attention(config, text, kind)]
    if text.get("kv_lora_rank"):
        wanted += [("prefill", "latent")]
    if text.get("linear_num_value_heads"):
        wanted += [("linear attention", "gated delta rule")]
    encodes = config.get("vision_config") or config.get("encoder_attention_heads")
    if encodes and not kind.startswith("gemma4"):  # whose encoders are transformers' own
        wanted += [("encoder", "images or sound")]
    form = format_of(config)
    # gpt-oss keeps all but its experts in 16 bits
    wanted += [("linear", "16 bits" if form == "mxfp4" else form)]
    known = {(row.part, row.of): row for row in rows()}
    if any(text.get(name) for name in EXPERTS) and not known[wanted[-1]].refused:
        packed = text.get("expert_dtype") == "fp4"  # DeepSeek-V4's
        wanted += [("experts", "mxfp4 beside fp8-blocks" if packed else form)]
    mixed = text.get("linear_num_value_heads") or text.get("o_lora_rank")
    if mixed and form != "16 bits" and not known[wanted[-1]].refused:
        wanted += [("linear", "16 bits")]  # the projections of decay and gates, or of compression
    if form == "mxfp4" and wanted[-1][0] != "experts":
        raise NoModel("MXFP4 was compared for experts alone")
    return [known[key] for key in wanted]
