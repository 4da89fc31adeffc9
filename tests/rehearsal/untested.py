# SPDX-License-Identifier: BSD-3-Clause
"""Build one recipe with the packages of the channel, without its tests.

    untested.py RECIPE FOLDER [KEY=VALUE...]

Use this for a package whose tests require a package that is not built yet. The usual commands of
the driver would first build the run requirements of the package, and would keep no package that was
not tested. So this program calls the driver's functions directly. The environment variable
FORGE_ROOT names the checkout whose recipes and channel are used. Without it, the checkout of the
driver is used. Each KEY=VALUE overrides a value of variants.yaml. The package is written to FOLDER,
and never to a channel.
"""

import shutil
import sys
import threading
from pathlib import Path

from forge.building.jobs import run_job
from forge.cli.context import LOCAL_FORMAT, Context
from forge.errors import Failed, ForgeError
from forge.processes import kill_leftovers, max_jobs
from forge.recipes.recipe import list_sources, prepare
from forge.sources.cache import SourceCache


def build(ctx: Context, name: str, folder: Path) -> list[Path]:
    """Build a recipe in a folder, and return its packages. Raises ForgeError."""
    ctx.select([name])
    (step,) = (step for step in ctx.recipes.plan(ctx.channel) if step.recipe.name == name)
    sources = SourceCache(ctx.project)
    # Compilers of a killed build may still run.
    kill_leftovers(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    for source in list_sources(step.recipe):
        sources.fetch(source, lambda *_: None)
    for source in step.recipe.sources:
        reason = prepare(step.recipe, source, sources, folder / "src_cache")
        if reason:
            raise Failed(reason)
    job = ctx.base.arguments(step.digest_value, step.outputs[0].number) | {
        "action": "build",
        "recipes": [str(step.recipe.path)],
        "output_dir": str(folder),
        "channel": [ctx.channel.folder.as_uri(), ctx.base.channel_url],
        "package_format": LOCAL_FORMAT,
        "pythons": step.pythons(),
    }
    log = ctx.project.logs / f"{name}.untested.log"
    run_job(ctx.project, max_jobs(), lambda _: None, threading.Event(), job, log)
    for work_folder in ("bld", "build_cache", "src_cache"):
        shutil.rmtree(folder / work_folder, ignore_errors=True)
    return sorted(folder.glob("*/*.conda"))


def main() -> None:
    """Build the recipe and print its packages. If that fails, print the reason, and exit with 1."""
    name = sys.argv[1]
    folder = Path(sys.argv[2])
    ctx = Context(variants=sys.argv[3:])
    try:
        with ctx.project.lock():
            packages = build(ctx, name, folder)
    except ForgeError as error:
        raise SystemExit(f"{name}: {error}") from None
    for package in packages:
        print(f"built without tests, and not added to the channel: {package}")


if __name__ == "__main__":
    main()
