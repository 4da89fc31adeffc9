# SPDX-License-Identifier: BSD-3-Clause
"""Generate the parts of pages, manifests and recipes that repeat facts from other files.

- `extra` of each recipe states the state, cost and notes of its packages, and their names on PyPI.
  README.md and pages of docs/ repeat the states, costs and notes. Users copy a manifest without
  other files, so the manifests in pages and stacks repeat the names.
- Manifests, and pages with examples of manifests, state the versions of our packages.
- README.md states the number of packages. README.md and docs/owner.md state sums of the packages'
  costs.
- stacks/several.toml repeats the tables of three stacks, because pixi reads no tables from another
  file.
- docs/kernels.md sums up recipes/*/kernels.tsv, which list the costs of packaged kernels.
- pixi.toml and the recipes strix-validate and strix-emulate repeat the dependencies of a
  pyproject.toml under conda-forge's names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from forge import bases
from forge.bases import BaseName
from forge.conda import pypi
from forge.dependencies import insert_dependencies, insert_run_requirements
from forge.errors import ForgeError
from forge.files import read_text
from forge.hostbase.base import HostBaseMaker
from forge.project import Project
from forge.recipes import kernel_tables, package_tables
from forge.recipes.cost import Cost, read_costs
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe

PAGES = ("README.md", "docs/*.md", "pixi.toml", "stacks/*/pixi.toml")
WORKSPACE = "pixi.toml"
DEPENDENCIES = "pyproject.toml"
STATE_PAGE = "README.md"
COST_PAGE = "docs/build.md"
SECTIONS_PAGE = "docs/packages.md"
# Parts of sentences that state figures about packages, by page. See
# package_tables.format_figures.
FIGURES = {
    "README.md": (
        "build {host_packages} of the {packages} packages",
        "about {hours} CPU hours and {disk} GiB of disk.",
        "in an estimated {hours_on_4_cores} hours,",
        "{host_packages} packages: {host_download} GiB of downloads, {host_disk} GiB of disk, "
        "{host_hours} CPU hours",
    ),
    "docs/owner.md": (
        "costs {disk} GiB of disk, {download} GiB of downloads besides conda-forge's packages, and "
        "{hours} CPU hours:",
    ),
}
# Packages on PyPI that require a wheel for CUDA. We have no recipe for them.
FOR_CUDA = ("unsloth", "xformers")
BEFORE_PYPI = "1970-01-01"
# The heading of a TOML table, and its lines up to an empty line, the next table, or the end of a
# code block in Markdown.
TABLE = r"(?m)^(\[[^\n]*\b{}[^\n]*\][^\n]*\n)(?:[^\n\[`][^\n]*\n)*"
COMBINED_MANIFEST = "stacks/several.toml"
# The stacks in COMBINED_MANIFEST.
COMBINED_STACKS = ("attention", "vllm", "finetune")


def find_outdated(project: Project) -> Iterator[tuple[Path, str]]:
    """Yield each file whose generated parts are out of date, with its new text.

    Raises:
        ForgeError: A file from which text is generated cannot be read.
    """
    names = pypi.read_names(project.recipes)
    pages: dict[Path, str] = {}
    texts: dict[Path, str] = {}
    for pattern in PAGES:
        for path in sorted(project.root.glob(pattern)):
            pages[path] = read_text(path)
            texts[path] = insert_names(pages[path], names)
    insert_recipe_facts(texts, project)
    workspace = project.root / WORKSPACE
    if workspace in texts:
        pyproject = read_text(project.root / DEPENDENCIES)
        texts[workspace] = insert_dependencies(texts[workspace], pyproject)
    for path in sorted(project.recipes.glob("*/recipe.yaml")):
        pages[path] = read_text(path)
        texts[path] = insert_run_requirements(pages[path], project.root)
    for path, text in texts.items():
        if text != pages[path]:
            yield path, text
    manifests: dict[str, str] = {}
    for name in COMBINED_STACKS:
        path = project.root / "stacks" / name / "pixi.toml"
        if path not in texts:
            # The project, perhaps one of a test, has other stacks.
            return
        manifests[name] = texts[path]
    combined = project.root / COMBINED_MANIFEST
    text = compose(manifests)
    if not combined.exists() or read_text(combined) != text:
        yield combined, text


def insert_recipe_facts(texts: dict[Path, str], project: Project) -> None:
    """Replace versions, tables and figures of packages and their kernels.

    Args:
        texts: The text of each page; changed in place. A test's project may not have the pages.
        project: The checkout.
    """
    kernels_page = project.root / kernel_tables.PAGE
    if kernels_page in texts:
        lists = sorted(project.recipes.glob("*/kernels.tsv"))
        texts[kernels_page] = kernel_tables.with_tables(texts[kernels_page], lists)
    sections_page = project.root / SECTIONS_PAGE
    if sections_page not in texts:
        # The project, perhaps one of a test, has no pages about packages.
        return
    base = bases.load(project, BaseName.CONDA_FORGE)
    recipes = RecipeSet(project, base).recipes
    for path, text in texts.items():
        texts[path] = insert_versions(text, recipes)
    costs = read_costs(recipes.values(), base)
    host_base_cost = HostBaseMaker(project, base).cost
    host_costs = [host_base_cost, *_read_host_costs(project)]
    figures = package_tables.format_figures(recipes, costs.values(), host_costs)
    for name, sentences in FIGURES.items():
        page = project.root / name
        for sentence in sentences:
            texts[page] = package_tables.replace_figures(texts[page], sentence, figures, name)
    state_page = project.root / STATE_PAGE
    texts[state_page] = package_tables.replace_table(
        texts[state_page],
        package_tables.STATE_HEAD,
        package_tables.make_state_table(recipes),
        STATE_PAGE,
    )
    cost_page = project.root / COST_PAGE
    texts[cost_page] = package_tables.replace_table(
        texts[cost_page],
        package_tables.COST_HEAD,
        package_tables.make_cost_table({"host base": host_base_cost, **costs}),
        COST_PAGE,
    )
    texts[sections_page] = package_tables.replace_sections(
        texts[sections_page],
        package_tables.make_sections(recipes),
        SECTIONS_PAGE,
    )


def insert_versions(text: str, recipes: Mapping[str, Recipe]) -> str:
    """Return the text with the versions of our packages in lines such as `pytorch = "2.13.*"`.

    A version keeps its number of parts.

    Args:
        text: A page or a manifest.
        recipes: All recipes.
    """
    versions: dict[str, str] = {}
    for recipe in recipes.values():
        versions |= dict.fromkeys(recipe.output_names, recipe.version)

    def replace(line: re.Match[str]) -> str:
        name, old_version = line.groups()
        if name not in versions:
            return line[0]
        parts = versions[name].split(".")[: len(old_version.split("."))]
        return f'{name} = "{".".join(parts)}.*"'

    return re.sub(r'(?m)^([\w-]+) = "(\d[\w.]*)\.\*"', replace, text)


def _read_host_costs(project: Project) -> list[Cost]:
    """Return the cost of each recipe that was built on the host base, in build order."""
    base = bases.load(project, BaseName.HOST)
    recipes = RecipeSet(project, base).recipes
    built = [recipe for recipe in recipes.values() if package_tables.is_built_on_host(recipe)]
    return list(read_costs(built, base).values())


def insert_names(text: str, names: pypi.Names) -> str:
    """Return the text with new lines in the tables `conda-pypi-map` and `pypi-exclude-newer`.

    The first table has our packages whose names differ from those on PyPI. The second table has our
    packages that are on PyPI, and FOR_CUDA.

    Args:
        text: A page or a manifest.
        names: The name on PyPI of each of our packages; None if the package is not on PyPI.
    """
    renamed = []
    hidden = set(FOR_CUDA)
    for package, name in sorted(names.items()):
        if not name:
            continue
        hidden.add(name)
        if package != name:
            renamed.append(f'{_toml_key(package)} = "{name}"')
    mapping = (
        'mapping-mode = "replace"\n'
        f"mapping = {{ {', '.join(renamed)} }}\n"
        "same-name-heuristic = true\n"
    )
    dates = ""
    for name in sorted(hidden):
        dates += f'{_toml_key(name)} = "{BEFORE_PYPI}"\n'
    text = _replace_table(text, "conda-pypi-map", mapping)
    return _replace_table(text, "pypi-exclude-newer", dates)


def _replace_table(text: str, name: str, lines: str) -> str:
    """Replace the lines of each TOML table whose heading contains `name`."""
    pattern = TABLE.format(name)
    return re.sub(pattern, lambda table: table[1] + lines, text)


def _toml_key(name: str) -> str:
    """Return a name as a TOML key. It is quoted if it has a dot, which would separate two keys."""
    if "." in name:
        return f'"{name}"'
    return name


def compose(manifests: Mapping[str, str]) -> str:
    """Return a manifest that combines stacks, each as a feature with an environment.

    Args:
        manifests: The text of each stack's manifest, by name.

    Raises:
        ForgeError: A stack lacks the tables of its feature.
    """
    first = next(iter(manifests))
    tables = []
    for name, text in manifests.items():
        feature = [block for block in text.split("\n\n") if _has_heading(block, f"feature.{name}.")]
        if not feature:
            raise ForgeError(f"stacks/{name}/pixi.toml has no table [feature.{name}.*]")
        tables += feature
    environments = _format_environments(manifests)
    return "\n\n".join([*_compose_head(manifests[first], manifests), *tables, environments]) + "\n"


def _compose_head(manifest: str, names: Iterable[str]) -> list[str]:
    """Return the workspace table and the tables of names on PyPI, with a comment above them.

    Args:
        manifest: The text of the first stack's manifest, which has these tables.
        names: The names of all stacks, for the comment.
    """
    stacks = list(names)
    head = []
    for block in manifest.split("\n\n"):
        if _has_heading(block, "workspace") or _has_heading(block, "pypi-"):
            head.append(block)
    comment = (
        f"# The stacks {', '.join(stacks)} in one workspace, an environment for each: copy\n"
        "# this file as pixi.toml. `./forge generate` writes it from the stacks' own manifests.\n"
    )
    _, workspace = head[0].split("[workspace]\n")
    # The composed workspace does not have the platform of the environment `emulated`.
    workspace = re.sub(r'\n    "linux-64",[^\n]*', "", workspace)
    workspace = workspace.replace(f'name = "{stacks[0]}"', 'name = "several"')
    head[0] = f"{comment}[workspace]\n{workspace}"
    return head


def _format_environments(names: Iterable[str]) -> str:
    """Return the table of environments. The first stack's environment is `default`."""
    first, *others = names
    lines = ["[environments]", f'default = ["{first}"]']
    for name in others:
        lines.append(f'{name} = ["{name}"]')
    return "\n".join(lines)


def _has_heading(block: str, beginning: str) -> bool:
    """Return whether a block of TOML has a table whose name starts with `beginning`."""
    return re.search(rf"(?m)^\[{re.escape(beginning)}", block) is not None
