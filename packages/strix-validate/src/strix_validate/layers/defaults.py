# SPDX-License-Identifier: BSD-3-Clause
"""Complete a config.json with transformers' defaults, which are in a generated table.

    python -m strix_validate.layers.defaults        # writes defaults.json; needs transformers

A config.json, and each of its parts such as text_config, may leave out keys whose values equal the
defaults of its class. For each model_type the table has:

    keys: the defaults of its keys.
    names: the names that its class gives to usual keys, by the usual name.
    parts: the model_type of each part.
    text: defaults for the text of a composed model without a text_config, if they differ from those
        of the text's own class.
    beside: such defaults for keys that an existing text_config leaves out.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

_FILE = "defaults.json"
#: Keys that affect neither the sizes nor the arrangement of layers.
_IDLE = re.compile(
    r"token|_ids?$|dropout|drop_|prob|mask|_range$|init|std$|theta|loss|label|temperature|seed"
    r"|return|output_|beam|begin|suppress|use_cache|torch_dtype|dtype|version|tpdrop|num_logits"
    r"|jitter|repetition|chunk_size_feed|summary|pretraining_tp|apply_|_tau$|_impl|kernels|gradient"
)
#: Keys whose default False is recorded, because a missing key may be read as True.
_FALSE = ("use_sliding_window", "attn_output_gate")
#: Maximum length of a list that is recorded as a default.
_LONGEST_LIST = 128
#: Parts of a config.json to read, besides the parts that its class names.
_PARTS = (
    "text_config",
    "vision_config",
    "audio_config",
    "thinker_config",
    "llm_config",
    "language_config",
)


class NoModel(ValueError):
    """A model cannot be read, or its sizes cannot be determined; the message is the reason."""


@cache
def contents() -> dict[str, Any]:
    """Return the table: `transformers` is a release, `types` has an entry for each model_type."""
    return json.loads(files(__package__).joinpath(_FILE).read_text())


def complete(config: Mapping, model_type: str = "") -> dict[str, Any]:
    """Return a config completed with the defaults of its class, also in each of its parts.

    If the class has a text_config and the config lacks it, it is added. Other missing parts are
    not: the table does not show whether a model without a vision_config has an encoder.

    Args:
        config: A config.json, or a part of one.
        model_type: The type to use if the config has none that the table knows.
    """
    types = contents()["types"]
    kind = str(config.get("model_type") or "")
    if model_type and kind not in types:
        kind = model_type
    entry = types.get(kind, {})
    full = dict(entry.get("keys", {})) | dict(config)
    for usual_name, other_name in entry.get("names", {}).items():
        if config.get(usual_name) is None and full.get(other_name) is not None:
            full[usual_name] = full[other_name]
    parts = entry.get("parts", {})
    for name in {*parts, *_PARTS} & full.keys():
        if not isinstance(full[name], Mapping):
            continue
        part = dict(full[name])
        if part.get("model_type") == kind:
            # Some files give a part the type of the whole model. The part has its own type.
            part.pop("model_type")
        if name == "text_config":
            part = entry.get("beside", {}) | part
        full[name] = complete(part, parts.get(name, ""))
    has_text = isinstance(full.get("text_config"), Mapping)
    if "text_config" in parts and not has_text:
        text = entry.get("text", {}) | _text_keys(config)
        full["text_config"] = complete(text, parts["text_config"])
    if kind:
        full["model_type"] = kind
    return full


def list_keys(model_type: str) -> set[str]:
    """Return the keys that the table has for a model_type, under all their names."""
    entry = contents()["types"].get(model_type, {})
    names = entry.get("names", {})
    return {*entry.get("keys", {}), *names, *names.values()}


def _text_keys(config: Mapping) -> dict[str, Any]:
    """Return the keys that describe the text model, from a config without a text_config."""
    keys = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    return keys | {"model_type": None}


def collect() -> dict[str, Any]:
    """Build the table from the installed transformers."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    classes = {name: CONFIG_MAPPING[name] for name in list(CONFIG_MAPPING)}
    remaining = list(classes.values())
    while remaining:
        config_class = remaining.pop()
        for part in (getattr(config_class, "sub_configs", None) or {}).values():
            name = getattr(part, "model_type", "")
            if name and name not in classes:
                classes[name] = part
                remaining.append(part)
    types = {name: _describe(classes[name]) for name in sorted(classes)}
    return {"transformers": transformers.__version__, "types": types}


def _describe(config_class: Any) -> dict[str, Any]:
    """Return the table's entry of one class of transformers."""
    instance = _make_instance(config_class)
    parts = _list_part_types(config_class, instance)
    entry = {
        "keys": _keys_of_class(config_class, instance),
        "names": dict(config_class.attribute_map),
        "parts": parts,
        "text": _text_changes(instance, with_derived=True),
    }
    text_type = parts.get("text_config")
    if text_type:
        with_text = _make_instance(config_class, text_config={"model_type": text_type})
        entry["beside"] = _text_changes(with_text, with_derived=False)
    return {name: value for name, value in entry.items() if value}


def _keys_of_class(config_class: Any, instance: Any) -> dict[str, Any]:
    """Return the defaults of a class that affect sizes or the arrangement of layers."""
    import dataclasses

    keys = {}
    for field in dataclasses.fields(config_class):
        if _IDLE.search(field.name):
            continue
        value = field.default
        if isinstance(value, tuple):
            value = list(value)
        is_false_of_interest = value is False and field.name in _FALSE
        if _can_size(value) or is_false_of_interest:
            keys[field.name] = value
    kinds = list(getattr(instance, "mlp_layer_types", None) or ())
    if "first_k_dense_replace" not in keys and "dense" in kinds:
        num_dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if "dense" not in kinds[num_dense:]:
            keys["first_k_dense_replace"] = num_dense
    return keys


def _can_size(value: object) -> bool:
    """Return whether a default can decide a size.

    Integers, True, and short lists of integers and texts can.
    """
    if isinstance(value, list):
        return len(value) <= _LONGEST_LIST and all(type(item) in (int, str) for item in value)
    return type(value) is int or value is True


def _make_instance(config_class: Any, **values: Any) -> Any:
    """Return a config class's instance, which also has derived keys; None if it cannot be made."""
    try:
        return config_class(**values)
    except Exception:  # a few classes refuse their own defaults
        return None


def _list_part_types(config_class: Any, instance: Any) -> dict[str, str]:
    """Return the model_type of each part of a class, from its default instance if possible."""
    classes = dict(getattr(config_class, "sub_configs", None) or {})
    kinds = {}
    for name, part_class in classes.items():
        part = getattr(instance, name, None)
        kind = getattr(part, "model_type", "") or getattr(part_class, "model_type", "")
        if kind:
            kinds[name] = kind
    return kinds


def _text_changes(instance: Any, with_derived: bool) -> dict[str, Any]:
    """Return the keys of a text model that differ from the defaults of its class.

    Args:
        instance: The config of a composed model, which contains the text model.
        with_derived: Whether to include keys that the text model derives from its other keys.
    """
    import dataclasses

    text = getattr(instance, "text_config", None)
    if not dataclasses.is_dataclass(text):
        return {}
    default_text = _make_instance(type(text))
    changes = {}
    for field in dataclasses.fields(text):
        value = _read_value(text, field.name)
        default = field.default if with_derived else _read_value(default_text, field.name)
        if _IDLE.search(field.name) or value == default or isinstance(value, list):
            continue
        if _can_size(value):
            changes[field.name] = value
    return changes


def _read_value(instance: Any, name: str) -> Any:
    """Return a value of an instance; None if it varies from layer to layer."""
    try:
        return getattr(instance, name, None)
    except Exception:  # transformers raises its own exception, not AttributeError
        return None


def _format_table(table: Mapping) -> str:
    """Return the table as JSON with a line for each model_type."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table["types"].items()]
    head = f'{{\n "transformers": {json.dumps(table["transformers"])},\n "types": {{\n'
    return head + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    (Path(__file__).parent / _FILE).write_text(_format_table(collect()))
