# SPDX-License-Identifier: BSD-3-Clause
"""A LoRA's folder: which model it belongs to, and the line that serves both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strix_validate.models.defaults import NoModel

FILE = "adapter_config.json"
#: The ranks that vLLM has room for (vllm/config/lora.py of 0.33.0), and its default.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT_RANK = 16
#: What an adapter may have that vLLM does not read (PEFTHelper of vllm/lora/peft_helper.py).
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layers used twice",
    "use_bdlora": "blocks along the diagonal",
    "use_qalora": "QALoRA",
}
#: Initial values that change nothing of the model below.
_PLAIN = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """An adapter.

    Attributes:
        base: The model that it was trained on.
        rank: The largest rank of its matrices.
        refused: What it has that vLLM does not read, or "".
    """

    base: str
    rank: int
    refused: str

    def flags(self, folder: str) -> str:
        """Return the flags of `vllm serve BASE` that load it."""
        needed = next((rank for rank in RANKS if rank >= self.rank), RANKS[-1])
        rank = f" --max-lora-rank {needed}" if needed > _DEFAULT_RANK else ""
        return f"--enable-lora --lora-modules adapter={folder}{rank}"


def adapter_of(config: Mapping[str, Any]) -> Adapter:
    """Return what an adapter_config.json says.

    Raises:
        NoModel: It is no LoRA's, or names no model.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise NoModel(f"{FILE} is of {kind!s:.20}, and vLLM loads LoRA alone: merge it")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise NoModel(f"{FILE} does not say base_model_name_or_path: which model is it for?")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise NoModel(f"{FILE} has no rank r, or one that is no number")
    refused = [name for key, name in _REFUSED.items() if config.get(key)]
    if set(config.get("modules_to_save") or ()) - {"classifier", "score"}:
        refused.append("modules_to_save, whole layers of its own")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN:
        refused.append(f"init_lora_weights={start!s:.20}, which changed the model below")
    if config.get("bias") not in (None, "none"):
        refused.append("biases")
    if max(ranks) > RANKS[-1]:
        refused.append(f"a rank of {max(ranks)}, above {RANKS[-1]}")
    return Adapter(base, max(ranks), ", ".join(refused))
