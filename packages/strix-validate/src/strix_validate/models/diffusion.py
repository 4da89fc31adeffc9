# SPDX-License-Identifier: BSD-3-Clause
"""Report how diffusers runs a pipeline, and in how much memory; needs no torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strix_validate import limits
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, read_memory_budget
from strix_validate.json_file import read_json_object
from strix_validate.models import table
from strix_validate.models.table import NoModel, Row

INDEX = "model_index.json"
#: Bytes of a weight in bfloat16, in which the stack `diffusion` loads all weights.
_BFLOAT16 = 2
#: Maximum number of a tensor's dimensions.
_RANK_LIMIT = 16


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of diffusers.

    Attributes:
        name: Its class.
        weights: Bytes in bfloat16 by component; 0 for a component without weights.
    """

    name: str
    weights: dict[str, int]

    def as_dict(self) -> Mapping:
        """Return what --json prints."""
        rows = []
        for row in self.rows:
            rows.append(
                {
                    "of": row.of,
                    "chosen": row.chosen,
                    "proven": row.proven,
                }
            )
        return {
            "pipeline": self.name,
            "rows": rows,
            "weights": self.weights,
        }

    @property
    def rows(self) -> list[Row]:
        """The table's rows with the choices of diffusers."""
        return [row for row in table.read_rows() if row.part == "images"]


def answer(index: Mapping, folder: Path) -> Pipeline:
    """Return the pipeline that a model_index.json describes, with the sizes of its weights.

    Raises:
        NoModel: The index names no pipeline or no valid components, a file of weights is missing or
            cannot be read, or the table is not for this GPU.
    """
    table.require_target()
    components = [key for key, value in index.items() if _is_component(value)]
    name = index.get("_class_name")
    if not isinstance(name, str) or not components:
        raise NoModel(f"{folder / INDEX} names no pipeline with components: is it diffusers'?")
    for component in components:
        # a component's name is that of a folder beside the index, and must not lead elsewhere
        if not re.fullmatch(r"\w[\w.-]*", component):
            raise NoModel(
                f"{folder / INDEX}: the name of component {component!a:.100} is not valid"
            )
    weights = {component: _count_bytes(folder / component) for component in components}
    return Pipeline(name, weights)


def _is_component(value: object) -> bool:
    """Return whether a value of model_index.json names a component's library and class."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(name, str) for name in value)


def _count_bytes(folder: Path) -> int:
    files = sorted(folder.glob("*.safetensors"))
    # NAME.fp16.safetensors has the same weights as NAME.safetensors, so count only one of them
    plain = [file for file in files if "." not in file.stem]
    counted = plain or files
    _require_shards(folder, {file.name for file in counted})
    return _BFLOAT16 * sum(map(_count_elements, counted))


def _require_shards(folder: Path, present: set[str]) -> None:
    """Require that an index's files are all present if one of them is.

    Raises:
        NoModel: A file is missing, as in a download that was interrupted, or an index cannot be
            read.
    """
    for file in folder.glob("*.safetensors.index.json"):
        try:
            names = set(map(str, dict(read_json_object(file)["weight_map"]).values()))
        except (ValueError, KeyError, TypeError) as error:
            raise NoModel(f"{file} is not an index of safetensors ({error!s:.100})") from error
        missing = sorted(names - present)
        if missing and names & present:
            raise NoModel(f"{folder / missing[0]} is missing: is the download complete?")


def _count_elements(file: Path) -> int:
    """Count the numbers in a safetensors file, from its header.

    Raises:
        NoModel: The file cannot be read, or its header is not valid.
    """
    try:
        if not file.is_file():  # reading a pipe would not end
            raise ValueError("it is not a regular file")
        file_size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if not 0 < header_size <= min(file_size, limits.FILE):
                raise ValueError("its header is empty, or longer than the file or any real header")
            header = json.loads(stream.read(header_size))
        total = 0
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            shape = tensor["shape"]
            if len(shape) > _RANK_LIMIT:
                raise ValueError(f"a tensor of more than {_RANK_LIMIT} dimensions")
            total += math.prod(shape)
        if not 0 <= total <= 2 * file_size:  # a number has at least four bits
            raise ValueError("the shapes of its tensors do not fit the file's size")
        return total
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NoModel(f"{file} is not a safetensors file ({error!s:.100})") from error


def describe(name: str, pipeline: Pipeline, tree: Tree) -> str:
    """Return a description of a pipeline as lines of text for the terminal.

    Args:
        name: The pipeline's name as the user wrote it.
        pipeline: The pipeline.
        tree: The machine on which the pipeline is to run.
    """
    lines = [f"{name}: {pipeline.name}, which diffusers runs (stack `diffusion`)"]
    lines += [_line(row.of, f"{row.chosen}: {row.proven}") for row in pipeline.rows]
    total = sum(pipeline.weights.values())
    if not total:
        lines.append(_line("memory", "unknown, because there are no safetensors files to count"))
        return "\n".join(lines)
    sizes = [f"{part} {size / GIB:.1f}" for part, size in pipeline.weights.items() if size]
    size = f"{total / GIB:.1f} GiB of weights in bfloat16: {', '.join(sizes)}"
    lines.append(_line("memory", size))
    machine = read_memory_budget(tree)
    if not machine:
        verdict = "this is no Strix Halo, or its memory cannot be read"
    else:
        free = f"{machine.usable / GIB:.1f} GiB for the GPU"
        if total + OVERHEAD <= machine.usable:
            verdict = f"fits: {free}"
        else:
            verdict = f"does not fit: {free}; strix-validate doctor shows what limits the memory"
    lines.append(_line("here", verdict))
    return "\n".join(lines)


def _line(title: str, text: str) -> str:
    return f"  {title:29} {text}"
