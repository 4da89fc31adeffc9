# SPDX-License-Identifier: BSD-3-Clause
"""Write the tables of docs/models.md, from the validator's table; the page says how."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, UTILIZATION
from strix_validate.models import model_memory, table
from strix_validate.models.formats import format_of

_TITLES = {
    "attention": "Attention while tokens are read and written",
    "prefill": "Latent attention of new tokens",
    "linear attention": "Linear attention",
    "encoder": "Encoders of images and sound",
    "linear": "Linear layers, by format",
    "experts": "Experts, by format",
    "images": "Images, by diffusers",
}
_HEAD = ("of", "choice", "proven")
#: What doctor lets weights and cache have of 96 GiB.
ROOM = UTILIZATION * 96 * GIB - OVERHEAD


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _parts() -> dict[str, list[str]]:
    """The tables of what is chosen, by the line above each."""
    tables = {part: [_line(_HEAD), _line(["---"] * len(_HEAD))] for part in _TITLES}
    for row in table.rows():
        refused = f"refused: “{row.refused}”; take {row.instead}"
        chosen = refused if row.refused else f"`{row.chosen}`"
        tables[row.part].append(_line((row.of, chosen, row.proven)))
    return {f"**{_TITLES[part]}**": lines for part, lines in tables.items()}


def _models(configs: dict[str, dict], compared: bool) -> list[str]:
    parted = "parts" if compared else "tiles of experts"
    head = ("model", "format", parted, "weights, GiB", "cache of a token, KiB", "tokens in 96 GiB")
    lines = [_line(head), _line(["---"] * 6)]
    for name, config in configs.items():
        size, token = model_memory.weights(config), model_memory.cache_of_token(config)
        parts = [f"{row.part} ({row.of})" for row in table.rows_of(config)
                 if row.part not in ("linear", "experts", "prefill")]  # fmt: skip
        parts = parts if compared else [table.tiles_of(config) or "no table is read"]
        room = int(ROOM - size)
        tokens = f"{room // token:,}" if token else "no cache"
        lines.append(_line((
            name, format_of(config), ", ".join(parts), f"{size / GIB:.1f}",
            f"{token / 1024:.0f}", "does not fit" if room < GIB else tokens,
        )))  # fmt: skip
    return lines


def render(page: str, folder: Path) -> str:
    """Return the page with its tables as of now; the folder has the models' configurations."""
    configs, counted = (
        {f.stem: json.loads(f.read_text()) for f in sorted(place.glob("*.json"))
         if f.stem != "formats"}
        for place in (folder, folder.parent / "shapes")
    )  # fmt: skip
    tables = _parts()
    tables["## Models that were compared"] = _models(configs, True)
    tables["## Models that were counted"] = _models(counted, False)
    for title, lines in tables.items():
        before, found, after = re.split(
            rf"(?m)(^{re.escape(title)}\n(?:(?!\|).*\n)*)(?:\|.*\n)+", page
        )
        page = before + found + "\n".join(lines) + "\n" + after
    return page


if __name__ == "__main__":
    home = Path(__file__).parents[1]
    written = home / "docs/models.md"
    written.write_text(render(written.read_text(), home / "packages/strix-validate/tests/configs"))
