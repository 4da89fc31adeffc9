# SPDX-License-Identifier: BSD-3-Clause
"""Text in pages and manifests that repeats a fact from another file, and is generated from it.

Manifests that users copy name our packages on PyPI (recipes/pypi-names.json): pixi reads no such
list from another file. stacks/several.toml repeats the tables of three stacks for the same reason.
docs/kernels.md sums up what packaged kernels cost.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge.conda import pypi
from forge.errors import ForgeError
from forge.files import read_text
from forge.project import Project
from forge.recipes import kernel_tables

PAGES = ("README.md", "docs/*.md", "stacks/*/pixi.toml")
# PyPI's packages that require a wheel for CUDA, and that none of ours replaces.
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
    listed = project.names.read_bytes() if project.names.exists() else None
    names = pypi.parse(listed, project.names)
    texts: dict[Path, str] = {}
    for pattern in PAGES:
        for path in sorted(project.root.glob(pattern)):
            text = read_text(path)
            texts[path] = with_names(text, names)
            if path == project.root / kernel_tables.PAGE:
                lists = sorted(project.root.glob("recipes/*/kernels.tsv"))
                texts[path] = kernel_tables.with_tables(texts[path], lists)
            if texts[path] != text:
                yield path, texts[path]
    paths = {name: project.root / f"stacks/{name}/pixi.toml" for name in TOGETHER}
    if not all(path in texts for path in paths.values()):
        return  # a project of its own, with other stacks
    several = project.root / SEVERAL
    text = compose({name: texts[path] for name, path in paths.items()})
    if not several.exists() or read_text(several) != text:
        yield several, text


def with_names(text: str, names: pypi.Names) -> str:
    """Return the text with the names of `names` in each of pixi's two tables of PyPI's names."""
    provided = sorted((conda, name) for conda, name in names.items() if name)
    renamed = [f'{_key(conda)} = "{name}"' for conda, name in provided if conda != name]
    mapping = (
        'mapping-mode = "replace"\n'
        f"mapping = {{ {', '.join(renamed)} }}\n"
        "same-name-heuristic = true\n"
    )
    hidden = sorted({*(name for _, name in provided), *FOR_CUDA})
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
