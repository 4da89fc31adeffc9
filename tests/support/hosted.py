# SPDX-License-Identifier: BSD-3-Clause
"""A repository on GitHub with our workflows, and small recipes of the names that they name."""

import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from rattler_build import assemble_package
from support.hub import Hub
from support.project import CHECKOUT, NOARCH
from support.servers import QuietHandler
from support.stand_in import write_mirrors

from forge.bases import CONDA_FORGE
from forge.conda.local import write_index
from forge.files import sha256_file
from forge.project import SUBDIRS

NAME = "untested"
ADDRESS = f"https://github.com/owner/strix-forge/releases/download/{NAME}"
# by name, what each needs: the jobs sdk, aotriton and pytorch, then three layers
NEEDS = {
    "rocm-sdk": [],
    "aotriton": ["rocm-sdk"],
    "pytorch": ["aotriton"],
    "strix-validate": ["pytorch"],
    "flash-attn": ["strix-validate"],
    "vllm": ["flash-attn"],
}
SCRATCH = 24 << 20  # bytes that the largest build needs for a while
DISK, IMAGE = 96 << 20, 80 << 20  # of a machine, and what its image has on it at first
STAGES = ("prepare", "compile", "install")
CODE = ("src/forge/files.py",)  # what a push changed
STACKS = ("attention", "vllm", "diffusion", "finetune")
# stages with marks in the folder that outlives a build, as pytorch's objects in ccache
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
    """Answers as GitHub does for a file of a release: with a redirect to where it is kept."""

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD)

    def _answer(self, serve: object) -> None:
        if self.path.startswith("/download/"):
            self.send_response(302)
            place = f"{self.server.place}/releases/{self.path.removeprefix('/download/')}"
            self.send_header("Location", place)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            serve()


def compile_stopped_clock(folder: Path) -> Path:
    """Compile stopped_clock.c: two builds of the same content are then equal."""
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
    """Write a recipe whose build is stopped where a test asks for it."""
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


# strix-validate and the stacks' checks pass; `pixi upload` copies into the folder of promoted files
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
    """Put the repository on a new hub whose machines reach a conda-forge of their own."""
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
    """A folder for hubs, which share a conda-forge and a clock that stands still."""

    def __init__(self, folder: Path, conda_forge: str) -> None:
        self.folder, self.conda_forge = folder, conda_forge
        self.source = folder / "source"
        write_repository(self.source)
        self.clock = compile_stopped_clock(folder)

    def hub(self, name: str = "hub", source: Path | None = None, after: Hub | None = None) -> Hub:
        """Make a hub, with what another one has published."""
        source = source or self.source
        hub = make_hub(self.folder / name, source, self.conda_forge, self.clock)
        hub.disk, hub.image = DISK, IMAGE
        if after:
            shutil.copytree(after.releases, hub.releases, dirs_exist_ok=True)
        return hub

    def copy_source(self, name: str, recipes: Collection[str] = NEEDS) -> Path:
        """Copy the repository's files, with these recipes alone, to change them."""
        source = shutil.copytree(self.source, self.folder / name)
        for recipe in NEEDS.keys() - set(recipes):
            shutil.rmtree(source / "recipes" / recipe)
        return source


def make_conda_forge(folder: Path) -> None:
    """Write a channel that has a text file for each Python, with which each plan is solved."""
    content = folder.parent / "content"
    content.mkdir()
    (content / "python").write_text("stands for the real one in tests\n")
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
    """Switch the release on, with a machine that is said to have the GPU."""
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
