# SPDX-License-Identifier: BSD-3-Clause
"""A repository on a mock of GitHub, with our workflows and small recipes.

The recipes have names that the workflows use.
"""

import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from rattler_build import assemble_package
from support.hub import Hub
from support.project import CHECKOUT, NOARCH, STACKS
from support.servers import QuietHandler
from support.stand_in import write_mirrors

from forge.bases import CONDA_FORGE
from forge.conda.local import write_index
from forge.files import sha256_file
from forge.project import SUBDIRS

NAME = "untested"
ADDRESS = f"https://github.com/owner/strix-forge/releases/download/{NAME}"
# The requirements of each recipe, by its name. The workflow builds the first three in the jobs sdk,
# aotriton and pytorch, and the other three in one layer each.
NEEDS = {
    "rocm-sdk": [],
    "aotriton": ["rocm-sdk"],
    "pytorch": ["aotriton"],
    "strix-validate": ["pytorch"],
    "flash-attn": ["strix-validate"],
    "vllm": ["flash-attn"],
}
SCRATCH = 24 << 20  # bytes that the largest build needs temporarily
DISK = 96 << 20  # bytes of a machine's disk
IMAGE = 80 << 20  # bytes of a machine's disk that GitHub's image occupies when a job starts
STAGES = ("prepare", "compile", "install")
CODE = ("src/forge/files.py",)  # the files that a push changed
# A build in three stages. Each finished stage leaves a file in FORGE_CACHE, which outlives the
# build, and a later build skips that stage. The real pytorch keeps its objects there, in ccache.
SCRIPT = """\
cache=$FORGE_CACHE/{name}
mkdir -p "$cache" "$PREFIX/share/{name}"
head -c {scratch} /dev/zero >scratch && rm scratch
for stage in prepare compile install; do
    [ ! -e "$cache/$stage" ] || continue
    if [ -e "$HOLD/{name}-$stage" ]; then
        : >"$HOLD/{name}-$stage.reached"
        sleep 600
    fi
    echo "{name}-$stage" >>"$HOLD/../executed"
    echo "$stage of {name}" >"$cache/$stage"
done
cat "$cache/prepare" "$cache/compile" "$cache/install" >"$PREFIX/share/{name}/text"
"""
PASSED_ON = """\
  script:
    file: build.sh
    env:
      FORGE_CACHE: ${{ env.get("FORGE_CACHE", default="") }}
      HOLD: ${{ env.get("HOLD", default="") }}
"""
FORGE = f'#!/bin/sh\nFORGE_ROOT=$PWD exec {sys.executable} {CHECKOUT}/src/forge "$@"\n'
MANIFEST = """\
[workspace]
name = "{name}"
channels = ["{channel}", "conda-forge"]
platforms = ["linux-64"]

[dependencies]
vllm = "*"
"""


class Assets(QuietHandler):
    """A handler that redirects each file of a release to another address, as GitHub does."""

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD)

    def _answer(self, serve: object) -> None:
        if self.path.startswith("/download/"):
            self.send_response(302)
            location = f"{self.server.place}/releases/{self.path.removeprefix('/download/')}"
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            serve()


def compile_stopped_clock(folder: Path) -> Path:
    """Compile stopped_clock.c, with which two builds of the same content are equal."""
    library = folder / "stopped_clock.so"
    source = Path(__file__).with_name("stopped_clock.c")
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, source, "-ldl"], check=True)
    return library


def write_repository(folder: Path) -> None:
    """Write the files of the repository."""
    for name in (".github", "recipes/bases"):
        shutil.copytree(CHECKOUT / name, folder / name)
    shutil.copy(CHECKOUT / "variants.yaml", folder)
    (folder / "forge").write_text(FORGE)
    (folder / "forge").chmod(0o755)
    for name, needs in NEEDS.items():
        write_recipe(folder, name, needs)
    for name in STACKS:
        stack = folder / "stacks" / name
        stack.mkdir(parents=True)
        text = MANIFEST.format(name=name, channel="https://repo.prefix.dev/strix-forge")
        (stack / "pixi.toml").write_text(text)


def write_recipe(folder: Path, name: str, needs: list[str], version: str = "1.0") -> None:
    """Write a recipe. A test can stop its build at each stage, by a file in the folder HOLD."""
    recipe = folder / "recipes" / name
    recipe.mkdir(parents=True, exist_ok=True)
    test = [f"test -s $PREFIX/share/{name}/text"]
    text = NOARCH.format(name=name, run=needs, test=test, source=[])
    text = text.replace('"1.0"', f'"{version}"').replace("build:\n", f"build:\n{PASSED_ON}")
    text = text.replace("  summary:", "  license_file: LICENSE\n  summary:")
    (recipe / "recipe.yaml").write_text(text)
    (recipe / "LICENSE").write_text("Redistribution and use are permitted\n")
    scratch = SCRATCH if name == "rocm-sdk" else 0
    (recipe / "build.sh").write_text(SCRIPT.format(name=name, scratch=scratch))


# A mock of pixi. The commands of strix-validate and of the stacks' checks succeed and do nothing,
# except that those with --evidence append a line to a record. `pixi upload` copies the packages
# into the folder of promoted files.
PIXI = """\
#!/bin/sh
set -eu
hold() { [ ! -e "$HOLD/$1" ] || { : >"$HOLD/$1.reached" && sleep 600; }; }
case $* in
    *" --evidence "*)
        hold validation
        mkdir -p build/evidence
        echo passed >>build/evidence/record
        ;;
    "upload prefix --channel "*)
        mkdir -p "$RELEASES/../promoted"
        for file; do
            case $file in *.conda) cp "$file" "$RELEASES/../promoted" && hold promotion ;; esac
        done
        ;;
    "run --locked --manifest-path "*) ;;
    *) exit 2 ;;
esac
"""
PIXI_RELEASE = "v0.84.2/pixi-x86_64-unknown-linux-musl"


def make_hub(folder: Path, source: Path, conda_forge: str, clock: Path) -> Hub:
    """Put the repository on a new hub. Its machines use `conda_forge` as a mirror of conda-forge.

    Args:
        folder: The folder of the hub.
        source: The files of the repository.
        conda_forge: The URL of the mirror.
        clock: The compiled stopped_clock.c.
    """
    home = folder.parent / f"{folder.name}-home"
    write_mirrors(home, {CONDA_FORGE: conda_forge})
    return Hub(
        folder,
        source,
        folder.parent / "machines",
        variables={"CHANNEL_UNTESTED": NAME},
        environment={"FORGE_NO_PIXI": "1", "LD_PRELOAD": str(clock), "COLUMNS": "200"},
        home={".pixi/config.toml": (home / ".pixi/config.toml").read_text()},
    )


class Hosting:
    """A folder of hubs that share a mirror of conda-forge and a clock that stands still."""

    def __init__(self, folder: Path, conda_forge: str) -> None:
        self.folder, self.conda_forge = folder, conda_forge
        self.source = folder / "source"
        write_repository(self.source)
        self.clock = compile_stopped_clock(folder)

    def hub(self, name: str = "hub", source: Path | None = None, after: Hub | None = None) -> Hub:
        """Make a hub. If `after` is a hub, the new one starts with its releases."""
        source = source or self.source
        hub = make_hub(self.folder / name, source, self.conda_forge, self.clock)
        hub.disk, hub.image = DISK, IMAGE
        if after:
            shutil.copytree(after.releases, hub.releases, dirs_exist_ok=True)
        return hub

    def copy_source(self, name: str, recipes: Collection[str] = NEEDS) -> Path:
        """Copy the repository's files, with only these recipes, so that a test can change them."""
        source = shutil.copytree(self.source, self.folder / name)
        for recipe in NEEDS.keys() - set(recipes):
            shutil.rmtree(source / "recipes" / recipe)
        return source


def make_conda_forge(folder: Path) -> None:
    """Write a channel with a stub for each Python. The driver solves each plan with it."""
    content = folder.parent / "content"
    content.mkdir()
    (content / "python").write_text("a stub that replaces Python in tests\n")
    for subdir in SUBDIRS:
        (folder / subdir).mkdir(parents=True)
    for version, build in (("3.12.0", "0_cpython"), ("3.13.0", "0_cp313")):
        target = folder / "linux-64"
        assemble_package("python", version, "linux-64", build, target, files_dir=content)
    write_index(folder, write_zst=True, write_shards=False)


def read_published(hub: Hub) -> dict[str, str]:
    """Return the sha256 of each package that users can download, by SUBDIR/FILE."""
    files = sorted((hub.releases / NAME).glob("*/*.conda"))
    return {f"{file.parent.name}/{file.name}": sha256_file(file) for file in files}


def take_executed(hub: Hub) -> list[str]:
    """Return the stages RECIPE-STAGE that scripts have executed since the last call, in order."""
    file = hub.machines / "executed"
    stages = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return stages


def switch_release_on(hub: Hub, pixi: str = PIXI) -> Hub:
    """Set the variable CHANNEL, which enables the release, and give the machines a mock of pixi.

    With the mock, the validation succeeds without a GPU.
    """
    hub.variables |= {"CHANNEL": "strix-forge"}
    hub.programs = {"pixi": pixi}
    program = hub.releases / PIXI_RELEASE
    program.parent.mkdir()
    program.write_text(pixi)
    (program.parent / ".notes").write_text("")
    return hub


def read_promoted(hub: Hub) -> dict[str, str]:
    """Return the sha256 of each package that was uploaded to CHANNEL, by FILE."""
    files = (hub.folder / "promoted").glob("*.conda")
    return {file.name: sha256_file(file) for file in files}
