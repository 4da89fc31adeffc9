# SPDX-License-Identifier: BSD-3-Clause
"""The commands of strix-validate. EXIT_STATUS describes their exit codes."""

import contextlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from strix_validate import GPUS, TARGET, tiers
from strix_validate.checks import CannotRun, Check, Size
from strix_validate.doctor import findings
from strix_validate.doctor.kernel_lists import describe, read_lists
from strix_validate.models import command as models_command
from strix_validate.reporting import record
from strix_validate.runner import NoSuchCheck, select
from strix_validate.soak import command as soak_command
from strix_validate.soak.verdicts import CHECKS as SOAK_CHECKS
from strix_validate.terminal import (
    DeviceName,
    DeviceOption,
    EvidenceOption,
    JsonOption,
    ModelGibOption,
    ModelOption,
    OnlyOption,
    PlainUrlOption,
    PlotsOption,
    QuestionsOption,
    QuickOption,
    RootOption,
    SeedOption,
    SizeOption,
    SkipOption,
    TierOption,
    UrlOption,
    VllmOption,
    run_and_exit,
)
from strix_validate.tuning import command as tune_command

EXIT_STATUS = (
    "Exit status: 0 every check that ran passed, 1 a check failed, 2 usage error, 3 nothing could "
    "be checked, 130 interrupted."
)
app = typer.Typer(
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help would show the type <bool> for a flag
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"strix-validate {version('strix-validate')}")
        raise typer.Exit


@app.callback()
def main_options(
    version_: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Check the attention of the installed PyTorch, flash-attn and vLLM, and the machine."""
    if TARGET not in GPUS:
        raise typer.BadParameter(
            f"the environment variable gpu_arch is {TARGET!a:.40}: set it to one of "
            f"{', '.join(GPUS)}"
        )


@app.command()
def backend(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
) -> None:
    """Report which attention backends this torch has, and execute each one alone."""
    run_and_exit(
        ["backend"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=device,
    )


@app.command()
def libraries(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
    seed: SeedOption = 0,
) -> None:
    """Check torch's operations on the GPU by comparison with results in float64.

    The checks cover matrix products, factorisations, gradients, convolutions, host memory,
    torch.compile and bitsandbytes. A run on a CPU tests only the checks themselves.
    """
    run_and_exit(
        ["libraries"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=device,
        seed=seed,
    )


@app.command()
def attention(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.QUICK,
    vllm: VllmOption = None,
    seed: SeedOption = 0,
) -> None:
    """Compare torch's SDPA backends, flash-attn and vLLM's kernels with results in float64.

    The kernels of fla, liger, sageattention, conch and the GGUF plugin are compared too. Without a
    GPU, all Triton kernels run in Triton's interpreter.
    """
    run_and_exit(
        ["attention"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=device,
        size=size,
        vllm=vllm,
        seed=seed,
    )


@app.command()
def kernels(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    vllm: VllmOption = None,
) -> None:
    """Compile the kernels of flash-attn, vLLM and other packages for gfx1151, and inspect them.

    Needs no GPU.
    """
    run_and_exit(
        ["kernels"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=DeviceName.CPU,
        vllm=vllm,
    )


@app.command()
def emulated(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    vllm: VllmOption = None,
) -> None:
    """Emulate gfx1151 kernels of flash-attn, vLLM and others; compare their results with float64.

    Needs libLLVM 22 or newer; without it, exits with status 3.
    """
    run_and_exit(
        ["emulated"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=DeviceName.CPU,
        vllm=vllm,
    )


@app.command()
def bench(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    plots: PlotsOption = None,
    vllm: VllmOption = None,
) -> None:
    """Time attention and layers of experts, and a GPU's copies and matrix products.

    The attention of torch's backends, of flash-attn and of vLLM is timed.
    """
    run_and_exit(
        ["bench"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=device,
        size=size,
        plots=plots,
        vllm=vllm,
    )


@app.command()
def serve(  # noqa: PLR0913 (each argument is an option of the command)
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    evidence: EvidenceOption = None,
    plots: PlotsOption = None,
    url: UrlOption = "",
    model: ModelOption = "",
    plain_url: PlainUrlOption = "",
    questions: QuestionsOption = 0,
) -> None:
    """Create small random models, generate text with them in vLLM, and serve requests.

    With --url, check a running server instead. With --model but no --url, start a server for the
    folder that --model names, and check it instead. The checks of a running or started server
    compare its answers with each other, test chat templates, tools and sampling parameters, test
    answers up to the end of the context, and measure the speed. Before these checks, the command
    prints how many tokens they need.
    """
    run_and_exit(
        ["serve"],
        as_json=as_json,
        only=only,
        skip=skip,
        device=DeviceName.AUTO,
        evidence=evidence,
        plots=plots,
        url=url,
        model=model,
        plain_url=plain_url,
        questions=questions,
    )


@app.command()
def doctor(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    root: RootOption = Path("/"),
    model_gib: ModelGibOption = 0,
) -> None:
    """Find problems of this machine that affect its GPU, and print how to fix them.

    Needs no torch. The GPU is gfx1151, or the one that the environment variable gpu_arch names.
    """
    if not root.is_dir():
        raise typer.BadParameter(f"{root} is not a folder")
    run_and_exit(
        ["doctor"],
        as_json=as_json,
        only=only,
        skip=skip,
        root=root,
        weights=int(model_gib * 2**30),
        dump=findings.dump,
    )


@app.command()
def run(  # noqa: PLR0913 (each argument is an option of the command)
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    tier: TierOption = None,
    evidence: EvidenceOption = None,
    vllm: VllmOption = None,
    url: UrlOption = "",
    model: ModelOption = "",
    plain_url: PlainUrlOption = "",
    questions: QuestionsOption = 0,
    quick: QuickOption = False,
    seed: SeedOption = 0,
) -> None:
    """Run every tier, or those that --tier names. With --evidence, write the record.

    With --quick, the size is quick, and the `conv` checks are left out. If --tier is not given,
    --quick runs only the tiers that test this machine, and a table of its speeds is printed.
    """
    names = tier or []
    for name in names:
        if name not in tiers.TIERS:
            raise typer.BadParameter(f"unknown tier {name}; tiers: {', '.join(tiers.TIERS)}")
    if quick:
        names = names or list(tiers.QUICK)
        size = Size.QUICK
        skip = list(skip or [])
        if "libraries" in names:
            skip += tiers.SLOW
    run_and_exit(
        names or list(tiers.TIERS),
        as_json=as_json,
        only=only,
        skip=skip,
        device=device,
        size=size,
        evidence=evidence,
        vllm=vllm,
        url=url,
        model=model,
        plain_url=plain_url,
        questions=questions,
        seed=seed,
    )


app.command()(models_command.models)
app.command()(soak_command.soak)
app.command()(tune_command.tune)


@contextlib.contextmanager
def _exit_if_missing(purpose: str) -> Iterator[Console]:
    """End a command with status 3 if it cannot run here, for example because a library is missing.

    If a call of a kernel or the child process that makes the calls fails, the status is 1.

    Args:
        purpose: A verb for what the command does, such as "compile"; it is part of the message.

    Yields:
        A console on standard error.
    """
    console = Console(stderr=True, highlight=False)
    try:
        yield console
    except (CannotRun, ModuleNotFoundError) as reason:
        console.print(f"{escape(str(reason))}: nothing to {purpose}")
        raise typer.Exit(3) from reason
    except RuntimeError as error:
        console.print(escape(str(error)))
        raise typer.Exit(1) from error


@app.command()
def warm(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.json",
            help="Compile the kernels that this model needs, not the kernels of common models.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes; default: the number of cores."),
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Compile the kernels of flash-attn and vLLM that no installed package contains.

    After that, the first request does not have to compile them. The kernels are compiled for
    gfx1151 into this user's Triton cache; no GPU is needed. With --model, the command first prints
    how many of vLLM's kernels for this model are in no package, and about how long their
    compilation takes.
    """
    with _exit_if_missing("compile") as console:
        from strix_validate.precompiled.warm import calls, estimate_compilation, fill

        try:
            kernel_calls = calls(model, vllm_source)
            if model and "vLLM" in kernel_calls:
                console.print(estimate_compilation(model, vllm_source, jobs))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        failures = fill(kernel_calls, jobs, console)
    raise typer.Exit(int(failures))


@app.command()
def compilations(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    most: Annotated[
        int | None,
        typer.Option(min=0, help="Fail if more than this number of kernels are compiled."),
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Count the kernels that a common workload compiles if the Triton cache is empty.

    The workload makes each of its calls with up to 40 numbers of tokens. Needs no GPU.
    """
    with _exit_if_missing("count") as console:
        from strix_validate.precompiled.workload import count

        try:
            counts = count(Path(sys.base_prefix), only or [], vllm_source, console.print)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    total = sum(origins["compiled"] for origins in counts.values())
    if as_json:
        typer.echo(json.dumps(counts, indent=1))
    else:
        for group, origins in counts.items():
            typer.echo(f"{origins['compiled']:5} compiled {origins['packages']:5} shipped  {group}")
        typer.echo(f"{total:5} compiled")
    is_exceeded = most is not None and total > most
    raise typer.Exit(int(is_exceeded))


def _list_kernels(as_json: bool) -> None:
    """List the kernels that packages installed into this environment, and end the command.

    If there are none, the status is 3.
    """
    lists = read_lists(Path(sys.base_prefix))
    if as_json:
        typer.echo(json.dumps(lists, indent=1))
    else:
        for package, package_kernels in lists.items():
            typer.echo(f"{package}: {len(package_kernels)} kernels")
            lines = sorted(f"    {describe(kernel)}" for kernel in package_kernels.values())
            typer.echo("\n".join(lines))
    if not lists:
        raise typer.Exit(3)
    raise typer.Exit


@app.command(name="list")
def list_checks(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="List the kernels that packages installed, not the checks."),
    ] = False,
) -> None:
    """List the checks, each with the bug that it would catch."""
    if kernels:
        if only:
            raise typer.BadParameter("--only names checks, and --kernels lists none")
        _list_kernels(as_json)
    by_tier: dict[str, list[Check]] = {}
    unlisted = []
    for name in tiers.TIERS:
        try:
            by_tier[name] = list(tiers.load(name).checks())
        except ModuleNotFoundError as error:
            unlisted.append(f"tier {name} is not listed: {error.name} is not installed")
    by_tier["soak"] = SOAK_CHECKS
    for line in unlisted:
        typer.echo(line, err=True)
    try:
        selected = select(by_tier, only or [])
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    checks: list[Check] = []
    for tier_checks in selected.values():
        checks += tier_checks
    if as_json:
        typer.echo(json.dumps([vars(check) for check in checks], indent=1))
    else:
        for check in checks:
            typer.echo(f"{check.id}\n    {_describe_check(check)}")


def _describe_check(check: Check) -> str:
    """Return a check's title and what it catches."""
    if check.purpose.startswith(check.title):
        # The title is the first sentence of check.purpose.
        return check.purpose
    return f"{check.title}\n    catches: {check.purpose}"


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records that --evidence wrote, or --json (except the doctor's)."),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Write the page to this file."),
    ] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page from records."""
    from strix_validate.reporting.page import render

    try:
        loaded = [record.load(file) for file in records]
        page = render(loaded, [file.stem for file in records])
    except record.BadRecord as error:
        raise typer.BadParameter(str(error)) from error
    except Exception as error:
        # The record's schema does not describe measured values, so any of them may break the
        # page.
        files = ", ".join(map(str, records))
        message = f"{files}: a measured value has a form that no check writes ({error!r:.200})"
        raise typer.BadParameter(message) from error
    try:
        output.write_text(page, errors="backslashreplace")
    except OSError as error:
        raise typer.BadParameter(f"{output}: {error.strerror}") from error
    typer.echo(f"wrote {output}", err=True)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
