# SPDX-License-Identifier: BSD-3-Clause
"""The commands that bring packages to users, and compare packages with their recipes."""

import subprocess
import sys
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge.channel import StaticChannel, read_validated, require_untested_name
from forge.cli.context import Context, command, gravest, out
from forge.conda.location import Location
from forge.conda.package import Package, Places, require_confined
from forge.errors import Failed, ForgeError, NotAttempted
from forge.project import Project
from forge.recipes.verify import project_at
from forge.recipes.verify import verify as verify_package

app = typer.Typer()

To = Annotated[str, Option(metavar="DIR", help="Folder of the published channel.")]
Withdraw = Annotated[
    list[str] | None,
    Option(metavar="NAME-VERSION-BUILD", help="Take this build out instead; repeatable."),
]
Reason = Annotated[str, Option(metavar="TEXT", help="Why it is withdrawn, for the page.")]
Untested = Annotated[
    bool, Option("--untested", help="No GPU ran them: the name of DIR has to say untested.")
]
Validated = Annotated[
    Path | None, Option(metavar="FILE", help="Publish only files whose sha256 FILE has.")
]
Files = Annotated[list[Path], Argument(exists=True, dir_okay=False)]
Channels = Annotated[Path, Argument(exists=True, file_okay=False, help="Folder of a channel.")]
Commit = Annotated[str, Option(metavar="REV", help="Compare with the recipes of this commit.")]


@command(app)
def publish(
    ctx: Context,
    to: To,
    withdraw: Withdraw = None,
    reason: Reason = "",
    untested: Untested = False,
    validated: Validated = None,
) -> None:
    """Publish all packages of the channel, or none; or withdraw builds that are published."""
    folder = Location(to).folder
    if not folder:
        raise ForgeError(f"--to {to} is not a directory: publish to one (docs/publishing.md)")
    if untested + (validated is not None) + bool(withdraw) > 1:
        raise ForgeError("--untested, --validated and --withdraw exclude each other: give one")
    if untested:
        require_untested_name(folder)
    digests = read_validated(validated) if validated else None
    reason = " ".join(reason.split())
    if bool(withdraw) != bool(reason):
        raise ForgeError("--withdraw and --reason go together: users read why on the page")
    if not reason.isprintable():  # the page of the channel could not be written any more
        raise ForgeError(f"--reason has a character that cannot be printed: {reason!a:.200}")
    _remember(ctx.project, folder)
    if withdraw:
        for name in StaticChannel(folder).withdraw(withdraw, reason):
            out.print(f"{folder}: withdrew {name}")
    else:
        with ctx.project.lock():
            if not ctx.channel.is_indexed():  # packages that came from other machines
                ctx.channel.index()
            added = StaticChannel(folder).publish(ctx.channel, digests)
        for name in added:
            out.print(f"{folder}: added {name}")
        state = ", untested: no GPU ran them" if untested else ""
        out.print(f"{folder}: {len(added)} packages added{state}")
    _write_page(ctx.project, folder)


def _remember(project: Project, folder: Path) -> None:
    """Note a published folder, where `clean` then looks for what killed commands left."""
    known = project.build / "published"
    with suppress(OSError):  # it is there already
        known.mkdir(parents=True, exist_ok=True)
        (known / sha256(bytes(folder)).hexdigest()).symlink_to(folder)


def _write_page(project: Project, folder: Path) -> None:
    """Write the page of a published channel. Raises Failed if that does not succeed."""
    page = project.root / "tools/channel_page.py"
    if page.exists() and subprocess.run([sys.executable, page, folder], check=False).returncode:
        raise Failed(f"{folder} is published, but its page is not: fix that, and publish again")


@command(app)
def verify(ctx: Context, files: Files, commit: Commit = "") -> None:
    """Compare package files with their recipes in this checkout, themselves and each other.

    Exit 1 for any difference, 3 for a package of no recipe: then only the files inside it are
    compared, with its own list. No network is needed.
    """
    places: list[Places] = []
    with project_at(ctx.project, commit) if commit else nullcontext(ctx.project) as project:
        codes = [_verify_one(file, project, places) for file in files]
    require_confined(places)
    raise gravest(codes)


def _verify_one(file: Path, project: Project, places: list[Places]) -> int:
    """Print what was compared and each difference; returns the exit code."""
    verdict = verify_package(file, project)
    places += verdict.places
    for line in verdict.differences:
        out.print(f"{file.name}: {line}")
    result = "differs" if verdict.differences else "as its recipe"
    if verdict.not_compared and not verdict.differences:
        result = verdict.not_compared
    out.print(f"{file.name}: {result}; compared: {', '.join(verdict.compared)}")
    if verdict.differences:
        return 1
    return NotAttempted.exit_code if verdict.not_compared else 0


@command(app)
def compare(ctx: Context, old: Channels, new: Channels) -> None:
    """Print which kernels of a channel cost more than those of another one.

    Registers, scratch, LDS, waves and matrix instructions of each package of kernels that both
    have: what a new compiler or patch did to them. Exit 1 if one costs more or is gone.
    """
    before, after = _kernel_packages(old), _kernel_packages(new)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ForgeError(f"{old} and {new} have no package of kernels in common")
    costs_more = False
    for name in common:
        lists = [_kernel_list(packages[name]) for packages in (before, after)]
        program = ctx.project.root / "recipes/checks/kernel_costs.py"
        out.print(f"{name}: {before[name].path.name} and {after[name].path.name}")
        done = subprocess.run([sys.executable, program, "compare", *lists], check=False)
        if done.returncode not in (0, 1):
            raise Failed(f"{name} of {old} and of {new} cannot be compared")
        costs_more |= done.returncode == 1
    raise typer.Exit(int(costs_more))


def _kernel_packages(channel: Path) -> dict[str, Package]:
    """Return the packages of kernels in a channel's folder by name, the newest file of each."""
    files = sorted(channel.glob("*/*-kernels-*.conda"), key=lambda file: file.stat().st_mtime)
    packages = [Package(file) for file in files]
    return {str(package.index["name"]): package for package in packages}


def _kernel_list(package: Package) -> Path:
    """Return the unpacked list of a package's kernels. Raises Failed if it has none."""
    name = package.index["name"]
    listed = f"share/triton-kernels/{name}/kernels.json"
    if package.payload.get(listed, "") is not None:
        raise Failed(f"{package.path} has no {listed}")
    return package.folder / listed
