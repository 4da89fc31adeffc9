# SPDX-License-Identifier: BSD-3-Clause
"""Run channel.yml of a rehearsal's copy on the stand-ins, and install what it publishes.

The small runner of the tests, support/workflow_runner.py, executes the workflow.
"""

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

# The recipes up to aotriton, and the emulator, which aotriton's tests require.
RECIPES = ["rocm-sdk", "amdsmi", "triton", "strix-emulate", "aotriton"]
# The size of a machine's disk in bytes.
DISK = 30 << 30
# This option is removed from the workflow, because compression at level 19 takes much longer.
RELEASE_FORMAT = "--package-format conda:19 "
# A launcher that runs the copy's driver, with the sources that the rehearsal has.
FORGE = """\
#!/bin/sh
mkdir -p build && ln -sfn {sources} build/sources
FORGE_ROOT=$PWD exec {python} src/forge "$@"
"""


def write_repository(place: Place, folder: Path, recipes: list[str]) -> None:
    """Write the repository, which is a copy of the checkout with only some recipes.

    AOTriton is built with its smallest set of kernels, and packages are compressed as in local
    builds.
    """

    def ignore(parent: str, names: list[str]) -> set[str]:
        """Leave out what the driver and the rehearsal have written to the copy's top folder."""
        if Path(parent) != place.root:
            return set()
        return {"build", "channel", MARK}.intersection(names)

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.root, folder, symlinks=True, ignore=ignore)
    for recipe in folder.glob("recipes/*/recipe.yaml"):
        if recipe.parent.name not in recipes:
            shutil.rmtree(recipe.parent)
    variants = folder / "variants.yaml"
    text, count = re.subn(r"(?m)^  - full$", "  - sample", variants.read_text())
    assert count, "variants.yaml names no set of kernels"
    variants.write_text(text)
    build = folder / ".github/workflows/build.yml"
    text = build.read_text()
    assert RELEASE_FORMAT in text, "build.yml names no package format"
    build.write_text(text.replace(RELEASE_FORMAT, ""))
    launcher = FORGE.format(sources=place.root / "build/sources", python=sys.executable)
    (folder / "forge").write_text(launcher)


def run_channel(place: Place, recipes: list[str]) -> int:
    """Run channel.yml for some recipes, install what it published, and return an exit code."""
    folder = place.folder / "workflow"
    shutil.rmtree(folder, ignore_errors=True)
    write_repository(place, folder / "source", recipes)
    with served(place.conda_forge, Revalidating) as conda_forge:
        write_mirrors(folder / "home", {CONDA_FORGE: conda_forge})
        hub = Hub(
            folder / "hub",
            folder / "source",
            folder / "machines",
            variables={"CHANNEL_UNTESTED": hosted.NAME},
            environment={"FORGE_NO_PIXI": "1", "COLUMNS": "200"},
            home={".pixi/config.toml": (folder / "home/.pixi/config.toml").read_text()},
            disk=DISK,
        )
        run = Run(hub, "channel.yml")
        start = time.monotonic()
        with place.record_cost("workflow"):
            results = run.start("push", hosted.CODE)
        print(*run.log, sep="\n")
        print(f"{time.monotonic() - start:.0f} s:", results)
        if set(results.values()) - {SUCCESS, SKIPPED}:
            return 1
        for name, digest in hosted.read_published(hub).items():
            print(digest, (hub.releases / hosted.NAME / name).stat().st_size, name)
        return install(place, hub, conda_forge, recipes)


def install(place: Place, hub: Hub, conda_forge: str, recipes: list[str]) -> int:
    """Lock and install the published packages from their public URL, and return an exit code.

    Args:
        place: The rehearsal.
        hub: The hub that has published the packages.
        conda_forge: The URL of the stand-in for conda-forge.
        recipes: The recipes of the packages.
    """
    user = hub.folder / "user"
    stack = user / "stacks/mine"
    stack.mkdir(parents=True)
    text = hosted.MANIFEST.format(name="mine", channel=hosted.ADDRESS).replace('vllm = "*"\n', "")
    (stack / "pixi.toml").write_text(text + "".join(f'{name} = "*"\n' for name in recipes))
    (user / "recipes").mkdir()
    for name in ("recipes/bases", "variants.yaml"):
        (user / name).symlink_to(place.root / name)
    with served(hub.folder, hosted.Assets) as github:
        releases = f"{github}/download/{hosted.NAME}"
        write_mirrors(user, {CONDA_FORGE: conda_forge, hosted.ADDRESS: releases})
        environment = clean_environment(user) | GPU
        environment |= {"FORGE_ROOT": str(user), "FORGE_BASE": "conda-forge"}
        environment |= {"FORGE_NO_PIXI": "1", "FORGE_CHANNEL": hosted.ADDRESS}
        for command_name in ("lock", "install"):
            command = [sys.executable, str(place.root / "src/forge"), command_name, "mine"]
            done = subprocess.run(command, cwd=user, env=environment, check=False)
            if done.returncode:
                return done.returncode
    return 0
