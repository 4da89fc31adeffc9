# SPDX-License-Identifier: BSD-3-Clause
"""The record of a tuning: what it is valid for, what was tried, and the files made from it."""

import hashlib
import importlib.util
import json
import os
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field

from strix_validate.json_file import small_file
from strix_validate.reporting.record import Device, StrictModel

#: A configuration is taken if its median ratio to the packaged one is below, and how often it won.
_GAIN, _WINS = 0.98, 0.8
_FILE = "record.json"
#: What is hashed of each library: the kernels, and what chooses their tiles.
_SOURCES = {
    "flash-attn": ("flash_attn", "flash_attn_triton_amd"),
    "aiter": ("aiter", "ops/triton/_triton_kernels/flash_attn_triton_amd"),
    "vllm": ("vllm", "model_executor/layers/fused_moe/fused_moe.py"),
}
#: The variable by which each library finds its file or folder.
_VARIABLES = {
    "flash-attn": "FLASH_ATTENTION_TRITON_AMD_TILES",
    "aiter": "FLASH_ATTENTION_FWD_TRITON_AMD_CONFIG_JSON",
    "vllm": "VLLM_TUNED_CONFIG_FOLDER",
}


class Binding(StrictModel):
    """What a record is valid for.

    Attributes:
        triton: The version.
        gpu: Name and architecture.
        sources: The sha256 of each library's kernels, "" for one that is not installed.
    """

    triton: str
    gpu: str
    sources: dict[str, str]

    def differences(self, other: "Binding") -> list[str]:
        """Say what differs in another one."""
        found = [
            f"{name} is {getattr(other, name)}, and was {getattr(self, name)}"
            for name in ("triton", "gpu")
            if getattr(self, name) != getattr(other, name)
        ]
        changed = [name for name, digest in self.sources.items() if other.sources[name] != digest]
        return found + [f"the source of {name} is another" for name in changed]


class Trial(StrictModel):
    """A configuration: {} is the packaged one.

    Attributes:
        cost: Its counts, compiled for gfx1151.
        reason: Why it is not measured.
        fault: What is wrong with its result, or its error.
        milliseconds: The median of each round.
    """

    configuration: dict[str, Any]
    cost: dict[str, int] = Field(default_factory=dict)
    reason: str = ""
    fault: str = ""
    milliseconds: list[float] = Field(default_factory=list)


class Tuned(StrictModel):
    """A problem: trials, of which the first is the packaged configuration.

    Attributes:
        library, key: See candidates.Problem.
        clocks: MHz of the GPU in each round, 0 if unknown.
        file, packaged: Of vLLM: the file's name, and what is taken without it.
        is_done: All rounds are over.
    """

    library: str
    key: str
    trials: list[Trial]
    clocks: list[float] = Field(default_factory=list)
    file: str = ""
    packaged: dict[str, Any] = Field(default_factory=dict)
    is_done: bool = False

    def forget_rounds(self) -> None:
        """Drop what was measured, on a GPU that turned out to be throttled."""
        self.clocks = []
        for trial in self.trials:
            trial.milliseconds = []

    @property
    def best(self) -> Trial:
        """The fastest trial, which is the packaged one unless another is clearly faster."""
        packaged = self.trials[0]
        measured = [x for x in self.trials if len(x.milliseconds) == len(self.clocks) > 0]
        if not (self.is_done and measured):
            return packaged
        if packaged not in measured:  # it does not run here at all
            return min(measured, key=lambda trial: statistics.median(trial.milliseconds))
        return min(
            (packaged, *(trial for trial in measured if self.gain(trial))),
            key=lambda trial: statistics.median(self._ratios(trial)),
        )

    def _ratios(self, trial: Trial) -> list[float]:
        rounds = zip(trial.milliseconds, self.trials[0].milliseconds, strict=True)
        return [mine / theirs for mine, theirs in rounds]

    def gain(self, trial: Trial) -> bool:
        """Return whether a trial is faster by more than two measurements of one differ."""
        ratios = self._ratios(trial)
        wins = sum(ratio < 1 for ratio in ratios)
        return statistics.median(ratios) < _GAIN and wins >= _WINS * len(ratios)


class TuneRecord(StrictModel):
    """What was tuned, by the names of problems, and for which models."""

    models: list[str]
    binding: Binding
    versions: dict[str, str | None]
    tuned: dict[str, Tuned] = Field(default_factory=dict)

    def changed(self, library: str) -> list[Tuned]:
        """Return a library's problems for which another configuration than the packaged won."""
        return [x for x in self.tuned.values() if x.library == library and x.best.configuration]


def bind(device: Device) -> Binding:
    """Return what holds now: the installed Triton and kernels, and this GPU."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    sources = {library: _digest(*place) for library, place in _SOURCES.items()}
    return Binding(triton=triton, gpu=f"{device.name} {device.architecture}", sources=sources)


def _digest(package: str, place: str) -> str:
    """Return the sha256 of a package's file, or of a folder's Python files; "" without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return ""
    path = Path(spec.submodule_search_locations[0], place)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest() if files else ""


def replace_text(file: Path, text: str) -> None:
    """Replace a file whole: what is killed in between leaves the one before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    with part.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


class Store:
    """A folder with the record, and the files that libraries read.

    Args:
        folder: It is made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: TuneRecord

    def load(self) -> TuneRecord | None:
        """Return the record of the folder, None without one.

        Raises:
            ValueError: It cannot be read, or is none.
        """
        file = self.folder / _FILE
        if not file.exists():
            return None
        try:
            return TuneRecord.model_validate_json(small_file(file))
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{file} is no record of tune ({first}): move it away") from error

    def write(self) -> None:
        """Write the record."""
        replace_text(self.folder / _FILE, self.record.model_dump_json(indent=1) + "\n")

    def write_files(self) -> None:
        """Write what the libraries read; the variables that name it are set by :meth:`variables`.

        A file of before, whose library keeps its packaged configurations, is removed.
        """
        flash = {x.key: x.best.configuration for x in self.record.changed("flash-attn")}
        # a single query sees all keys with either mask
        flash |= {
            key.replace("causal", "full"): tile
            for key, tile in flash.items()
            if key.startswith("decode")
        }
        about = {"triton": self.record.binding.triton, "gpu": self.record.binding.gpu}
        self._put("flash-attn.json", flash and about | {"tiles": flash})
        changed = {x.file for x in self.record.changed("vllm")}
        for file in (self.folder / "vllm").glob("*.json"):
            if file.name not in changed:
                file.unlink()
        for name in changed:
            rows = [x for x in self.record.tuned.values() if x.file == name]
            table = {x.key: x.best.configuration or x.packaged for x in rows if x.is_done}
            triton = {"triton_version": self.record.binding.triton}
            self._put(f"vllm/{name}", triton | table)

    def _put(self, name: str, content: Any) -> None:
        file = self.folder / name
        if content:
            replace_text(file, json.dumps(content, indent=1) + "\n")
        else:
            file.unlink(missing_ok=True)

    def variables(self) -> dict[str, str]:
        """Return the variables by which libraries find the files."""
        folder = self.folder.resolve()
        places = {"flash-attn": folder / "flash-attn.json", "vllm": folder / "vllm"}
        found = {
            _VARIABLES[library]: str(place)
            for library, place in places.items()
            if self.record.changed(library) and place.exists()
        }
        for tuned in self.record.changed("aiter"):
            found[_VARIABLES["aiter"]] = json.dumps(tuned.best.configuration)
        return found


def describe(tuned: dict[str, Tuned]) -> list[str]:
    """Return a table in Markdown: each problem, and its configurations with counts and times."""
    lines = [
        "| kernel | configuration | VGPRs | spilled | scratch | LDS | waves | WMMA | ms | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, problem in tuned.items():
        for trial in problem.trials:
            names = ("vgprs", "vgpr_spills", "scratch", "lds", "waves", "wmma")
            counts = [str(trial.cost.get(key, "")) for key in names]
            times = trial.milliseconds
            median = f"{statistics.median(times):.4g}" if times else ""
            remark = trial.fault or trial.reason
            if trial is problem.best and problem.is_done:
                remark = "fastest" if trial.configuration else "packaged, kept"
            cells = [name, describe_configuration(trial.configuration), *counts, median, remark]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def describe_configuration(configuration: dict[str, Any]) -> str:
    """Return a configuration in a few words."""
    short = {"BLOCK_SIZE_": "", "BLOCK_": "", "num_": "", "waves_per_eu": "waves/EU"}
    parts = []
    for name, value in configuration.items():
        for old, new in short.items():
            name = name.replace(old, new)
        parts.append(f"{name}={value}")
    return " ".join(parts) or "packaged"


def share(record: TuneRecord) -> str:
    """Return what to send upstream: the machine, what was measured, and how."""
    machine = [f"- GPU: {record.binding.gpu}", f"- Triton: {record.binding.triton}"]
    machine += [f"- {name}: {text}" for name, text in record.versions.items() if text]
    clocks = [clock for x in record.tuned.values() for clock in x.clocks if clock]
    if clocks:
        low, high = min(clocks), max(clocks)
        machine.append(f"- clock in the rounds: {low:.0f} to {high:.0f} MHz")
    tables: dict[str, dict] = {x.file: {} for x in record.changed("vllm")}
    for x in record.tuned.values():
        if x.file in tables and x.is_done:
            tables[x.file][x.key] = x.best.configuration or x.packaged
    parts = [
        f"{name}\n```json\n{json.dumps(table, indent=1)}\n```" for name, table in tables.items()
    ]
    return "\n".join(
        [
            f"Tuned for {', '.join(record.models)} with `strix-validate tune`: each round times "
            "every configuration once, in another order; medians of rounds; results within the "
            "validator's bounds of float64; counts are of code compiled for gfx1151.",
            "",
            *machine,
            "",
            *describe(record.tuned),
            "",
            *parts,
            *_RECEIVERS,
        ]
    )


_RECEIVERS = [
    "",
    "To: https://github.com/vllm-project/vllm/issues (tables of experts), "
    "https://github.com/ROCm/aiter/issues (aiter's forward tile), and this channel (tiles of "
    "flash-attn's built-in kernels, which upstream no longer has).",
]
