# SPDX-License-Identifier: BSD-3-Clause
"""Print docs/models.md, from the validator's table; the page says how."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, UTILIZATION
from strix_validate.models import model_memory, table

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
_TEXT = """\
# Which models run

`PYTHONPATH=packages/strix-validate/src python docs/models_page.py` prints this page, from
`strix_validate/models/table.toml` and the configurations of public models in
`packages/strix-validate/tests/configs` and `shapes` beside it.

`strix-validate models FOLDER` says it for your model, from its config.json, and downloads nothing.
Where vLLM is installed, or with `--vllm-source DIR`, vLLM's own code chooses: it builds the model,
without memory, on a mock gfx1151. Elsewhere the table answers, which was
[compared](../evidence/2026-11-23-models.md) with vLLM {version} and the recipe's patches.

How far a choice is proven: *compiled* for gfx1151; *interpreted*: in Triton's interpreter, against
float64; *emulated*: the compiled code executed on a CPU, against float64; *emulated by hand*: so
with a [vLLM](../evidence/2026-11-26-vllm-by-hand.md) and a
[torch](../evidence/2026-11-24-torch-by-hand.md) that were compiled by hand. A proof covers what the
[checks](validate.md#check-vllms-kernels) launch, not the layer around it. No model ran on gfx1151.

Of a folder in diffusers' layout (`model_index.json`: Stable Diffusion, Flux and others),
`strix-validate models` counts the weights of its files in bfloat16, as the
[stack](../stacks/diffusion/README.md) loads them; `native` is torch's SDPA, `flash` flash-attn. The
decoder, whose one head has 512 lanes, takes SDPA in either case. The stack's `check` has a U-Net, a
transformer and a decoder.

## What is chosen
"""
_MEMORY = """\

## Models that were compared

Weights are counted from dimensions, within 1 % of what vLLM allocates. Keys and values are in 16
bits, and at most: layers with windows keep fewer. Of 96 GiB for the GPU, vLLM's default and the
[overhead](vllm.md#memory) leave {total:.0f} for both.
"""
_COUNTED = """\

## Models that were counted

The shapes of 2026, within 0.2 % of the parameters that transformers makes of the same file, and
within 0.6 % of what vLLM allocates. vLLM chooses for them what stands above; of Mistral-Small-4 it
knows no class for the text of this file. The tiles are those of vLLM's fused experts in this
format: a table was tuned on this GPU, or the defaults stand.
"""
#: What doctor lets weights and cache have of 96 GiB.
_ROOM = UTILIZATION * 96 * GIB - OVERHEAD


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _parts() -> list[str]:
    lines = []
    for part, title in _TITLES.items():
        lines += ["", f"**{title}**", "", _line(_HEAD), _line(["---"] * len(_HEAD))]
        for row in table.rows():
            if row.part == part:
                refused = f"refused: “{row.refused}”; take {row.instead}"
                chosen = refused if row.refused else f"`{row.chosen}`"
                lines.append(_line((row.of, chosen, row.proven)))
    return lines


def _models(configs: dict[str, dict], compared: bool) -> list[str]:
    parted = "parts" if compared else "tiles of experts"
    head = ("model", "format", parted, "weights, GiB", "cache of a token, KiB", "tokens in 96 GiB")
    lines = ["", _line(head), _line(["---"] * 6)]
    for name, config in configs.items():
        size, token = model_memory.weights(config), model_memory.cache_of_token(config)
        parts = [f"{row.part} ({row.of})" for row in table.rows_of(config)
                 if row.part not in ("linear", "experts", "prefill")]  # fmt: skip
        parts = parts if compared else [table.tiles_of(config) or "no table is read"]
        room = int(_ROOM - size)
        tokens = f"{room // token:,}" if token else "no cache"
        lines.append(_line((
            name, table.format_of(config), ", ".join(parts), f"{size / GIB:.1f}",
            f"{token / 1024:.0f}", "does not fit" if room < GIB else tokens,
        )))  # fmt: skip
    return lines


def render(folder: Path) -> str:
    """Return the page, with the models whose configurations are in the folder."""
    configs, counted = (
        {f.stem: json.loads(f.read_text()) for f in sorted(place.glob("*.json"))
         if f.stem != "formats"}
        for place in (folder, folder.parent / "shapes")
    )  # fmt: skip
    lines = [_TEXT.format(version=table.version()).rstrip("\n"), *_parts()]
    lines += [_MEMORY.format(total=_ROOM / GIB).rstrip("\n"), *_models(configs, True)]
    lines += [_COUNTED.rstrip("\n"), *_models(counted, False)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    tests = Path(__file__).parents[1] / "packages/strix-validate/tests"
    sys.stdout.write(render(tests / "configs"))
