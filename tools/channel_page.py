#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of a published channel, index.html: `python tools/channel_page.py FOLDER`.

FOLDER is the channel's folder. `forge publish` runs this program. The page is made from the
channel's index and list of withdrawn packages, and from recipes/, stacks/ and docs/evidence/. It is
a single file without scripts.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from rattler import Version

ROOT = Path(__file__).resolve().parents[1]
STYLE = """
:root {
  color-scheme: light dark;
  --line: light-dark(#d0d4da, #3a4048); --soft: light-dark(#f3f5f7, #1d2126);
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem }
h1, h2 { line-height: 1.2 } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem }
th, td { border-bottom: 1px solid var(--line) }
td { overflow-wrap: break-word } td.short { white-space: nowrap }
a { color: light-dark(#0550ae, #7ab7ff) } small { opacity: .75; display: inline-block }
pre { background: var(--soft); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
.wide { overflow-x: auto }
@media (max-width: 60rem) {
  thead { display: none } td, td.short { display: block; border: 0; padding: .1rem 0 }
  td, td.short { overflow-wrap: anywhere; white-space: normal }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line) }
  td::before { content: attr(data-label) ": "; opacity: .6 }
  td:first-child { font-weight: bold } td:first-child::before { content: none }
}
""".strip()
# Columns whose cells are not wrapped on wide screens.
SHORT = {"size", "GPU", "Python", "date"}
# Descriptions of the words in a recipe's `extra.state.ran`.
RAN = {
    "emulated": "executed under emulation",
    "interpreted": "run in Triton's interpreter",
    "loads": "loads",
}
NOT_RUN = "not run on gfx1151"
UNITS = ["B", "KiB", "MiB", "GiB"]


class Newest(Version):
    """A conda version whose order is reversed, so that the newest comes first."""

    def __lt__(self, other: Version) -> bool:
        return super().__gt__(other)


def format_size(count: int) -> str:
    """Return a number of bytes in a unit that is easy to read, such as 1.5 GiB."""
    amount = float(count)
    unit, *larger_units = UNITS
    for larger_unit in larger_units:
        if amount < 1024:
            break
        amount /= 1024
        unit = larger_unit
    if unit == "B":
        return f"{amount:.0f} {unit}"
    return f"{amount:.1f} {unit}"


def make_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in HTML.

    Args:
        head: The labels of the columns.
        rows: The cells, which are HTML.
    """
    labels = [escape(label) for label in head]
    header = "".join(f"<th>{label}</th>" for label in labels)
    body = ""
    for row in rows:
        cells = ""
        for label, cell in zip(labels, row, strict=True):
            short = " class=short" if label in SHORT else ""
            cells += f'<td data-label="{label}"{short}>{cell}</td>'
        body += f"<tr>{cells}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead>\n{body}</table></div>'


def find_recipes() -> dict[str, str]:
    """Return the recipe of each output by the output's name, as found in each recipe.yaml."""
    recipes = {}
    for path in sorted(ROOT.glob("recipes/*/recipe.yaml")):
        recipe = path.parent.name
        for output in re.findall(r"^\s+name: ([\w.-]+)$", path.read_text(), re.M):
            recipes.setdefault(output, recipe)
        recipes[recipe] = recipe
    return recipes


def describe_proof(record: dict[str, Any]) -> str:
    """Return lines about the tests of a package file, and about other builds of its recipe."""
    lines = [
        # This holds for each package, because `publish` refuses a package without passed tests.
        "built by its recipe, tests passed",
        describe_gpu_runs(record["sha256"]),
    ]
    recipe = find_recipes().get(record["name"], "")
    path = ROOT / "recipes" / recipe / "recipe.yaml"
    if path.is_file():
        ran = yaml.safe_load(path.read_text())["extra"]["state"]["ran"]
        word, *pages = [ran] if isinstance(ran, str) else ran
        if word != "no":
            line = f"other builds: {escape(RAN[word])}"
            for page in pages:
                name = page.partition("#")[0].removesuffix(".md")
                line += f" <small>{escape(name)}</small>"
            lines.append(line)
    return "<br>".join(lines)


def describe_gpu_runs(sha256: str) -> str:
    """Return lines about the validation runs on gfx1151 with a file; NOT_RUN if there are none."""
    lines = []
    for path in sorted((ROOT / "docs/evidence").glob("*.json")):
        run = json.loads(path.read_text())
        if run.get("subject") != "packages":
            continue
        hashes = {package["sha256"] for package in run.get("packages", ())}
        if sha256 in hashes:
            summary = run["summary"]
            counts = f"{summary['passed']} passed, {summary['failed']} failed"
            text = escape(f"checked on gfx1151: {counts}")
            lines.append(f"{text} <small>{escape(path.stem)}</small>")
    if not lines:
        return NOT_RUN
    return "<br>".join(lines)


def find_python(record: dict[str, Any]) -> str:
    """Return the Python version that a package is for, `any`, or `none` if it needs no Python."""
    match = re.search(r"py(\d)(\d+)", record["build"])
    if match:
        return f"{match[1]}.{match[2]}"
    required = [spec.split()[0] for spec in record["depends"]]
    return "any" if "python" in required else "none"


def find_gpu(record: dict[str, Any]) -> str:
    """Return the GPU in a record's name, build string or constraints, or else `not bound`."""
    text = f"{record['name']} {record['build']}"
    named = re.search(r"gfx[0-9a-f]{3,4}(?![0-9a-z])", text)
    if named:
        return named[0]
    for spec in record.get("constrains", []):
        match = re.fullmatch(r"__amdgpu_arch ==(\d+)\.(\d+)\.(\w+)", spec)
        if match:
            return f"gfx{match[1]}{match[2]}{match[3]}"
    return "not bound"


def sort_key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key: the newest version, build number and date come first."""
    return (
        Newest(record["version"]),
        -record["build_number"],
        -record.get("timestamp", 0),
    )


class Published:
    """The contents of a channel, read from its index and its list of withdrawn packages.

    Attributes:
        records: The record of each package, by SUBDIR/FILE.
        withdrawn: The entries of the list of withdrawn packages, oldest first.
    """

    def __init__(self, folder: Path) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*/repodata.json")):
            subdir = path.parent.name
            repodata = json.loads(path.read_text())
            for file, record in repodata["packages.conda"].items():
                self.records[f"{subdir}/{file}"] = record
        self.withdrawn = json.loads((folder / "withdrawn.json").read_text())["withdrawn"]

    def find_newest(self) -> dict[str, dict[str, Any]]:
        """Return the record of the newest version of each package."""
        newest = {}
        for record in sorted(self.records.values(), key=sort_key):
            newest.setdefault(record["name"], record)
        return newest


def read_dependencies(manifest: Path) -> dict[str, Any]:
    """Return the dependencies of a stack's feature."""
    data = tomllib.loads(manifest.read_text())
    feature = data["feature"][manifest.parent.name]
    return feature["dependencies"]


def make_stack_rows(published: Published) -> Iterator[list[str]]:
    """Yield a row for each stack: which of our packages that it needs the channel has and lacks."""
    newest = published.find_newest()
    recipes = find_recipes()
    for path in sorted(ROOT.glob("stacks/*/pixi.toml")):
        present = []
        missing = []
        ours = recipes.keys() & read_dependencies(path).keys()
        for name in sorted(ours):
            if name in newest:
                present.append(escape(f"{name} {newest[name]['version']}"))
            else:
                missing.append(escape(name))
        yield [
            f"<b>{path.parent.name}</b>",
            ", ".join(present) or "nothing",
            ", ".join(missing) or "nothing",
        ]


def make_package_rows(published: Published) -> Iterator[list[str]]:
    """Yield a row for each package file, sorted by name, the newest builds first."""
    files = sorted(
        published.records,
        key=lambda file: _order(file, published.records[file]),
    )
    for file in files:
        record = published.records[file]
        name = escape(record["name"])
        version = escape(record["version"])
        build = escape(record["build"])
        yield [
            f'<a href="{escape(file)}">{name}</a>',
            f"{version}<br><small>{build}</small>",
            format_size(record["size"]),
            find_gpu(record),
            find_python(record),
            describe_proof(record),
        ]


def _order(file: str, record: dict[str, Any]) -> tuple[Any, ...]:
    return record["name"], *sort_key(record), file


def make_withdrawn_rows(published: Published) -> Iterator[list[str]]:
    """Yield a row for each withdrawn package, newest first."""
    for entry in reversed(published.withdrawn):
        yield [escape(str(entry[key])) for key in ("file", "date", "reason")]


def make_commands(published: Published, manifest: Path) -> str:
    """Return commands that install the packages of this channel that a stack needs.

    If the channel has none of them, the commands install all packages of the channel. If the
    channel is empty, return a text that says so. The manifest has its address.

    Args:
        published: The channel.
        manifest: The manifest of the stack.
    """
    newest = published.find_newest()
    names = [name for name in read_dependencies(manifest) if name in newest]
    if not names:
        names = sorted(newest)
    if not names:
        return "the channel is empty"
    workspace = tomllib.loads(manifest.read_text())["workspace"]
    our_channel = workspace["channels"][0]
    commands = [
        f"pixi init mine --channel {our_channel} --channel conda-forge",
        "cd mine",
        f"pixi add {' '.join(names)}",
    ]
    return escape("\n".join(commands))


def make_page(folder: Path) -> str:
    """Return the page of the channel in `folder`."""
    published = Published(folder)
    body = "\n".join([*make_body(published), "</body></html>\n"])
    # By this tag, `publish` recognizes that this program wrote the page.
    generator = '<meta name="generator" content="strix-forge">'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    meta = f'<meta charset="utf-8">{generator}{viewport}'
    head = f"{meta}<title>strix-forge</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}'


def make_body(published: Published) -> list[str]:
    """Return the parts of the page's body."""
    records = published.records.values()
    total = format_size(sum(record["size"] for record in records))
    parts = [
        "<h1>strix-forge</h1>",
        f"<p>Conda packages for AMD Strix Halo (gfx1151). {len(records)} packages, {total}.</p>",
    ]
    if all(describe_gpu_runs(record["sha256"]) == NOT_RUN for record in records):
        parts.append("<p><b>Untested: no package of this channel has run on a gfx1151 GPU.</b></p>")
    commands = make_commands(published, ROOT / "stacks/attention/pixi.toml")
    parts += [
        f"<h2>Install</h2><pre>{commands}</pre>"
        "<p>If you reach this page on another server, its folder is the channel's address.</p>",
        "<h2>Stacks</h2>",
        make_table(["stack", "here", "missing"], make_stack_rows(published)),
        "<h2>Packages</h2>",
        make_table(
            ["package", "version", "size", "GPU", "Python", "proven by"],
            make_package_rows(published),
        ),
    ]
    if published.withdrawn:
        parts += [
            "<h2>Withdrawn</h2>",
            "<p>These packages were removed from the channel. A lock that names one of them cannot "
            "be installed, unless the package is in the cache. Run <code>pixi update</code>.</p>",
            make_table(["package", "date", "reason"], make_withdrawn_rows(published)),
        ]
    return parts


def main(folder: Path) -> None:
    """Write FOLDER/index.html to a temporary file, and rename it.

    If the program is killed, `forge clean` removes the temporary file.
    """
    with FileLock(folder / ".lock", mode=0o644):
        partial = folder / ".index.html.partial"
        partial.write_text(make_page(folder), encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(folder / "index.html")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # py-rattler raises many types
        reason = f"{type(error).__name__}: {error}"
        sys.exit(f"tools/channel_page.py: no page of {sys.argv[1]}: {reason}")
