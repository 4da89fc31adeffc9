# SPDX-License-Identifier: BSD-3-Clause
"""Generate text in pages and manifests from the one place where each fact stands.

- The state, cost and notes of packages, and their names on PyPI, stand in `extra` of each recipe.
  pixi reads no list of names from another file, so every manifest that users copy repeats them.
- stacks/several.toml repeats the tables of three stacks for the same reason.
- docs/kernels.md sums up recipes/*/kernels.tsv, which says what packaged kernels cost.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge import bases
from forge.bases import BaseName
from forge.conda import pypi
from forge.errors import ForgeError
from forge.files import read_text
from forge.hostbase.base import HostBase
from forge.project import Project
from forge.recipes import kernel_tables, package_tables
from forge.recipes.cost import read_costs
from forge.recipes.plan import RecipeSet

PAGES = ("README.md", "docs/*.md", "stacks/*/pixi.toml")
STATE_PAGE = "README.md"
COST_PAGE = "docs/build.md"
SECTIONS_PAGE = "docs/packages.md"
# Packages on PyPI that require a wheel for CUDA, and that no recipe of ours replaces.
FOR_CUDA = ("unsloth", "xformers")
BEFORE_PYPI = "1970-01-01"
# The heading of a table, and its lines up to an empty one, the next table or the end of a block.
TABLE = r"(?m)^(\[[^\n]*\b{}[^\n]*\][^\n]*\n)(?:[^\n\[`][^\n]*\n)*"
SEVERAL = "stacks/several.toml"
TOGETHER = ("attention", "vllm", "finetune")


def outdated(project: Project) -> Iterator[tuple[Path, str]]:
    """Yield each file that differs from what is generated, with its new text.

    Raises ForgeError if a source cannot be read.
    """
    names = pypi.read_names(project.recipes)
    pages = {
        path: read_text(path) for pattern in PAGES for path in sorted(project.root.glob(pattern))
    }
    texts = {path: insert_names(text, names) for path, text in pages.items()}
    insert_tables(texts, project)
    for path, text in texts.items():
        if text != pages[path]:
            yield path, text
    manifests = {name: project.root / f"stacks/{name}/pixi.toml" for name in TOGETHER}
    if not all(path in texts for path in manifests.values()):
        return  # another project, with other stacks
    several = project.root / SEVERAL
    text = compose({name: texts[path] for name, path in manifests.items()})
    if not several.exists() or read_text(several) != text:
        yield several, text


def insert_tables(texts: dict[Path, str], project: Project) -> None:
    """Replace the tables about packages and their kernels, in the pages that are there."""
    root = project.root
    kernels_page = root / kernel_tables.PAGE
    if kernels_page in texts:
        lists = sorted(project.recipes.glob("*/kernels.tsv"))
        texts[kernels_page] = kernel_tables.with_tables(texts[kernels_page], lists)
    if root / SECTIONS_PAGE not in texts:
        return  # another project, without pages about its packages
    base = bases.load(project, BaseName.CONDA_FORGE)
    recipes = RecipeSet(project, base).recipes
    costs = {"host base": HostBase(project, base).cost, **read_costs(recipes.values(), base)}
    state, cost, sections = (root / page for page in (STATE_PAGE, COST_PAGE, SECTIONS_PAGE))
    texts[state] = package_tables.replace_table(
        texts[state],
        package_tables.STATE_HEAD,
        package_tables.make_state_table(recipes),
        STATE_PAGE,
    )
    texts[cost] = package_tables.replace_table(
        texts[cost],
        package_tables.COST_HEAD,
        package_tables.make_cost_table(costs),
        COST_PAGE,
    )
    texts[sections] = package_tables.replace_sections(
        texts[sections],
        package_tables.make_sections(recipes),
        SECTIONS_PAGE,
    )


def insert_names(text: str, names: pypi.Names) -> str:
    """Return the text with our names in each of pixi's two tables of names on PyPI."""
    provided = {conda: name for conda, name in sorted(names.items()) if name}
    renamed = [f'{_key(conda)} = "{name}"' for conda, name in provided.items() if conda != name]
    mapping = (
        'mapping-mode = "replace"\n'
        f"mapping = {{ {', '.join(renamed)} }}\n"
        "same-name-heuristic = true\n"
    )
    hidden = sorted({*provided.values(), *FOR_CUDA})
    dates = "".join(f'{_key(name)} = "{BEFORE_PYPI}"\n' for name in hidden)
    text = re.sub(TABLE.format("conda-pypi-map"), lambda table: table[1] + mapping, text)
    return re.sub(TABLE.format("pypi-exclude-newer"), lambda table: table[1] + dates, text)


def _key(name: str) -> str:
    """Return a name as a key of TOML, where a bare dot starts another table."""
    return f'"{name}"' if "." in name else name


def compose(manifests: Mapping[str, str]) -> str:
    """Return a workspace with the feature of each stack, by the text of the stacks' manifests.

    Raises ForgeError for a stack whose tables are not those of a feature.
    """
    blocks = {name: text.split("\n\n") for name, text in manifests.items()}
    first, *others = manifests
    head = [block for block in blocks[first] if re.search(r"(?m)^\[(workspace|pypi-)", block)]
    _, workspace = head[0].split("[workspace]\n")
    comment = (
        f"# The stacks {', '.join(manifests)} in one workspace, an environment for each: copy\n"
        "# this file as pixi.toml. `./forge generate` writes it from the stacks' own manifests.\n"
    )
    name_line = f'name = "{first}"'
    workspace = re.sub(r'\n    "linux-64",[^\n]*', "", workspace)  # it has no `emulated`
    head[0] = comment + "[workspace]\n" + workspace.replace(name_line, 'name = "several"')
    tables = []
    for name, parts in blocks.items():
        own = [part for part in parts if re.search(rf"(?m)^\[feature\.{name}\.", part)]
        if not own:
            raise ForgeError(f"stacks/{name}/pixi.toml has no [feature.{name}.dependencies]")
        tables += own
    environments = [f'default = ["{first}"]', *(f'{name} = ["{name}"]' for name in others)]
    last = "\n".join(["[environments]", *environments])
    return "\n\n".join([*head, *tables, last]) + "\n"
