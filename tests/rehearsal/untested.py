# SPDX-License-Identifier: BSD-3-Clause
"""Build one recipe with what the channel has, untested: `untested.py RECIPE FOLDER [KEY=VALUE...]`.

For a package whose tests need one that is not built yet. By the driver of FORGE_ROOT, which builds
what a package runs with first, and keeps none without its tests: so this one goes into a folder of
its own, and never into a channel.
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
    """The packages of one recipe, in `folder`. Raises ForgeError."""
    ctx.select([name])
    (step,) = (one for one in ctx.recipes.plan(ctx.channel) if one.recipe.name == name)
    sources = SourceCache(ctx.project)
    kill_leftovers(folder.parent)  # compilers of a build that was killed
    shutil.rmtree(folder, ignore_errors=True)
    for source in list_sources(step.recipe):
        sources.fetch(source, lambda *_: None)
    for raw in step.recipe.sources:
        if wrong := prepare(step.recipe, raw, sources, folder / "src_cache"):
            raise Failed(wrong)
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
    for made in ("bld", "build_cache", "src_cache"):
        shutil.rmtree(folder / made, ignore_errors=True)
    return sorted(folder.glob("*/*.conda"))


def main() -> None:
    """Prints the packages, or the reason that there are none, and exits with 1."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    ctx = Context(variants=sys.argv[3:])
    try:
        with ctx.project.lock():
            packages = build(ctx, name, folder)
    except ForgeError as error:
        raise SystemExit(f"{name}: {error}") from None
    for package in packages:
        print(f"not tested, not in the channel: {package}")


if __name__ == "__main__":
    main()
