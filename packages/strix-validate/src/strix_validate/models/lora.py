# SPDX-License-Identifier: BSD-3-Clause
"""Read a LoRA's adapter_config.json: the LoRA's model, and the flags that serve them together."""

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from strix_validate.layers.defaults import NoModel

FILE = "adapter_config.json"
#: The values that vLLM's option --max-lora-rank accepts (vllm/config/lora.py of 0.33.0), and its
#: default.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT_RANK = 16
#: Features of an adapter that vLLM does not read (PEFTHelper of vllm/lora/peft_helper.py).
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layers used twice",
    "use_bdlora": "blocks along the diagonal",
    "use_qalora": "QALoRA",
}
#: Values of init_lora_weights that leave the model's own weights unchanged.
_UNCHANGING = ("gaussian", "eva", "orthogonal", "mica")
#: Message for LoRA-GA. In training, PEFT subtracts the initial LoRA from the model's weights.
#: Neither PEFT nor vLLM subtracts it again when it loads the LoRA (lora_ga_init of PEFT 0.21.2
#: without gradients; _init_is_supported of vllm/lora/peft_helper.py).
_LORA_GA = (
    "{file} has init_lora_weights=lora_ga: the training changed the weights of {base}, so vLLM "
    "loads the LoRA, but its answers with the original weights are wrong. Save the LoRA with "
    "path_initial_model_for_weight_conversion (PEFT's save_pretrained). If {base} has the changed "
    "weights, set init_lora_weights to true instead"
)
#: Modules of modules_to_save that vLLM reads.
_SAVED_MODULES = {"classifier", "score"}


@dataclass(frozen=True)
class Adapter:
    """An adapter.

    Attributes:
        base: The model for which it was trained.
        rank: The largest rank of its matrices.
        refused: The adapter's features that vLLM does not read, or "".
    """

    base: str
    rank: int
    refused: str

    def flags(self, folder: str) -> str:
        """Return the flags of `vllm serve BASE` that load the adapter from a folder."""
        max_rank = next((rank for rank in RANKS if rank >= self.rank), RANKS[-1])
        flags = f"--enable-lora --lora-modules adapter={quote(folder)}"
        if max_rank > _DEFAULT_RANK:
            flags += f" --max-lora-rank {max_rank}"
        return flags


def read_adapter(config: Mapping[str, Any]) -> Adapter:
    """Return the adapter that an adapter_config.json describes.

    Raises:
        NoModel: The file describes no LoRA, names no model, or has no valid rank; or the LoRA fits
            only changed weights of the model.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise NoModel(
            f"{FILE} has the peft_type {kind!s:.20}, but vLLM loads only LoRA: merge the adapter "
            "into its model"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise NoModel(f"{FILE} has no base_model_name_or_path: which model is it for?")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise NoModel(f"{FILE} has no rank r, or a rank that is not a positive integer")
    if str(config.get("init_lora_weights")).lower() == "lora_ga":
        raise NoModel(_LORA_GA.format(file=FILE, base=base))
    rank = max(ranks)
    refused = _list_refused(config)
    if rank > RANKS[-1]:
        refused.append(f"a rank of {rank}, above {RANKS[-1]}")
    return Adapter(base, rank, ", ".join(refused))


def _list_refused(config: Mapping[str, Any]) -> list[str]:
    """Return the features of an adapter that vLLM does not read."""
    refused = [name for key, name in _REFUSED.items() if config.get(key)]
    saved_modules = set(config.get("modules_to_save") or ())
    if saved_modules - _SAVED_MODULES:
        refused.append("modules_to_save, that is, whole layers")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _UNCHANGING:
        refused.append(f"init_lora_weights={start!s:.20}, which changed the model's own weights")
    if config.get("bias") not in (None, "none"):
        refused.append("biases")
    return refused
