# SPDX-License-Identifier: BSD-3-Clause
"""The commands publish, verify and compare.

`verify` compares packages with their recipes; `compare` compares the kernels of two channels.
"""

import subprocess
import sys
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from rattler import Version
from typer import Argument, Option

from forge.channel import PublishedChannel, read_validated, require_untested_name
from forge.cli.context import Context, ForgeCommand, make_exit, out
from forge.conda.location import Location
from forge.conda.package import Package, Places, require_confined
from forge.errors import Failed, ForgeError, NotAttempted
from forge.project import Project
from forge.recipes.verify import project_at
from forge.recipes.verify import verify as verify_package

app = typer.Typer()

To = Annotated[
    str,
    Option(metavar="DIR", help="Folder of the published channel."),
]
Withdraw = Annotated[
    list[str] | None,
    Option(metavar="NAME-VERSION-BUILD", help="Take this build out; repeatable."),
]
Reason = Annotated[
    str,
    Option(metavar="TEXT", help="Reason of --withdraw, for the channel's page."),
]
Untested = Annotated[
    bool,
    Option("--untested", help="No GPU ran the packages; DIR's name must have the word untested."),
]
Validated = Annotated[
    Path | None,
    Option(metavar="FILE", help="Publish only if FILE lists each package's sha256."),
]
Files = Annotated[
    list[Path],
    Argument(exists=True, dir_okay=False),
]
Channels = Annotated[
    Path,
    Argument(exists=True, file_okay=False, help="Folder of a channel."),
]
Commit = Annotated[
    str,
    Option(metavar="REV", help="Compare with the recipes of this commit."),
]


@app.command(cls=ForgeCommand)
def publish(
    context: typer.Context,
    to: To,
    withdraw: Withdraw = None,
    reason: Reason = "",
    untested: Untested = False,
    validated: Validated = None,
) -> None:
    """Publish the packages of the channel (all or none), or withdraw published builds."""
    ctx: Context = context.obj
    folder = Location(to).folder
    if not folder:
        raise ForgeError(f"--to {to} is not a directory: publish to one (docs/publishing.md)")
    modes = [untested, validated is not None, bool(withdraw)]
    if modes.count(True) > 1:
        raise ForgeError("give only one of --untested, --validated and --withdraw")
    if untested:
        require_untested_name(folder)
    digests = read_validated(validated) if validated else None
    reason = " ".join(reason.split())
    if bool(withdraw) != bool(reason):
        raise ForgeError("--withdraw and --reason go together: the page states the reason")
    # With a character that cannot be printed, the channel's page could not be written.
    if not reason.isprintable():
        raise ForgeError(f"--reason has a character that cannot be printed: {reason!a:.200}")
    _remember(ctx.project, folder)
    if withdraw:
        for name in PublishedChannel(folder).withdraw(withdraw, reason):
            out.print(f"{folder}: withdrew {name}")
    else:
        _publish_all(ctx, folder, digests, untested)
    _write_page(ctx.project, folder)


def _publish_all(
    ctx: Context,
    folder: Path,
    digests: set[str] | None,
    untested: bool,
) -> None:
    """Publish the packages of the channel and print what was added.

    Args:
        ctx: The context.
        folder: The published channel.
        digests: Refuse files whose sha256 is not one of these; None accepts all files.
        untested: Whether no GPU has run the packages.
    """
    with ctx.project.lock():
        if not ctx.channel.is_indexed() or ctx.channel.find_unlisted():
            # Packages that were copied from another machine are in no index.
            ctx.channel.index()
        added = PublishedChannel(folder).publish(ctx.channel, digests)
    for name in added:
        out.print(f"{folder}: added {name}")
    note = ", untested: no GPU ran them" if untested else ""
    out.print(f"{folder}: {len(added)} packages added{note}")


def _remember(project: Project, folder: Path) -> None:
    """Record a published folder, so that `clean` finds leftovers of killed commands in it."""
    links = project.build / "published"
    link = links / sha256(bytes(folder)).hexdigest()
    with suppress(OSError):
        # An earlier run may have made the link.
        links.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)


def _write_page(project: Project, folder: Path) -> None:
    """Write the page of a published channel if the checkout has the program that writes it.

    Raise Failed if the page cannot be written.
    """
    program = project.root / "tools/channel_page.py"
    if not program.exists():
        return
    result = subprocess.run([sys.executable, program, folder], check=False)
    if result.returncode:
        reason = f"{folder} is published, but its page could not be written"
        raise Failed(f"{reason}: fix that, and publish again")


@app.command(cls=ForgeCommand)
def verify(context: typer.Context, files: Files, commit: Commit = "") -> None:
    """Compare package files with their recipes, with their own lists of files and with each other.

    Exit 1 for any difference. A package without a recipe is compared only with its list of files
    and with the other packages, and the exit code is 3. No network is needed.
    """
    ctx: Context = context.obj
    places: list[Places] = []
    codes = []
    checkout = nullcontext(ctx.project)
    with project_at(ctx.project, commit) if commit else checkout as project:
        for file in files:
            codes.append(_verify_one(file, project, places))
    require_confined(places)
    raise make_exit(codes)


def _verify_one(file: Path, project: Project, places: list[Places]) -> int:
    """Compare a package and print the differences.

    Args:
        file: The package.
        project: The checkout with the recipes.
        places: The places of the package's files are appended to this list. `verify` needs the list
            to compare packages with each other.

    Returns:
        The exit code.
    """
    verdict = verify_package(file, project)
    places += verdict.places
    for line in verdict.differences:
        out.print(f"{file.name}: {line}")
    result = "as its recipe"
    code = 0
    if verdict.differences:
        result = "differs"
        code = Failed.exit_code
    elif verdict.not_compared:
        result = verdict.not_compared
        code = NotAttempted.exit_code
    out.print(f"{file.name}: {result}; compared: {', '.join(verdict.compared)}")
    return code


@app.command(cls=ForgeCommand)
def compare(context: typer.Context, old: Channels, new: Channels) -> None:
    """Print which kernels of the new channel cost more than those of the old one.

    For each package of kernels that both channels have, this compares registers, scratch, LDS,
    waves and matrix instructions. It shows the effect of a new compiler or patch. Exit 1 if a
    kernel costs more or is missing.
    """
    ctx: Context = context.obj
    program = ctx.project.root / "recipes/checks/kernel_costs.py"
    before = _find_kernel_packages(old)
    after = _find_kernel_packages(new)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ForgeError(f"{old} and {new} have no package of kernels in common")
    costs_more = False
    for name in common:
        out.print(f"{name}: {before[name].path.name} compared with {after[name].path.name}")
        command = [
            sys.executable,
            str(program),
            "compare",
            str(_unpack_kernel_list(before[name])),
            str(_unpack_kernel_list(after[name])),
        ]
        result = subprocess.run(command, check=False)
        if result.returncode not in (0, 1):
            raise Failed(f"{name} of {old} and of {new} cannot be compared")
        if result.returncode == 1:
            costs_more = True
    raise typer.Exit(int(costs_more))


def _find_kernel_packages(channel: Path) -> dict[str, Package]:
    """Return the packages of kernels in a channel's folder, by name: the newest build of each.

    As for solvers, this is the build with the highest version and build number. The times of files
    do not count, because copies and downloads change them.
    """
    packages: dict[str, Package] = {}
    for file in channel.glob("*/*-kernels-*.conda"):
        package = Package(file)
        name = str(package.index["name"])
        if name not in packages or _build_order(packages[name]) < _build_order(package):
            packages[name] = package
    return packages


def _build_order(package: Package) -> tuple[Version, int]:
    return Version(str(package.index["version"])), int(package.index["build_number"])


def _unpack_kernel_list(package: Package) -> Path:
    """Unpack a package, and return the path of its list of kernels. Raise Failed without one."""
    name = f"share/triton-kernels/{package.index['name']}/kernels.json"
    if package.payload.get(name, "") is not None:
        # payload has None for a plain file.
        raise Failed(f"{package.path} has no {name}")
    return package.folder / name
