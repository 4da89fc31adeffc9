# SPDX-License-Identifier: BSD-3-Clause
"""The command `strix-validate tune`: compile and measure configurations of a model's kernels."""

import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from strix_validate import TARGET
from strix_validate.checks import CannotRun, is_named
from strix_validate.doctor import host
from strix_validate.terminal import VllmOption, refuse_nan
from strix_validate.tuning import record
from strix_validate.tuning.record import Tuned, TuneRecord
from strix_validate.tuning.session import Print, Refused, Sensors, Session

#: The default folder of a user's record.
_FOLDER = Path(typer.get_app_dir("strix-validate"), "tuned")


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        only: Names or patterns of problems; if empty, all are tuned.
        minutes: Minutes after which no further problem is begun.
        most: Maximum number of configurations of a problem to measure besides the packaged one.
        jobs: Number of processes that compile; None for the number of cores.
        source: vLLM's source folder; None for the installed vLLM.
    """

    only: Sequence[str] = ()
    minutes: float = 20
    most: int = 6
    jobs: int | None = None
    source: Path | None = None


def find_problems(
    name: str,
    only: Sequence[str],
    source: Path | None,
    print_line: Print,
) -> tuple[Any, list[Any]]:
    """Return a model's layers, and the problems to tune: its kernels with their shapes.

    Args:
        name: The name of a model in the table, or a folder with config.json.
        only: Names or patterns of problems; if empty, all are returned.
        source: vLLM's source folder; None for the installed vLLM.
        print_line: Prints a line if the model's experts cannot be tuned.

    Raises:
        ValueError: The model cannot be read.
        CannotRun: None of the model's kernels can be tuned here, or `only` names none of them.
    """
    from strix_validate.layers.config import EXPERTS_LEFT_OUT, read_layers
    from strix_validate.layers.table import layers_in_table
    from strix_validate.models import reading
    from strix_validate.precompiled.flash_calls import has_aiter
    from strix_validate.precompiled.packages import has
    from strix_validate.precompiled.vllm_calls import vllm_source
    from strix_validate.tuning.candidates import list_problems

    model = layers_in_table(name) or read_layers(reading.read(reading.find(name)))
    if model.lacks_experts:
        print_line(f"{name}: {EXPERTS_LEFT_OUT}")
    backend = ""
    reasons = []
    if has("flash_attn"):
        backend = "aiter" if has_aiter() else "built-in"
    else:
        reasons.append("flash_attn is not installed")
    try:
        folder = vllm_source.find(source)
    except CannotRun as error:
        folder = None
        reasons.append(str(error))
    problems = list_problems(model, backend, folder)
    if not problems:
        raise CannotRun("; ".join([f"no kernel of {name} can be tuned here", *reasons]))
    if only:
        problems = [problem for problem in problems if is_named(problem.name, only)]
    if not problems:
        raise CannotRun(f"--only names no kernel of {name} that can be tuned here")
    return model, problems


def fill_cache(
    problems: Sequence[Any],
    model: Any,
    options: Options,
    variables: dict[str, str],
    print_line: Print,
    architecture: str,
) -> bool:
    """Compile the kernels of the new configurations into Triton's cache.

    Args:
        problems: The problems of find_problems, including those that were not tuned in time.
        model: The layers of the model.
        options: Options of the command.
        variables: Environment variables that name the libraries' files.
        print_line: Prints a line.
        architecture: The architecture of the GPU on which the calls are made afterwards.

    Returns:
        Whether a call failed, or still compiles a kernel after the cache was filled.
    """
    from triton import knobs

    from strix_validate.precompiled import packages
    from strix_validate.triton import modes

    cache = Path(knobs.cache.dir)
    has_failed = False
    for library, (executed, compiled) in _list_calls(problems, model).items():
        if architecture == TARGET:
            # For gfx1151, several processes compile at once, because this needs no GPU.
            first = packages.look_up(compiled, cache, options.jobs, variables=variables)
        else:
            first = modes.run(executed, "native", cache, variables).calls
        second = modes.run(executed, "native", cache, variables).calls
        errors = [": ".join(answer.error) for answer in (*first, *second) if answer.error]
        for error in dict.fromkeys(errors):
            print_line(f"{library}: {error:.300}")
        count = packages.count_origins(first, Path())["compiled"]
        later_count = packages.count_origins(second, Path())["compiled"]
        print_line(f"{library}: {count} kernels compiled, {later_count} more at the next calls")
        if errors or later_count:
            has_failed = True
    return has_failed


def _list_calls(problems: Sequence[Any], model: Any) -> dict[str, tuple[list, list]]:
    """Return for each library the calls to make on the GPU, and the calls to compile."""
    from strix_validate.precompiled.flash_calls import flash_calls
    from strix_validate.precompiled.vllm_calls import experts_calls
    from strix_validate.tuning.candidates import ConfiguredCall

    calls: dict[str, tuple[list, list]] = {}
    experts = [problem for problem in problems if problem.library == "vllm"]
    if experts:
        executed = []
        for problem in experts:
            executed += [ConfiguredCall(problem, build, {}) for build in problem.checked]
        compiled = list(experts_calls(experts[0].source, model.experts, [model.dtype]))
        calls["vLLM"] = (executed, compiled)
    if len(experts) < len(problems):
        head_dims = {layer.head_dim for layer in model.attention}
        flash = list(
            flash_calls(head_dims, [model.dtype], trained=head_dims, capacities=(1024, 4096))
        )
        calls["flash-attn"] = (flash, flash)
    return calls


def _print_short_lists(name: str, options: Options, print_line: Print) -> None:
    """Print all configurations, the counts of their code, and why some would not be measured."""
    from strix_validate.tuning.candidates import short_list

    _, problems = find_problems(name, options.only, options.source, print_line)
    with tempfile.TemporaryDirectory() as cache:
        for problem in problems:
            print_line(f"{problem.name}: compiling {len(problem.configurations)} configurations")
            trials = short_list(problem, Path(cache), options.jobs, options.most)
            tuned = Tuned(library=problem.library, key=problem.key, trials=trials)
            typer.echo("\n".join(record.describe({problem.name: tuned})))


def _load(store: record.Store, print_line: Print) -> TuneRecord | None:
    """Return the record of the folder, or None if there is none or it is stale."""
    stored = store.load()
    if stored is None:
        return None
    device = host.describe_device(host.resolve_device("auto"))
    differences = stored.binding.describe_differences(record.read_binding(device))
    if differences:
        message = "; ".join(differences)
        print_line(f"{store.folder}: the record is stale and ignored: {message}")
        return None
    return stored


def _run(store: record.Store, name: str, options: Options, print_line: Print) -> bool:
    """Tune as many problems as the time allows, write the files, and fill Triton's cache.

    Returns:
        Whether a problem or fill_cache failed.
    """
    from triton import knobs

    begin = time.monotonic()
    model, problems = find_problems(name, options.only, options.source, print_line)
    device = host.describe_device(host.resolve_device("auto"))
    if device.type != "gpu":
        raise CannotRun("there is no GPU to measure on (--dry-run needs none)")
    store.record = _load(store, print_line) or TuneRecord(
        models=[],
        binding=record.read_binding(device),
        versions=host.read_versions(),
    )
    if name not in store.record.models:
        store.record.models.append(name)
    # If the folder is not writable, this fails now and not after minutes.
    store.write()
    end = begin + options.minutes * 60
    cache = Path(knobs.cache.dir)
    has_failed = _tune_problems(store, problems, options, cache, end, print_line)
    store.write_files()
    typer.echo("\n".join(record.describe(store.record.tuned)))
    variables = store.list_variables()
    if variables:
        has_failed |= fill_cache(
            problems,
            model,
            options,
            variables,
            print_line,
            device.architecture,
        )
        folder = shlex.quote(str(store.folder.resolve()))
        print_line(f'to use the result: eval "$(strix-validate tune --env --output {folder})"')
    return has_failed


def _tune_problems(
    store: record.Store,
    problems: Sequence[Any],
    options: Options,
    cache: Path,
    end: float,
    print_line: Print,
) -> bool:
    """Tune problems until the monotonic clock reaches `end`; return whether a problem failed."""
    has_failed = False
    with tempfile.TemporaryDirectory() as logs:
        sensors = Sensors(Path(logs, "sensors"))
        try:
            session = Session(store, "cuda", cache, options.jobs, print_line, sensors)
            for problem in problems:
                if session.is_done(problem):
                    continue
                if time.monotonic() > end:
                    print_line(f"{options.minutes:g} minutes are over: run this again for the rest")
                    break
                try:
                    best = session.tune(problem, options.most).best
                    store.write_files()
                    configuration = record.describe_configuration(best.configuration)
                    print_line(f"{problem.name}: {configuration}")
                except RuntimeError as error:
                    print_line(str(error))
                    has_failed = True
        finally:
            sensors.close()
    return has_failed


def tune(  # noqa: PLR0913 (options of a command)
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model of the table, such as Qwen3-8B or 'Qwen3-30B-A3B, AWQ', or a folder "
            "with config.json.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the record and of the files for libraries."),
    ] = _FOLDER,
    minutes: Annotated[
        float,
        typer.Option(
            min=0,
            max=1440,
            callback=refuse_nan,
            help="Begin no further kernel after this many minutes.",
        ),
    ] = 20,
    most: Annotated[
        int,
        typer.Option(min=1, help="Maximum new configurations to measure for a kernel."),
    ] = 6,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Tune only this kernel; --dry-run prints the names. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the configurations with their counts; measure none."),
    ] = False,
    env: Annotated[
        bool,
        typer.Option("--env", help="Print an earlier tuning's variables for a shell."),
    ] = False,
    share: Annotated[
        bool,
        typer.Option("--share", help="Print a report of an earlier tuning to send upstream."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes; default: the number of cores."),
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Find the fastest tiles of a model's kernels on this GPU, in about 20 minutes.

    A tile is not measured if its compiled code is worse than the packaged tile's, for example
    because it spills more registers. Each result is compared with float64. If a run is interrupted,
    the next run continues it. --dry-run compiles for gfx1151, and needs no GPU.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def print_line(line: str) -> None:
        console.print(line, markup=False)

    if not (model or env or share):
        raise typer.BadParameter("MODEL is missing")
    store = record.Store(output)
    options = Options(only or (), minutes, most, jobs, vllm_source)
    # An earlier tuning's variables would change the packaged configurations of aiter and vLLM.
    for variable in record.VARIABLES.values():
        os.environ.pop(variable, None)
    with _report_errors(output, print_line):
        if env or share:
            _print_earlier(store, env, print_line)
        elif dry_run:
            _print_short_lists(str(model), options, print_line)
        elif _run(store, str(model), options, print_line):
            raise typer.Exit(1)


@contextmanager
def _report_errors(output: Path, print_line: Print) -> Iterator[None]:
    """Turn an exception that ends a run early into one line and an exit status."""
    try:
        yield
    except typer.Exit:  # without this clause, a clause below would catch it as a RuntimeError
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (Refused, CannotRun, ModuleNotFoundError) as error:
        print_line(f"{error}: nothing more was measured")
        raise typer.Exit(3) from error
    except OSError as error:
        file = error.filename or output
        print_line(f"{file}: {error.strerror or error}: nothing more is recorded")
        raise typer.Exit(1) from error
    except RuntimeError as error:
        print_line(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print_line("interrupted: run this again to continue")
        raise typer.Exit(130) from error


def _print_earlier(store: record.Store, env: bool, print_line: Print) -> None:
    """Print the variables of the folder's record, or its report, unless the record is stale."""
    stored = _load(store, print_line)
    if stored is None:
        print_line(f"{store.folder} has no record that is valid here")
        raise typer.Exit(1)
    store.record = stored
    if not env:
        typer.echo(record.describe_for_upstream(stored))
        return
    for name, value in store.list_variables().items():
        typer.echo(f"export {name}={shlex.quote(value)}")
