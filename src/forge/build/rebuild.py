# SPDX-License-Identifier: BSD-3-Clause
"""Is a package reproducible? Built again from what it holds, and compared byte for byte.

The rebuild is rattler-build's: it takes recipe, time, paths and the resolved packages from the
package. What it lacks is laid out around it: the repository's patches and folders, PyPI's files.
"""

import shutil
from pathlib import Path

from forge.build.runner import Builder, Result
from forge.errors import BuildFailed, NotAttempted
from forge.files import move_whole
from forge.provenance.package import Package, compare
from forge.recipes.plan import Step
from forge.recipes.recipe import sources_of
from forge.sources.cache import PYPI_URL

UNREACHED = "Failed to download from URL"  # rattler-build's words, 0.72 and 0.73


def check(builder: Builder, steps: list[Step]) -> list[Result]:
    """Rebuild the packages of current steps, one after another, and compare them."""
    return builder.for_current(steps, "identical", lambda step: _check(builder, step))


def _check(builder: Builder, step: Step) -> None:
    """Raises BuildFailed when a package differs, or NotAttempted when it cannot be rebuilt here."""
    name, project = step.recipe.name, builder.project
    output, log = project.staging / name, project.logs / f"{name}.rebuild.log"
    folders: dict[Path, Path] = {}  # where each package was built
    for package in map(builder.channel.path, step.outputs):
        built = Path(Package(package).rendered["build_configuration"]["directories"]["build_dir"])
        if not built.is_relative_to(output):
            raise NotAttempted(
                f"{package.name} was built in {built}. A package records that path, so only a "
                f"checkout that builds below it can rebuild it; forge rebuild {name} makes one here"
            )
        folders[package] = built
    log.unlink(missing_ok=True)
    existed = output.exists()
    folder = _lay_out(builder, step, output / "rebuild")
    differences = []
    for package in folders:
        builder.display.phase(f"{package.stem}: building again")
        for leftover in output.glob(f"{package.stem}-rebuilt-*.conda"):  # of a killed check
            leftover.unlink()
        job = {"package": str(package), "output_dir": str(output), "folder": str(folder)}
        try:
            builder.run_job({"action": "rebuild", **job}, log)
        except BuildFailed as error:
            if UNREACHED not in str(error):
                raise
            origins = ", ".join(source.origin for source in sources_of(step.recipe))
            raise NotAttempted(f"a rebuild fetches again, cannot reach one of {origins}") from None
        (rebuilt,) = output.glob(f"{package.stem}-rebuilt-*.conda")
        if lines := compare(package, rebuilt):
            kept = project.build / "rebuilt" / package.name
            move_whole(rebuilt, kept)
            differences += [f"{package.name} differs from its rebuild, kept at {kept}", *lines]
        else:
            rebuilt.unlink()
    # what a failed build left there stays
    for leftover in [folder, *folders.values()] if existed else [output]:
        shutil.rmtree(leftover, ignore_errors=True)
    if differences:
        raise BuildFailed("\n  ".join(differences))


def _lay_out(builder: Builder, step: Step, folder: Path) -> Path:
    """FOLDER/recipes, where the recipe will lie, and around it what it names.

    `../../patches/NAME` has to lead where it leads from recipes/NAME.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "recipes").mkdir(parents=True)
    for entry in builder.project.root.iterdir():
        if entry.name != "recipes":
            (folder / entry.name).symlink_to(entry)
    pypi = folder / PYPI_URL.rsplit("/", 1)[1]
    pypi.mkdir()
    for source in sources_of(step.recipe):
        file = builder.sources.fetch(source, builder.display.download)
        if source.url.startswith(PYPI_URL):
            (pypi / source.file_name).symlink_to(file)
    return folder
