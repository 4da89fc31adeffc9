# SPDX-License-Identifier: BSD-3-Clause
"""What transformers assumes where a config.json is silent: a generated table, and its use.

    python -m strix_validate.models.defaults        # writes defaults.json; needs transformers

A config.json leaves out what equals the default of its class, in any of its parts (text_config,
vision_config, audio_config). Of each model_type the table has `keys`, its defaults; `names`, other
names of usual keys; `parts`, their model_type; and where the text of a composed model is unlike its
own class: `text`, what it is without a text_config, and `beside`, what one that is given lacks.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

_FILE = "defaults.json"
#: Keys that neither size nor arrange anything.
_IDLE = re.compile(
    r"token|_ids?$|dropout|drop_|prob|mask|_range$|init|std$|theta|loss|label|temperature|seed"
    r"|return|output_|beam|begin|suppress|use_cache|torch_dtype|dtype|version|tpdrop|num_logits"
    r"|jitter|repetition|chunk_size_feed|summary|pretraining_tp|apply_|_tau$|_impl|kernels|gradient"
)
#: Keys that are taken for true where nothing says them, so that False is of interest.
_FALSE = ("use_sliding_window", "attn_output_gate")
#: A list longer than this is no default that a count reads.
_LONGEST = 128
#: Parts of a config.json that are read, beside those that its class names.
_PARTS = (
    "text_config",
    "vision_config",
    "audio_config",
    "thinker_config",
    "llm_config",
    "language_config",
)


class NoModel(ValueError):
    """A config.json without a model in it that can be placed."""


@cache
def contents() -> dict[str, Any]:
    """Return the table: `transformers`, its release, and `types`, what each model_type has."""
    return json.loads(files(__package__).joinpath(_FILE).read_text())


def complete(config: Mapping, model_type: str = "") -> dict[str, Any]:
    """Return a config with what its class assumes where it is silent, in each of its parts.

    A part that is missing is added only if it is the text: whether a file without a vision_config
    has an encoder, no table knows.

    Args:
        config: A config.json, or a part of one.
        model_type: What to take it for if it does not say.
    """
    types = contents()["types"]
    kind = str(config.get("model_type") or "")
    if model_type and kind not in types:
        kind = model_type
    entry = types.get(kind, {})
    full = dict(entry.get("keys", {})) | dict(config)
    for usual, own in entry.get("names", {}).items():
        if config.get(usual) is None and full.get(own) is not None:
            full[usual] = full[own]
    parts = entry.get("parts", {})
    for name in {*parts, *_PARTS} & full.keys():
        if isinstance(full[name], Mapping):
            part = dict(full[name])
            if part.get("model_type") == kind:  # some files repeat the whole model's
                part.pop("model_type")
            if name == "text_config":
                part = entry.get("beside", {}) | part
            full[name] = complete(part, parts.get(name, ""))
    if "text_config" in parts and not isinstance(full.get("text_config"), Mapping):
        text = entry.get("text", {}) | _own_text(config)
        full["text_config"] = complete(text, parts["text_config"])
    if kind:
        full["model_type"] = kind
    return full


def keys_of(model_type: str) -> set[str]:
    """Return the keys that a class has, by all their names, as far as the table holds them."""
    entry = contents()["types"].get(model_type, {})
    names = entry.get("names", {})
    return {*entry.get("keys", {}), *names, *names.values()}


def _own_text(config: Mapping) -> dict[str, Any]:
    """Return what a config without a text_config says of the text itself."""
    return {key: value for key, value in config.items() if not isinstance(value, Mapping)} | {
        "model_type": None
    }


def collect() -> dict[str, Any]:
    """Return the table, of the transformers that is installed."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    classes = {name: CONFIG_MAPPING[name] for name in list(CONFIG_MAPPING)}
    waiting = list(classes.values())
    while waiting:
        for part in (getattr(waiting.pop(), "sub_configs", None) or {}).values():
            name = getattr(part, "model_type", "")
            if name and name not in classes:
                classes[name] = part
                waiting.append(part)
    types = {name: _describe(classes[name]) for name in sorted(classes)}
    return {"transformers": transformers.__version__, "types": types}


def _describe(config_class: Any) -> dict[str, Any]:
    """Return what one class of transformers assumes."""
    import dataclasses

    keys = {}
    for field in dataclasses.fields(config_class):
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        is_kept = _is_kept(value) or (value is False and field.name in _FALSE)
        if is_kept and not _IDLE.search(field.name):
            keys[field.name] = value
    instance = _instance_of(config_class)
    kinds = getattr(instance, "mlp_layer_types", None)
    if kinds and "first_k_dense_replace" not in keys and "dense" in kinds:
        first = list(kinds).index("sparse") if "sparse" in kinds else len(kinds)
        if "dense" not in kinds[first:]:
            keys["first_k_dense_replace"] = first
    entry = {"keys": keys, "names": dict(config_class.attribute_map)}
    entry["parts"] = _parts_of(config_class, instance)
    entry["text"] = _text_changes(instance, whole=True)
    kind = entry["parts"].get("text_config")
    if kind:
        given = _instance_of(config_class, text_config={"model_type": kind})
        entry["beside"] = _text_changes(given, whole=False)
    return {name: value for name, value in entry.items() if value}


def _is_kept(value: object) -> bool:
    """Return whether a default can decide a size: no default is None, False or a fraction."""
    if isinstance(value, list):
        return len(value) <= _LONGEST and all(type(x) in (int, str) for x in value)
    return type(value) is int or value is True


def _instance_of(config_class: Any, **values: Any) -> Any:
    """Return a class's default instance, which has what it derives; None if it refuses."""
    try:
        return config_class(**values)
    except Exception:  # a few classes refuse their own defaults
        return None


def _parts_of(config_class: Any, instance: Any) -> dict[str, str]:
    """Return the model_type of each part of a class, which its default instance has."""
    parts = dict(getattr(config_class, "sub_configs", None) or {})
    kinds = {}
    for name, part in parts.items():
        own = getattr(getattr(instance, name, None), "model_type", "")
        kind = own or getattr(part, "model_type", "")
        if kind:
            kinds[name] = kind
    return kinds


def _text_changes(instance: Any, whole: bool) -> dict[str, Any]:
    """Return where the text of an instance is unlike its own class's default.

    Args:
        instance: A composed model's config.
        whole: Whether what the text derives from its other keys is of interest too.
    """
    import dataclasses

    text = getattr(instance, "text_config", None)
    if not dataclasses.is_dataclass(text):
        return {}
    usual = _instance_of(type(text))
    changes = {}
    for field in dataclasses.fields(text):
        value = _value_of(text, field.name)
        default = field.default if whole else _value_of(usual, field.name)
        if _IDLE.search(field.name) or value == default or isinstance(value, list):
            continue
        if _is_kept(value):
            changes[field.name] = value
    return changes


def _value_of(instance: Any, name: str) -> Any:
    """Return what an instance says; None of what varies from layer to layer."""
    try:
        return getattr(instance, name, None)
    except Exception:  # of transformers' own, not AttributeError
        return None


def _text_of(table: Mapping) -> str:
    """Return the table as JSON with a line for each model_type."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table["types"].items()]
    head = f'{{\n "transformers": {json.dumps(table["transformers"])},\n "types": {{\n'
    return head + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    (Path(__file__).parent / _FILE).write_text(_text_of(collect()))
