# SPDX-License-Identifier: BSD-3-Clause
"""Write the tables of docs/models.md from the validator's table of models and its tests' configs.

PYTHONPATH=packages/strix-validate/src python tools/models_page.py
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, UTILIZATION
from strix_validate.models import model_memory, table
from strix_validate.models.formats import read_format

Config = dict[str, Any]

# The title of each part of the validator's table.
_TITLES = {
    "attention": "Attention while tokens are read and written",
    "prefill": "Latent attention of new tokens",
    "linear attention": "Linear attention",
    "encoder": "Encoders of images and sound",
    "linear": "Linear layers, by format",
    "experts": "Experts, by format",
    "images": "Images, by diffusers",
}
_HEAD = ("layer or format", "choice", "proven")
# Parts that are left out of the tables of models.
_NOT_LISTED = ("linear", "experts", "prefill")
# Bytes that remain for weights and cache if the GPU has 96 GiB, according to the doctor's rule.
ROOM = UTILIZATION * 96 * GIB - OVERHEAD


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _make_part_tables() -> dict[str, list[str]]:
    """Return the lines of each table of choices, by the line above the table in the page."""
    tables = {}
    for part in _TITLES:
        tables[part] = [
            _format_row(_HEAD),
            _format_row(["---"] * len(_HEAD)),
        ]
    for row in table.read_rows():
        choice = f"`{row.chosen}`"
        if row.refused:
            choice = f"refused: “{row.refused}”; take {row.instead}"
        tables[row.part].append(_format_row([row.of, choice, row.proven]))
    return {f"**{_TITLES[part]}**": lines for part, lines in tables.items()}


def _make_model_table(configs: dict[str, Config], is_compared: bool) -> list[str]:
    """Return the lines of a table of models.

    Args:
        configs: The config.json of each model, by its name.
        is_compared: Whether the models were compared with vLLM. If not, only their memory and the
            tiles of their experts were determined.
    """
    head = [
        "model",
        "format",
        "parts" if is_compared else "tiles of experts",
        "weights, GiB",
        "cache of a token, KiB",
        "tokens in 96 GiB",
    ]
    lines = [
        _format_row(head),
        _format_row(["---"] * len(head)),
    ]
    for name, config in configs.items():
        lines.append(_format_row(_make_model_row(name, config, is_compared)))
    return lines


def _make_model_row(name: str, config: Config, is_compared: bool) -> list[str]:
    weights = model_memory.weights(config)
    cache_of_token = model_memory.cache_of_token(config)
    parts = []
    if is_compared:
        for row in table.find_rows(config):
            if row.part not in _NOT_LISTED:
                parts.append(f"{row.part} ({row.of})")
    else:
        parts.append(table.describe_tiles(config) or "no table is read")
    room = int(ROOM - weights)
    if room < GIB:
        tokens = "does not fit"
    elif cache_of_token:
        tokens = f"{room // cache_of_token:,}"
    else:
        tokens = "no cache"
    return [
        name,
        read_format(config),
        ", ".join(parts),
        f"{weights / GIB:.1f}",
        f"{cache_of_token / 1024:.0f}",
        tokens,
    ]


def _read_configs(folder: Path) -> dict[str, Config]:
    """Read the config.json files in a folder, by the name of the model. Skip formats.json."""
    configs = {}
    for file in sorted(folder.glob("*.json")):
        if file.stem != "formats":
            configs[file.stem] = json.loads(file.read_text())
    return configs


def render(page: str, folder: Path) -> str:
    """Return the page with new tables.

    Args:
        page: The text of docs/models.md.
        folder: The folder with the config.json of each model that was compared. Those of the other
            models are in the folder `shapes` beside it.
    """
    compared = _read_configs(folder)
    counted = _read_configs(folder.parent / "shapes")
    tables = _make_part_tables()
    tables["## Models that were compared"] = _make_model_table(compared, is_compared=True)
    tables["## Models that were counted"] = _make_model_table(counted, is_compared=False)
    for title, lines in tables.items():
        pattern = rf"(?m)(^{re.escape(title)}\n(?:(?!\|).*\n)*)(?:\|.*\n)+"
        before, heading, after = re.split(pattern, page)
        text = "\n".join(lines)
        page = f"{before}{heading}{text}\n{after}"
    return page


if __name__ == "__main__":
    checkout = Path(__file__).parents[1]
    models_page = checkout / "docs/models.md"
    text = render(
        models_page.read_text(),
        checkout / "packages/strix-validate/tests/configs",
    )
    models_page.write_text(text)
