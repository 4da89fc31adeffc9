# SPDX-License-Identifier: BSD-3-Clause
"""Store the record of a tuning, and write the tuned configurations to files for the libraries."""

import hashlib
import importlib.util
import json
import os
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field

from strix_validate.json_file import read_small_file
from strix_validate.reporting.record import Device, StrictModel

#: A configuration can replace the packaged one if the median ratio of their times is below
#: _MAX_RATIO, and if it was faster in at least the share _MIN_WINS of the rounds.
_MAX_RATIO = 0.98
_MIN_WINS = 0.8
_FILE = "record.json"
#: The package of each library, and the path in the package that is hashed. The path contains the
#: kernels, and the code that chooses their tiles.
_SOURCES = {
    "flash-attn": ("flash_attn", "flash_attn_triton_amd"),
    "aiter": ("aiter", "ops/triton/_triton_kernels/flash_attn_triton_amd"),
    "vllm": ("vllm", "model_executor/layers/fused_moe/fused_moe.py"),
}
#: The environment variable of each library. It names a file or a folder; aiter's contains the
#: configuration itself.
VARIABLES = {
    "flash-attn": "FLASH_ATTENTION_TRITON_AMD_TILES",
    "aiter": "FLASH_ATTENTION_FWD_TRITON_AMD_CONFIG_JSON",
    "vllm": "VLLM_TUNED_CONFIG_FOLDER",
}


class Binding(StrictModel):
    """The environment for which a record is valid.

    Attributes:
        triton: The version of Triton.
        gpu: Name and architecture of the GPU.
        sources: The sha256 of each library's kernels, "" for one that is not installed.
    """

    triton: str
    gpu: str
    sources: dict[str, str]

    def describe_differences(self, current: "Binding") -> list[str]:
        """Return a message for each value that differs in the current binding."""
        messages = []
        for name in ("triton", "gpu"):
            before = getattr(self, name)
            now = getattr(current, name)
            if before != now:
                messages.append(f"{name} is {now}, and was {before}")
        for library, digest in self.sources.items():
            if current.sources[library] != digest:
                messages.append(f"the source of {library} has changed")
        return messages


class Trial(StrictModel):
    """A configuration that was tried.

    Attributes:
        configuration: The configuration; {} stands for the packaged one.
        cost: The counts of its code, compiled for gfx1151; see KernelCost.
        reason: The reason why the configuration is not measured, or "".
        fault: The fault of its result, the error that it raised, or "".
        milliseconds: The median time in each round.
    """

    configuration: dict[str, Any]
    cost: dict[str, int] = Field(default_factory=dict)
    reason: str = ""
    fault: str = ""
    milliseconds: list[float] = Field(default_factory=list)


class Tuned(StrictModel):
    """A problem that is tuned.

    Attributes:
        library: See candidates.Problem.
        key: See candidates.Problem.
        trials: The configurations that were tried; the first is the packaged one.
        clocks: MHz of the GPU in each round, 0 if unknown.
        file: The name of vLLM's file for the problem, "" for other libraries.
        packaged: The configuration that vLLM used without that file, {} for other libraries.
        is_done: Whether all rounds are over.
    """

    library: str
    key: str
    trials: list[Trial]
    clocks: list[float] = Field(default_factory=list)
    file: str = ""
    packaged: dict[str, Any] = Field(default_factory=dict)
    is_done: bool = False

    def forget_rounds(self) -> None:
        """Drop the times, which were measured on a GPU that turned out to be throttled."""
        self.clocks = []
        for trial in self.trials:
            trial.milliseconds = []

    @property
    def best(self) -> Trial:
        """The packaged trial, or the fastest of the trials that are clearly faster.

        Until all rounds are over, the best trial is the packaged one. If the packaged configuration
        does not run here, the best trial is the fastest one.
        """
        packaged = self.trials[0]
        rounds = len(self.clocks)
        measured = [trial for trial in self.trials if len(trial.milliseconds) == rounds]
        if not self.is_done or not rounds or not measured:
            return packaged
        if packaged not in measured:
            # The packaged configuration does not run on this machine.
            return min(measured, key=lambda trial: statistics.median(trial.milliseconds))
        faster = [trial for trial in measured if self.is_faster(trial)]
        return min(
            (packaged, *faster),
            key=lambda trial: statistics.median(self._compute_ratios(trial)),
        )

    def _compute_ratios(self, trial: Trial) -> list[float]:
        """Return a trial's time in each round, divided by the packaged configuration's."""
        packaged = self.trials[0]
        rounds = zip(trial.milliseconds, packaged.milliseconds, strict=True)
        return [time / packaged_time for time, packaged_time in rounds]

    def is_faster(self, trial: Trial) -> bool:
        """Return whether a trial is faster than the packaged configuration.

        The limits are meant to exceed the difference between two measurements of one configuration.
        """
        ratios = self._compute_ratios(trial)
        wins = sum(ratio < 1 for ratio in ratios)
        return statistics.median(ratios) < _MAX_RATIO and wins >= _MIN_WINS * len(ratios)


class TuneRecord(StrictModel):
    """The content of the record's file.

    Attributes:
        models: The models for which kernels were tuned.
        binding: The environment for which the record is valid.
        versions: Versions of the machine's software, by name.
        tuned: Problems by name.
    """

    models: list[str]
    binding: Binding
    versions: dict[str, str | None]
    tuned: dict[str, Tuned] = Field(default_factory=dict)

    def list_changed(self, library: str) -> list[Tuned]:
        """Return a library's problems whose best configuration is not the packaged one."""
        changed = []
        for tuned in self.tuned.values():
            if tuned.library == library and tuned.best.configuration:
                changed.append(tuned)
        return changed

    def list_rows(self, file: str) -> dict[str, dict[str, Any]]:
        """Return the rows of one of vLLM's files, by number of tokens.

        Rows whose best configuration is the packaged one are included, because vLLM uses the
        nearest row of the file.
        """
        rows = {}
        for tuned in self.tuned.values():
            if tuned.file == file and tuned.is_done:
                rows[tuned.key] = tuned.best.configuration or tuned.packaged
        return rows


def read_binding(device: Device) -> Binding:
    """Return the current binding: the installed Triton and kernels, and this GPU."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return Binding(
        triton=triton,
        gpu=f"{device.name} {device.architecture}",
        sources={library: _hash_source(*source) for library, source in _SOURCES.items()},
    )


def _hash_source(package: str, path: str) -> str:
    """Return the sha256 of a package's file, or of a folder's Python files; "" if absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return ""
    source = Path(spec.submodule_search_locations[0], path)
    files = []
    if source.is_dir():
        files = sorted(source.glob("*.py"))
    elif source.is_file():
        files = [source]
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def replace_text(file: Path, text: str) -> None:
    """Replace a file in one step; if the process is killed, the previous file remains."""
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
        folder: The folder. It is created when a file is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: TuneRecord

    def load(self) -> TuneRecord | None:
        """Return the record of the folder, or None if there is none.

        Raises:
            ValueError: The file cannot be read, or is not a record.
        """
        file = self.folder / _FILE
        if not file.exists():
            return None
        try:
            return TuneRecord.model_validate_json(read_small_file(file))
        except (OSError, ValueError) as error:
            message = str(error).splitlines()[0]
            raise ValueError(f"{file} is not a record of tune ({message}): move it away") from error

    def write(self) -> None:
        """Write the record."""
        replace_text(self.folder / _FILE, self.record.model_dump_json(indent=1) + "\n")

    def write_files(self) -> None:
        """Write the files that the libraries read; see list_variables.

        A file of an earlier tuning is removed if it would replace no packaged configuration.
        """
        self._write_flash_attn()
        self._write_vllm()

    def _write_flash_attn(self) -> None:
        tiles = {}
        for tuned in self.record.list_changed("flash-attn"):
            tiles[tuned.key] = tuned.best.configuration
        # Decoding has a single query, which attends to all keys with and without a causal mask. So
        # decoding uses the same tiles in both cases.
        for key in list(tiles):
            if key.startswith("decode"):
                tiles[key.replace("causal", "full")] = tiles[key]
        content = {}
        if tiles:
            content = {
                "triton": self.record.binding.triton,
                "gpu": self.record.binding.gpu,
                "tiles": tiles,
            }
        self._replace("flash-attn.json", content)

    def _write_vllm(self) -> None:
        names = {tuned.file for tuned in self.record.list_changed("vllm")}
        for file in (self.folder / "vllm").glob("*.json"):
            if file.name not in names:
                file.unlink()
        for name in names:
            content = {"triton_version": self.record.binding.triton}
            self._replace(f"vllm/{name}", content | self.record.list_rows(name))

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of the folder, or remove it if there is no content."""
        file = self.folder / name
        if content:
            replace_text(file, json.dumps(content, indent=1) + "\n")
        else:
            file.unlink(missing_ok=True)

    def list_variables(self) -> dict[str, str]:
        """Return the environment variables by which the libraries find the tuned configurations."""
        folder = self.folder.resolve()
        paths = {
            "flash-attn": folder / "flash-attn.json",
            "vllm": folder / "vllm",
        }
        variables = {}
        for library, path in paths.items():
            if self.record.list_changed(library) and path.exists():
                variables[VARIABLES[library]] = str(path)
        for tuned in self.record.list_changed("aiter"):
            variables[VARIABLES["aiter"]] = json.dumps(tuned.best.configuration)
        return variables


#: The counts of a trial's cost that the table of the report shows.
_COUNTS = ("vgprs", "vgpr_spills", "scratch", "lds", "waves", "wmma")
_HEADER = [
    "| kernel | configuration | VGPRs | spilled | scratch | LDS | waves | WMMA | ms | |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def describe(tuned: dict[str, Tuned]) -> list[str]:
    """Return a table in Markdown: each problem, and its configurations with counts and times."""
    lines = [*_HEADER]
    for name, problem in tuned.items():
        for trial in problem.trials:
            cells = [
                name,
                describe_configuration(trial.configuration),
                *(str(trial.cost.get(count, "")) for count in _COUNTS),
                _describe_time(trial),
                _describe_outcome(problem, trial),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _describe_time(trial: Trial) -> str:
    if not trial.milliseconds:
        return ""
    return f"{statistics.median(trial.milliseconds):.4g}"


def _describe_outcome(problem: Tuned, trial: Trial) -> str:
    if problem.is_done and trial is problem.best:
        return "fastest" if trial.configuration else "packaged, kept"
    return trial.fault or trial.reason


def describe_configuration(configuration: dict[str, Any]) -> str:
    """Return a configuration in a few words."""
    abbreviations = {
        "BLOCK_SIZE_": "",
        "BLOCK_": "",
        "num_": "",
        "waves_per_eu": "waves/EU",
    }
    parts = []
    for name, value in configuration.items():
        for text, abbreviation in abbreviations.items():
            name = name.replace(text, abbreviation)
        parts.append(f"{name}={value}")
    return " ".join(parts) or "packaged"


_METHOD = (
    "each round times every configuration once, in another order; times are medians of rounds; "
    "results are within the validator's bounds of float64; counts are those of code compiled for "
    "gfx1151."
)
_RECEIVERS = (
    "Send to: https://github.com/vllm-project/vllm/issues (tables of experts), "
    "https://github.com/ROCm/aiter/issues (aiter's forward tile), and this channel (tiles of "
    "flash-attn's built-in kernels, which upstream has removed)."
)


def describe_for_upstream(record: TuneRecord) -> str:
    """Return a report to send upstream: the machine, the method, and the measured times."""
    models = ", ".join(record.models)
    tables = []
    for name in dict.fromkeys(tuned.file for tuned in record.list_changed("vllm")):
        table = json.dumps(record.list_rows(name), indent=1)
        tables.append(f"{name}\n```json\n{table}\n```")
    lines = [
        f"Tuned for {models} with `strix-validate tune`: {_METHOD}",
        "",
        *_describe_machine(record),
        "",
        *describe(record.tuned),
        "",
        *tables,
        "",
        _RECEIVERS,
    ]
    return "\n".join(lines)


def _describe_machine(record: TuneRecord) -> list[str]:
    lines = [
        f"- GPU: {record.binding.gpu}",
        f"- Triton: {record.binding.triton}",
    ]
    for name, version_text in record.versions.items():
        if version_text:
            lines.append(f"- {name}: {version_text}")
    clocks: list[float] = []
    for tuned in record.tuned.values():
        clocks += [clock for clock in tuned.clocks if clock]
    if clocks:
        lines.append(f"- clock in the rounds: {min(clocks):.0f} to {max(clocks):.0f} MHz")
    return lines
