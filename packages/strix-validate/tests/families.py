# SPDX-License-Identifier: BSD-3-Clause
"""Count the parameters of transformers' own classes, one of each family, on torch's meta device.

    python tests/families.py        # writes families.json; needs transformers and torch

Each family is counted twice. The first config has no keys, so that the class's defaults apply. The
second one changes num_hidden_layers, vocab_size and intermediate_size, and contains the keys that
the class derives from them, as published files do. A count is the number of elements of all
parameters. The parameters of encoders are also counted separately.
"""

import dataclasses
import json
import re
import signal
from pathlib import Path

FILE = Path(__file__).with_name("families.json")
_MAPPINGS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM")
#: Keys that do not change a model's shapes.
_IDLE = re.compile("token|_id$|ids$|index|label|axis|version")
#: Seconds that building a model may take.
_LIMIT = 120


def collect() -> dict:
    """Return transformers' version and, by model_type, changed keys and numbers of parameters."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    names: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
            names.setdefault(kind, name if isinstance(name, str) else name[0])
    counted = {kind: _count(kind, name) for kind, name in sorted(names.items())}
    return {
        "transformers": transformers.__version__,
        "families": {kind: counts for kind, counts in counted.items() if counts},
    }


def _count(kind: str, name: str) -> list[list]:
    """Return the counts of one family, without those of configs that its class refuses."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    counts = []
    for change in (False, True):
        signal.signal(signal.SIGALRM, _stop)
        signal.alarm(_LIMIT)
        try:
            changes = _changes(config_class) if change else {}
            counts.append([changes, *_parameters(config_class(**changes), name)])
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {error!s:.80}")
        finally:
            signal.alarm(0)
    return counts


def _stop(*_: object) -> None:
    raise TimeoutError("too long")


def _changes(config_class: type) -> dict:
    """Return config keys that change dimensions of a class's text model, and the derived keys."""
    part = getattr(config_class, "sub_configs", {}).get("text_config")
    instance = config_class()
    text = instance.text_config if part else instance
    changes = {}
    for key, change in (("num_hidden_layers", 5), ("vocab_size", 1024), ("intermediate_size", 512)):
        name = text.attribute_map.get(key, key)
        if isinstance(getattr(text, name, None), int):
            changes[name] = getattr(text, name) + change
    if part:
        kind = {"model_type": text.model_type}
        text = config_class(text_config=kind | changes).text_config
        return {"text_config": kind | changes | derived(text)}
    return changes | derived(config_class(**changes))


def derived(config) -> dict:
    """Return the keys that a config derives from others: lists (layer types) and integers."""
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    values = {}
    for key, value in config.to_dict().items():
        is_list = isinstance(value, list) and all(type(x) in (int, str) for x in value)
        if usual.get(key) is None and (is_list or type(value) is int) and not _IDLE.search(key):
            values[key] = value
    return values


def _parameters(config, name: str) -> tuple[int, int]:
    """Return the number of all parameters, and the number in image and audio encoders."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    encoders = sum(n for key, n in sizes.items() if re.search("vis|aud|speech", key))
    return sum(sizes.values()), encoders


if __name__ == "__main__":
    table = collect()
    lines = [f"  {json.dumps(kind)}: {json.dumps(x)}" for kind, x in table["families"].items()]
    head = f'{{\n "transformers": "{table["transformers"]}",\n "families": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n }\n}\n")
