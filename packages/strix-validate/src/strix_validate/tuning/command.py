# SPDX-License-Identifier: BSD-3-Clause
"""`strix-validate tune`: compiles and measures what is tried for a model, and keeps the record."""

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
from strix_validate.terminal import VllmOption
from strix_validate.tuning import record
from strix_validate.tuning.record import Tuned, TuneRecord
from strix_validate.tuning.session import Refused, Say, Sensors, Session

#: Where the record of this user is.
_FOLDER = Path(typer.get_app_dir("strix-validate"), "tuned")


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        only: Names or patterns of problems, none for all.
        minutes: After which no problem is begun.
        most: Configurations of a problem that are measured.
        jobs: Processes that compile, None for the cores.
        source: vLLM's folder, None for the installed one.
    """

    only: Sequence[str] = ()
    minutes: float = 20
    most: int = 6
    jobs: int | None = None
    source: Path | None = None


def find_problems(name: str, only: Sequence[str], source: Path | None) -> tuple[Any, list[Any]]:
    """Return the layers of a model, and what is tuned for it here.

    Args:
        name: Of the table, or a folder with config.json.
        only: Names of problems, or patterns; none is all.
        source: vLLM's folder, None for the installed one.

    Raises:
        ValueError: The model cannot be read. CannotRun: Nothing of it can be tuned here.
    """
    from strix_validate.layers.config import layers_of
    from strix_validate.layers.table import layers_in_table
    from strix_validate.models import reading
    from strix_validate.precompiled.flash_calls import has_aiter
    from strix_validate.precompiled.packages import has
    from strix_validate.precompiled.vllm_calls import vllm_source
    from strix_validate.tuning.candidates import problems_of

    model = layers_in_table(name) or layers_of(reading.read(reading.find(name)))
    backend, reasons = "", []
    if has("flash_attn"):
        backend = "aiter" if has_aiter() else "built-in"
    else:
        reasons.append("flash_attn is not installed")
    try:
        folder = vllm_source.find(source)
    except CannotRun as error:
        folder = None
        reasons.append(str(error))
    found = [x for x in problems_of(model, backend, folder) if not only or is_named(x.name, only)]
    if not found:
        raise CannotRun("; ".join([f"no kernel of {name} is tuned", *reasons]))
    return model, found


def fill(
    problems: Sequence[Any],
    model: Any,
    options: Options,
    variables: dict[str, str],
    say: Say,
    architecture: str,
) -> bool:
    """Compile what the new configurations need; return whether a first call still compiles.

    The calls are made on the GPU, with the variables by which libraries find their files.
    """
    from triton import knobs

    from strix_validate.precompiled import packages
    from strix_validate.precompiled.flash_calls import flash_calls
    from strix_validate.precompiled.vllm_calls import experts_calls
    from strix_validate.triton import modes
    from strix_validate.tuning.candidates import ConfiguredCall

    sizes = {layer.head_dim for layer in model.attention}
    flash = list(flash_calls(sizes, [model.dtype], trained=sizes, capacities=(1024, 4096)))
    experts = [x for x in problems if x.library == "vllm"]
    made: dict[str, list] = {
        "vLLM": [ConfiguredCall(x, build, {}) for x in experts for build in x.checked]
    }
    compiled: dict[str, Any] = {
        "vLLM": list(experts_calls(experts[0].source, model.experts, [model.dtype]))
        if experts
        else []
    }
    if len(experts) < len(problems):
        made["flash-attn"] = compiled["flash-attn"] = flash
    cache, is_bad = Path(knobs.cache.dir), False
    for library, calls in made.items():
        if not calls:
            continue
        if architecture == TARGET:  # several processes compile, without the GPU
            first = packages.look_up(compiled[library], cache, options.jobs, variables=variables)
        else:
            first = modes.run(calls, "native", cache, variables).calls
        second = modes.run(calls, "native", cache, variables).calls
        errors = [": ".join(answer.error) for answer in (*first, *second) if answer.error]
        for error in dict.fromkeys(errors):
            say(f"{library}: {error:.300}")
        number, later = (packages.origins(x, Path())["compiled"] for x in (first, second))
        say(f"{library}: {number} kernels compiled, {later} at the first call after it")
        is_bad |= bool(errors or later)
    return is_bad


def _list(name: str, options: Options, say: Say) -> None:
    """Print what would be measured, with the counts; needs no GPU."""
    from strix_validate.tuning.candidates import short_list

    with tempfile.TemporaryDirectory() as cache:
        for problem in find_problems(name, options.only, options.source)[1]:
            say(f"{problem.name}: compiling {len(problem.configurations)} configurations")
            trials = short_list(problem, Path(cache), options.jobs, options.most)
            tuned = Tuned(library=problem.library, key=problem.key, trials=trials)
            typer.echo("\n".join(record.describe({problem.name: tuned})))


def _load(store: record.Store, say: Say) -> TuneRecord | None:
    """Return the record of the folder if it holds here and now; say why it is ignored."""
    found = store.load()
    if found is None:
        return None
    here = record.bind(host.describe_device(host.device_for("auto")))
    differences = found.binding.differences(here)
    if differences:
        say(f"{store.folder}: the record is stale and ignored: {'; '.join(differences)}")
        return None
    return found


def _run(store: record.Store, name: str, options: Options, say: Say) -> bool:
    """Tune what fits into the time, write the files; return whether something failed."""
    from triton import knobs

    begin = time.monotonic()
    model, problems = find_problems(name, options.only, options.source)
    device = host.describe_device(host.device_for("auto"))
    if device.type != "gpu":
        raise CannotRun("no GPU to measure on (--dry-run needs none)")
    fresh = TuneRecord(models=[], binding=record.bind(device), versions=host.versions())
    store.record = _load(store, say) or fresh
    if name not in store.record.models:
        store.record.models.append(name)
    store.write()  # now, not after minutes: the folder may not be writable
    failed = False
    with tempfile.TemporaryDirectory() as logs:
        sensors = Sensors(Path(logs, "sensors"))
        try:
            session = Session(store, "cuda", Path(knobs.cache.dir), options.jobs, say, sensors)
            for problem in problems:
                if session.is_done(problem):
                    continue
                if time.monotonic() - begin > options.minutes * 60:
                    say(f"{options.minutes:g} minutes are over: run this again for the rest")
                    break
                try:
                    best = session.tune(problem, options.most).best
                    store.write_files()
                    words = record.describe_configuration(best.configuration)
                    say(f"{problem.name}: {words}")
                except RuntimeError as error:
                    say(str(error))
                    failed = True
        finally:
            sensors.close()
    store.write_files()
    typer.echo("\n".join(record.describe(store.record.tuned)))
    variables = store.variables()
    if variables:
        failed |= fill(problems, model, options, variables, say, device.architecture)
        say(f'to use it: eval "$(strix-validate tune --env --output {store.folder})"')
    return failed


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
        Path, typer.Option(metavar="DIR", help="Folder of the record and of what libraries read.")
    ] = _FOLDER,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no kernel after this time.")] = 20,
    most: Annotated[int, typer.Option(min=1, help="Configurations measured of a kernel.")] = 6,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Tune only these, as --dry-run names them; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be measured, with its counts.")
    ] = False,
    env: Annotated[
        bool, typer.Option("--env", help="Print the variables of an earlier tuning, for a shell.")
    ] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Print what to send upstream of an earlier tuning.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores.")] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Find the fastest tiles of a model's kernels on this GPU, in 20 minutes.

    What spills more than the packaged tile, or lost its matrix instructions, is not measured. Each
    result is compared with float64. An interrupted run goes on where it was. --dry-run compiles for
    gfx1151, and needs no GPU.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False)

    if not (model or env or share):
        raise typer.BadParameter("MODEL is missing")
    store = record.Store(output)
    options = Options(only or (), minutes, most, jobs, vllm_source)
    with _explained(output, say):
        if env or share:
            _print_earlier(store, env, say)
        elif dry_run:
            _list(str(model), options, say)
        elif _run(store, str(model), options, say):
            raise typer.Exit(1)


@contextmanager
def _explained(output: Path, say: Say) -> Iterator[None]:
    """Turn what ends a run early into one line and an exit status."""
    try:
        yield
    except typer.Exit:  # a RuntimeError too
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (Refused, CannotRun, ModuleNotFoundError) as error:
        say(f"{error}: nothing more was measured")
        raise typer.Exit(3) from error
    except OSError as error:
        say(f"{error.filename or output}: {error.strerror or error}: nothing more is recorded")
        raise typer.Exit(1) from error
    except RuntimeError as error:
        say(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        say("interrupted: run this again to go on")
        raise typer.Exit(130) from error


def _print_earlier(store: record.Store, env: bool, say: Say) -> None:
    """Print the variables, or the report, of the folder's record, if it is not stale."""
    found = _load(store, say)
    if found is None:
        say(f"{store.folder} has no record that holds here")
        raise typer.Exit(1)
    store.record = found
    if env:
        for name, value in store.variables().items():
            typer.echo(f"export {name}={shlex.quote(value)}")
    else:
        typer.echo(record.share(found))
