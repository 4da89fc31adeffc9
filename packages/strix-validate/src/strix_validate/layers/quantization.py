# SPDX-License-Identifier: BSD-3-Clause
"""Find the quantization of each part of a model's layers.

A quantization_config can exclude modules, whose weights then stay in 16 bits, by a list of names or
by GPTQModel's `dynamic`. The latter can also change values, such as the bits, for some modules.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from strix_validate.layers.defaults import NoModel

#: The modules that stand for a part of a layer, by their names in checkpoints.
_MODULES = {
    "attention": ("self_attn.o_proj", "attn.o_proj", "attention.o_proj", "mixer.o_proj"),
    "linear attention": ("linear_attn.out_proj", "mamba.out_proj", "mixer.out_proj"),
    "dense": ("mlp.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
    "shared experts": (
        "mlp.shared_expert.down_proj",
        "mlp.shared_experts.down_proj",
        "block_sparse_moe.shared_experts.down_proj",
        "feed_forward.shared_expert.down_proj",
        "mixer.shared_experts.down_proj",
    ),
    "experts": (
        "mlp.experts.0.down_proj",
        "block_sparse_moe.experts.0.w2",
        "feed_forward.experts.0.down_proj",
        "mixer.experts.0.down_proj",
    ),
}
#: Beginnings of the names of modules in a text model's layers, up to the number of the layer.
#: Layers of encoders and of prediction heads (MTP) have other names.
_PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "thinker.model.layers.",
    "backbone.layers.",
)
#: Keys of the list of excluded modules.
_LISTS = ("ignore", "modules_to_not_convert")


def find_mixer_part(mixer: str) -> str:
    """Return the key of _MODULES for a layer's mixer (see parts.Layer)."""
    if mixer in ("linear_attention", "mamba"):
        return "linear attention"
    return "attention"


class LayerQuantization:
    """The quantization of each part of a model's layers.

    Attributes:
        has_exceptions: Whether the quantization may differ between parts or layers.
    """

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Read the exceptions in a quantization_config; an empty one is a model in 16 bits.

        Raises:
            NoModel: A value has a wrong type, or a pattern of module names is malformed.
        """
        self._quantization = quantization
        #: Names of excluded modules, from the number of the layer on.
        self._in_layers: set[str] = set()
        #: Names of modules that are excluded in all layers.
        self._in_all: list[str] = []
        #: Patterns of the names of excluded modules.
        self._patterns: list[re.Pattern] = []
        #: Patterns of names in `dynamic`, with the values that replace those of the
        #: quantization_config. None excludes the modules.
        self._rules: list[tuple[re.Pattern, Mapping | None]] = []
        try:
            self._read_exceptions()
        except (AttributeError, TypeError, re.error) as error:
            raise NoModel(f"quantization_config cannot be read: {error!s:.100}") from error
        self.has_exceptions = bool(self._in_layers or self._in_all or self._patterns or self._rules)

    def _read_exceptions(self) -> None:
        for key in _LISTS:
            for name in self._quantization.get(key) or ():
                self._add_name(str(name))
        for pattern, changes in (self._quantization.get("dynamic") or {}).items():
            excludes = pattern.startswith("-:")
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
            self._rules.append((compiled, None if excludes else dict(changes)))

    def _add_name(self, name: str) -> None:
        if name.startswith("re:"):
            self._patterns.append(re.compile(name.removeprefix("re:")))
            return
        if "layers." not in name:
            self._in_all.append(name.strip("."))
            return
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                self._in_layers.add(name.removeprefix(prefix).strip("."))

    def read(self, part: str, number: int) -> Mapping[str, Any]:
        """Return the quantization_config of a part of a layer; empty for weights of 16 bits.

        Args:
            part: A key of _MODULES.
            number: Number of the layer.
        """
        if not self.has_exceptions:
            return self._quantization
        rules = self._rules
        if part == "experts":
            # On ROCm, vLLM 0.33 does not apply `dynamic` to experts (moe_wna16.py).
            rules = []
        for module in _MODULES[part]:
            name = f"{number}.{module}"
            if self._is_listed(name, module):
                return {}
            if any(_matches(pattern, name) for pattern in self._patterns):
                return {}
            for pattern, changes in rules:
                if _matches(pattern, name):
                    return {} if changes is None else {**self._quantization, **changes}
        return self._quantization

    def _is_listed(self, name: str, module: str) -> bool:
        """Return whether a list has the name of a module or of one that contains it."""
        words = name.split(".")
        containers = {".".join(words[:length]) for length in range(1, len(words) + 1)}
        if containers & self._in_layers:
            return True
        return any(f".{other}." in f".{module}." for other in self._in_all)

    def list_distinct(self, part: str, numbers: Iterable[int]) -> list[Mapping[str, Any]]:
        """Return the distinct quantization_configs of a part in these layers; 16 bits are last."""
        configs: list[Mapping[str, Any]] = []
        for number in numbers:
            config = self.read(part, number)
            if config not in configs:
                configs.append(config)
        return sorted(configs, key=lambda config: not config)


def _matches(pattern: re.Pattern, name: str) -> bool:
    return any(pattern.match(f"{prefix}{name}") for prefix in _PREFIXES)
