# SPDX-License-Identifier: BSD-3-Clause
"""The commands for stacks: lock, install and run.

`lock` copies the stack to build/stacks, and all commands work on the copy. The manifest of the copy
names the channels in use. If pixi is on PATH, the commands run pixi on the copy. Without pixi, or
with FORGE_NO_PIXI=1, the driver itself locks, installs and runs, as far as builds and CI need it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rattler import Version, VersionSpec
from typer import Argument, Option

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.cli.context import Context, ForgeCommand, err, make_exit, out
from forge.conda.location import Location
from forge.conda.scratch import cache_folder, scratch
from forge.envs.manifest import Manifest
from forge.envs.workspace import LockedInPart, Workspace, variables_for_commands
from forge.errors import ForgeError
from forge.files import copy_whole, hold, move_whole, write_text
from forge.project import is_set
from forge.recipes.recipe import parse_package_name
from forge.recipes.verify import find_recipe

app = typer.Typer()
# The GPU that the manifests of stacks name, and a pattern of every GPU's name.
GPU = "gfx1151"
ANY_GPU = re.compile("gfx[0-9a-f]+")
PIXI_CONFIGURATION = ".pixi/config.toml"

Name = Annotated[
    str,
    Argument(help="Name of a folder in stacks/."),
]
Names = Annotated[
    list[str] | None,
    Argument(metavar="[STACK]...", help="Names of folders in stacks/ (default: all)."),
]
Environment = Annotated[
    str,
    Option("--environment", "-e", metavar="NAME", help="Environment of the stack."),
]
Served = Annotated[
    str | None,
    Option(
        "--channel",
        metavar="URL",
        envvar="FORGE_CHANNEL",
        help="Channel of our packages (default: channel/).",
    ),
]
Words = Annotated[
    list[str],
    Argument(metavar="COMMAND...", help="Command with its arguments. Options stand before it."),
]


class Stack:
    """A stack and its copy for this machine.

    Attributes:
        ctx: The context.
        manifest: The manifest in stacks/NAME.
        copy: The workspace in build/stacks/NAME.
    """

    def __init__(self, ctx: Context, name: str) -> None:
        """Find a stack. Raise ForgeError if it does not exist."""
        stacks = _find_stacks(ctx)
        if name not in stacks:
            raise ForgeError(f"no stack {name!r}; there are: {', '.join(sorted(stacks))}")
        self.ctx = ctx
        self.manifest = Manifest.load(stacks[name])
        self.copy = Workspace(name, ctx.project.build / "stacks" / name, err.print)

    def write(self, channel: str | None) -> None:
        """Write the copy's manifest, and the programs and data of the stack's tasks.

        On the host base, packages of ours that channel/ lacks are left out, unless `channel` is
        given.

        Args:
            channel: The address of the channel with our packages; None for channel/.
        """
        ctx = self.ctx
        if ctx.hostbase:
            index = ctx.hostbase.folder / "noarch" / "repodata.json"
            if not index.exists():
                raise ForgeError("the host base is not made yet: run ./forge build-all --base host")
        if channel is None:
            our_channel = ctx.project.output_folder.as_uri()
            unbuilt = self._find_unbuilt()
        else:
            our_channel = Location(channel).url
            unbuilt = set()
        base_channel = ctx.base.channel_url if ctx.hostbase else CONDA_FORGE
        channels = {
            PUBLISHED: our_channel,
            "conda-forge": base_channel,
            CONDA_FORGE: base_channel,
        }
        pythons = ctx.base.overrides.get("python", [""])
        if len(pythons) > 1:
            raise ForgeError("a lock is for one Python: give --variant python=VERSION once")
        text = self.manifest.localize(channels, unbuilt, pythons[0])
        text = text.replace(GPU, self._find_gpu())
        write_text(self.copy.folder / "pixi.toml", text)
        for path in self.manifest.path.parent.iterdir():
            if path.suffix in (".py", ".jsonl"):
                copy_whole(path, self.copy.folder / path.name)
        self.print_left_out()

    def _find_gpu(self) -> str:
        """Return the GPU that the variant `gpu_arch` names."""
        values = self.ctx.base.variants.get("gpu_arch") or [GPU]
        return str(values[0])

    def _find_unbuilt(self) -> set[str]:
        """Return our packages that the stack names but channel/ lacks; none on conda-forge."""
        if not self.ctx.hostbase:
            return set()
        unbuilt = self.ctx.recipes.owner.keys() - {
            record.name for record in self.ctx.channel.records()
        }
        gpu = self._find_gpu()
        return {name for name in _list_packages(self.manifest) if name.replace(GPU, gpu) in unbuilt}

    def print_left_out(self) -> None:
        """Print the packages that the stack names and its copy lacks.

        The copy may name another GPU, so names that differ only in the GPU count as equal. The name
        of a package may differ from that of its recipe, which `forge build` takes.
        """
        present = {ANY_GPU.sub(GPU, name) for name in _list_packages(self.copy.manifest)}
        for name in sorted(_list_packages(self.manifest) - present):
            recipe_file = find_recipe(name, self.ctx.project)
            recipe = recipe_file.parent.name if recipe_file else name
            advice = f"./forge build {recipe} builds it, or prints why it cannot"
            out.print(f"left out {name}: the channel lacks it ({advice})")

    @contextmanager
    def locking(self) -> Iterator[Path]:
        """Yield the path of a new lock file, which replaces the copy's lock when the block ends.

        If the block raises, or the command is killed before its end, the old lock stays. Copies of
        the old lock and the manifest are put into the folder of the new lock.
        """
        lock_file = self.copy.lock_file
        manifest = lock_file.with_name("pixi.toml")
        with scratch(cache_folder()) as folder:
            new_lock = Path(folder, lock_file.name)
            for path in (lock_file, manifest):
                if path.exists():
                    shutil.copy(path, folder)
            yield new_lock
            move_whole(new_lock, lock_file)

    def pixi(
        self,
        command: str,
        *options: str,
        folder: Path | None = None,
    ) -> list[str]:
        """Return the command line of `pixi COMMAND` on the copy.

        Args:
            command: pixi's command.
            options: Its further arguments.
            folder: The folder of the manifest; the copy by default.

        Returns:
            The command line; empty if pixi is not on PATH, or if FORGE_NO_PIXI is set.

        Raises:
            ForgeError: The stack does not allow this version of pixi.
        """
        pixi = shutil.which("pixi")
        if is_set("FORGE_NO_PIXI") or not pixi:
            return []
        version = find_version(pixi)
        required = self.manifest.requires_pixi
        if version and not VersionSpec(required).matches(Version(version)):
            raise ForgeError(
                f"pixi {version} is not {required}, which {self.manifest.path} requires: "
                "update it (pixi self-update), or set FORGE_NO_PIXI=1 to continue without pixi"
            )
        folder = folder or self.copy.folder
        # pixi reads PIXI_CONFIGURATION only in the folder of the manifest. The copy's own file is
        # preferred to the checkout's.
        _link_configuration(self.ctx.project.root, self.copy.folder)
        _link_configuration(self.copy.folder, folder)
        return [pixi, command, "--manifest-path", str(folder / "pixi.toml"), *options]


def _link_configuration(source: Path, folder: Path) -> None:
    """Let pixi read a folder's configuration, such as mirrors, in a folder that has none."""
    configuration = source / PIXI_CONFIGURATION
    link = folder / PIXI_CONFIGURATION
    if not configuration.exists() or link.exists():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    # If the checkout was moved, an earlier link leads nowhere.
    link.unlink(missing_ok=True)
    # Another process may make the link at the same time.
    with suppress(FileExistsError):
        link.symlink_to(configuration)


def _find_stacks(ctx: Context) -> dict[str, Path]:
    """Return the manifest of each stack by name."""
    manifests = sorted(ctx.project.root.glob("stacks/*/pixi.toml"))
    return {path.parent.name: path for path in manifests}


def _list_packages(manifest: Manifest) -> set[str]:
    """Return the names of the packages that the environments of a manifest require."""
    names = set()
    for specs in manifest.environments.values():
        for spec in specs:
            names.add(parse_package_name(spec))
    return names


def find_version(pixi: str) -> str:
    """Return the version of a pixi executable, or an empty string if it does not print one."""
    result = subprocess.run(
        [pixi, "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.fullmatch(r"pixi (\d+(?:\.\d+)*)\S*\s*", result.stdout)
    if not match or result.returncode:
        return ""
    return match[1]


@app.command(cls=ForgeCommand)
def lock(context: typer.Context, stacks: Names = None, channel: Served = None) -> None:
    """Lock the environments of stacks for this machine, in build/stacks/STACK/pixi.lock.

    If pixi is on PATH, this runs `pixi lock`. Without pixi, or with FORGE_NO_PIXI=1, the driver
    locks. If it cannot solve an environment, it names the requirement, locks the other
    environments, and exits with 1.

    On the host base, packages of ours that channel/ lacks are left out and named, unless --channel
    is given. --variant python=3.13 locks for that Python. Only pixi makes a lock for every machine:
    run `pixi lock` in stacks/STACK.
    """
    ctx: Context = context.obj
    names = stacks or list(_find_stacks(ctx))
    chosen = [Stack(ctx, name) for name in names]
    if channel is None and not ctx.channel.is_indexed():
        with ctx.project.lock():
            ctx.channel.reconcile()
    codes = []
    for stack in chosen:
        try:
            lock_one(stack, channel)
        except ForgeError as error:
            if len(chosen) == 1:
                raise
            err.print(f"failed: {stack.copy.name}: {error}")
            codes.append(error.exit_code)
        except typer.Exit as error:
            # pixi has printed the reason.
            codes.append(error.exit_code)
    raise make_exit(codes)


def lock_one(stack: Stack, channel: str | None) -> None:
    """Lock a stack.

    Args:
        stack: The stack.
        channel: The address of the channel with our packages; None for channel/.

    Raises:
        typer.Exit: pixi has failed. The exit code is pixi's.
        ForgeError: The stack cannot be written, it does not allow this version of pixi, or
            Workspace.lock fails.
    """
    sizes: dict[str, int] = {}
    failure = None
    with hold(stack.copy.folder / ".pixi", "locking", err.print):
        stack.write(channel)
        with stack.locking() as new_lock:
            command = stack.pixi("lock", folder=new_lock.parent)
            if command:
                result = subprocess.run(command, check=False)
                if result.returncode:
                    raise typer.Exit(result.returncode)
            else:
                try:
                    sizes = stack.copy.lock(new_lock)
                except LockedInPart as error:
                    # The lock lacks some environments.
                    failure = error
    for environment, count in sizes.items():
        out.print(f"{environment}: {count} packages")
    out.print(f"{stack.copy.lock_file}: written")
    if failure:
        raise failure


@app.command(cls=ForgeCommand)
def install(
    context: typer.Context,
    stack: Name,
    environment: Environment = "default",
) -> None:
    """Install an environment of a stack exactly as locked in build/stacks/STACK.

    If pixi is on PATH, this runs `pixi install --locked`, with pixi's checks of the packages. With
    FORGE_NO_PIXI=1, or without pixi, the driver installs, with its own checks.
    """
    chosen = Stack(context.obj, stack)
    chosen.copy.require_locked()
    chosen.print_left_out()
    command = chosen.pixi("install", "--locked", "-e", environment)
    if command:
        with hold(chosen.copy.folder / ".pixi", "installing into", err.print):
            result = subprocess.run(command, check=False)
        raise typer.Exit(result.returncode)
    count = chosen.copy.install(environment)
    out.print(f"{count} packages in {chosen.copy.prefix(environment)}")


class RunCommand(ForgeCommand):
    """A command whose own options end at COMMAND, or at a `--` before it, as in `pixi run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--` before COMMAND, so that COMMAND keeps its own options and its own `--`."""
        position = self._find_command(args)
        command = args[position:]
        if command and command[0] != "--":
            command.insert(0, "--")
        return super().parse_args(ctx, [*args[:position], *command])

    def _find_command(self, args: list[str]) -> int:
        """Return the position of `--` or COMMAND, else the number of words.

        Before that position, there are only options and STACK.
        """
        options_with_value = set()
        for parameter in self.params:
            if not getattr(parameter, "is_flag", False):
                options_with_value.update(parameter.opts)
        has_stack = False
        is_value = False
        for position, word in enumerate(args):
            if is_value:
                is_value = False
            elif word == "--":
                return position
            elif word.startswith("-"):
                is_value = word in options_with_value
            elif has_stack:
                return position
            else:
                has_stack = True
        return len(args)


@app.command(cls=RunCommand)
def run(
    context: typer.Context,
    stack: Name,
    words: Words,
    environment: Environment = "default",
) -> None:
    """Run a command in an installed environment. If pixi runs it, COMMAND can also be a task."""
    chosen = Stack(context.obj, stack)
    # In an environment that is not installed, `pixi run --as-is` would use the system's Python.
    chosen.copy.require_installed(environment)
    command = chosen.pixi("run", "--as-is", "-e", environment, "--", *words)
    if command:
        os.execve(command[0], command, variables_for_commands())
    chosen.copy.run(environment, words)
