# SPDX-License-Identifier: BSD-3-Clause
"""What runs a model in diffusers' layout, and in how much memory; needs no torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strix_validate import limits
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, memory_of
from strix_validate.models import table
from strix_validate.models.table import NoModel, Row

INDEX = "model_index.json"
#: Bytes of a weight as the stack loads it.
_BFLOAT16 = 2
#: Dimensions of a tensor.
_RANK_LIMIT = 16


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers. weights: bytes in bfloat16 by component, 0 where none are there."""

    name: str
    weights: dict[str, int]

    def as_dict(self) -> Mapping:
        """Return what --json prints."""
        rows = [{"of": row.of, "chosen": row.chosen, "proven": row.proven} for row in self.rows]
        return {"pipeline": self.name, "rows": rows, "weights": self.weights}

    @property
    def rows(self) -> list[Row]:
        """What diffusers chooses for it."""
        return [row for row in table.rows() if row.part == "images"]


def answer(index: Mapping, folder: Path) -> Pipeline:
    """Return what a model_index.json names, and what its folder holds.

    Raises:
        NoModel: it names no pipeline, or a file of weights cannot be read.
    """
    table.about_target()
    parts = {
        name: said
        for name, said in index.items()
        if isinstance(said, list) and len(said) == 2 and all(isinstance(x, str) for x in said)
    }
    if not isinstance(name := index.get("_class_name"), str) or not parts:
        raise NoModel(f"{folder / INDEX} names no pipeline with components: is it diffusers'?")
    # each is the name of a folder beside the index
    if leading_out := [part for part in parts if not re.fullmatch(r"\w[\w.-]*", part)]:
        raise NoModel(f"{folder / INDEX} names a component {leading_out[0]!a:.100}: is it damaged?")
    return Pipeline(name, {part: _weights(folder / part) for part in parts})


def _weights(folder: Path) -> int:
    files = sorted(folder.glob("*.safetensors"))
    # NAME.fp16.safetensors is the same once more
    plain = [file for file in files if "." not in file.stem] or files
    return _BFLOAT16 * sum(map(_elements, plain))


def _elements(file: Path) -> int:
    """Count the numbers that a file of safetensors holds, by its header.

    Raises:
        NoModel: it has none.
    """
    try:
        if not file.is_file():  # a pipe would be read for ever
            raise ValueError("it is not a regular file")
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if not 0 < size <= min(file.stat().st_size, limits.FILE):
                raise ValueError("its header ends behind it, or is longer than any")
            header = json.loads(opened.read(size))
        shapes = [said["shape"] for name, said in header.items() if name != "__metadata__"]
        if any(len(shape) > _RANK_LIMIT for shape in shapes):
            raise ValueError(f"a tensor of more than {_RANK_LIMIT} dimensions")
        found = sum(math.prod(shape) for shape in shapes)
        if not 0 <= found <= 2 * file.stat().st_size:  # four bits each
            raise ValueError("its shapes do not fit its size")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NoModel(f"{file} is not a safetensors file ({error!s:.100})") from error


def describe(name: str, found: Pipeline, tree: Tree) -> str:
    """Return a pipeline as lines for people."""
    lines = [f"{name}: {found.name}, which diffusers runs, in the stack `diffusion`"]
    lines += [f"  {row.of:29} {row.chosen}: {row.proven}" for row in found.rows]
    total = sum(found.weights.values())
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in found.weights.items() if size)
    if not total:
        return "\n".join([*lines, f"  {'memory':29} no safetensors are there to count"])
    lines.append(f"  {'memory':29} {total / GIB:.1f} GiB of weights in bfloat16: {parts}")
    if not (machine := memory_of(tree)):
        return "\n".join([*lines, f"  {'here':29} no Strix Halo whose memory could be read"])
    free = f"{machine.usable / GIB:.1f} GiB for the GPU"
    fits = total + OVERHEAD <= machine.usable
    here = f"fits: {free}" if fits else f"does not fit: {free}, and strix-validate doctor says why"
    return "\n".join([*lines, f"  {'here':29} {here}"])
