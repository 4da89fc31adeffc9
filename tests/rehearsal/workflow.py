# SPDX-License-Identifier: BSD-3-Clause
"""channel.yml of a copy of the checkout, executed by the tests' small runner on the stand-ins."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rehearsal.checkout import MARK, Place
from support import hosted
from support.hub import Hub
from support.servers import Revalidating, served
from support.stand_in import GPU, clean_environment, write_mirrors
from support.workflow_runner import SKIPPED, SUCCESS, Run

from forge.bases import CONDA_FORGE

# Those up to AOTriton, whose tests need the emulator.
RECIPES = ["rocm-sdk", "amdsmi", "triton", "strix-emulate", "aotriton"]
DISK = 30 << 30  # bytes of a machine's, where it can be mounted
RELEASE_FORMAT = "--package-format conda:19 "  # its level takes many times longer
FORGE = """\
#!/bin/sh
mkdir -p build && ln -sfn {sources} build/sources
FORGE_ROOT=$PWD exec {python} src/forge "$@"
"""


def write_repository(place: Place, folder: Path, recipes: list[str]) -> None:
    """Write the repository: the copy of the checkout, with these recipes and sources at hand.

    AOTriton has its smallest set of kernels, and packages are compressed as local work is.
    """
    made = {"build", "channel", MARK}  # by the copy's driver and the rehearsal, at the top alone

    def ignore(parent: str, names: list[str]) -> set[str]:
        return made.intersection(names) if Path(parent) == place.root else set()

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.root, folder, symlinks=True, ignore=ignore)
    for recipe in folder.glob("recipes/*/recipe.yaml"):
        if recipe.parent.name not in recipes:
            shutil.rmtree(recipe.parent)
    variants = folder / "variants.yaml"
    text, times = re.subn(r"(?m)^  - full$", "  - sample", variants.read_text())
    assert times, "variants.yaml names no set of kernels"
    variants.write_text(text)
    build = folder / ".github/workflows/build.yml"
    text = build.read_text()
    assert RELEASE_FORMAT in text, "build.yml names no package format"
    build.write_text(text.replace(RELEASE_FORMAT, ""))
    launcher = FORGE.format(sources=place.root / "build/sources", python=sys.executable)
    (folder / "forge").write_text(launcher)


def run_channel(place: Place, recipes: list[str]) -> int:
    """Run channel.yml for some recipes, and install what it published; returns an exit code."""
    folder = place.folder / "workflow"
    shutil.rmtree(folder, ignore_errors=True)
    write_repository(place, folder / "source", recipes)
    with served(place.conda_forge, Revalidating) as theirs:
        write_mirrors(folder / "home", {CONDA_FORGE: theirs})
        hub = Hub(
            folder / "hub",
            folder / "source",
            folder / "machines",
            variables={"CHANNEL_UNTESTED": hosted.NAME},
            environment={"FORGE_NO_PIXI": "1", "COLUMNS": "200"},
            home={".pixi/config.toml": (folder / "home/.pixi/config.toml").read_text()},
            disk=DISK,
        )
        run, start = Run(hub, "channel.yml"), time.monotonic()
        with place.noted("workflow"):
            results = run.start("push", hosted.CODE)
        print(*run.log, sep="\n")
        print(f"{time.monotonic() - start:.0f} s:", results)
        if set(results.values()) - {SUCCESS, SKIPPED}:
            return 1
        for name, digest in hosted.read_published(hub).items():
            print(digest, (hub.releases / hosted.NAME / name).stat().st_size, name)
        return install(place, hub, theirs, recipes)


def install(place: Place, hub: Hub, theirs: str, recipes: list[str]) -> int:
    """Lock and install what was published, from its public address; returns an exit code."""
    user = hub.folder / "user"
    stack = user / "stacks/mine"
    stack.mkdir(parents=True)
    text = hosted.MANIFEST.format(name="mine", channel=hosted.ADDRESS).replace('vllm = "*"\n', "")
    (stack / "pixi.toml").write_text(text + "".join(f'{name} = "*"\n' for name in recipes))
    (user / "recipes").mkdir()
    for name in ("recipes/bases", "variants.yaml"):
        (user / name).symlink_to(place.root / name)
    with served(hub.folder, hosted.Assets) as github:
        mirrors = {CONDA_FORGE: theirs, hosted.ADDRESS: f"{github}/download/{hosted.NAME}"}
        write_mirrors(user, mirrors)
        environment = clean_environment(user) | GPU
        environment |= {"FORGE_ROOT": str(user), "FORGE_BASE": "conda-forge"}
        environment |= {"FORGE_NO_PIXI": "1", "FORGE_CHANNEL": hosted.ADDRESS}
        for word in ("lock", "install"):
            command = [sys.executable, str(place.root / "src/forge"), word, "mine"]
            done = subprocess.run(command, cwd=user, env=environment, check=False)
            if done.returncode:
                return done.returncode
    return 0
