#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of a published channel, index.html: `python tools/channel_page.py FOLDER`.

`forge publish` runs it. All of the page comes from the channel's own index and list of withdrawn
packages, from recipes/, stacks/ and docs/evidence/. It is one file without a script.
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
WORDS = {
    "emulated": "executed under emulation",
    "interpreted": "run in Triton's interpreter", "loads": "loads",
}  # fmt: skip
SHORT = {"size", "GPU", "Python", "date"}
NOT_RUN = "not run on gfx1151"


class Newest(Version):
    """A version of conda's, the newest of which sorts first."""

    def __lt__(self, other: Version) -> bool:
        return super().__gt__(other)


def size(count: int) -> str:
    """Write a number of bytes as people read it."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Make a table; cells are HTML already, those of columns in SHORT are never broken."""
    labels = list(head)
    first = "".join(f"<th>{escape(label)}</th>" for label in labels)
    rest = ""
    for row in rows:
        cells = (
            f'<td data-label="{escape(label)}"{" class=short" * (label in SHORT)}>{cell}</td>'
            for label, cell in zip(labels, row, strict=True)
        )
        rest += f"<tr>{''.join(cells)}</tr>\n"
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead>\n{rest}</table></div>'


def recipes() -> dict[str, str]:
    """The recipe of each output, by the names in recipe.yaml."""
    found = {}
    for path in sorted(ROOT.glob("recipes/*/recipe.yaml")):
        for name in re.findall(r"^\s+name: ([\w.-]+)$", path.read_text(), re.M):
            found.setdefault(name, path.parent.name)
        found[path.parent.name] = path.parent.name
    return found


def proven(record: dict[str, Any]) -> str:
    """What was done with this file, and what its recipe states that other builds did; lines."""
    recipe = ROOT / "recipes" / recipes().get(record["name"], "") / "recipe.yaml"
    claim = "no"
    if recipe.is_file():
        claim = yaml.safe_load(recipe.read_text())["extra"]["state"]["ran"]
    word, *pages = [claim] if isinstance(claim, str) else claim
    pages = [page.partition("#")[0].removesuffix(".md") for page in pages]
    shown = "".join(f" <small>{escape(page)}</small>" for page in pages)
    # publish takes no package whose tests did not pass
    lines = ["built by its recipe, tests passed", ran_on_gpu(record["sha256"])]
    if word != "no":
        lines.append(f"other builds: {escape(WORDS[word])}{shown}")
    return "<br>".join(lines)


def ran_on_gpu(sha256: str) -> str:
    """Name the runs on gfx1151 that had this very file installed, and what their checks said."""
    found = []
    for path in sorted((ROOT / "docs/evidence").glob("*.json")):
        run = json.loads(path.read_text())
        hashes = {package["sha256"] for package in run.get("packages", ())}
        if run.get("subject") == "packages" and sha256 in hashes:
            counts = ", ".join(f"{run['summary'][key]} {key}" for key in ("passed", "failed"))
            text = f"checked on gfx1151: {counts}"
            found.append(f"{escape(text)} <small>{escape(path.stem)}</small>")
    return "<br>".join(found) or NOT_RUN


def python_of(record: dict[str, Any]) -> str:
    """Name the Python that a record's build is for."""
    match = re.search(r"py(\d)(\d+)", record["build"])
    if match:
        return f"{match[1]}.{match[2]}"
    return "any" if any(d.split()[0] == "python" for d in record["depends"]) else "none"


def gpu_of(record: dict[str, Any]) -> str:
    """Name the GPU that a record states: in its name, build string or constraint."""
    names = re.findall(r"gfx[0-9a-f]{3,4}(?![0-9a-z])", f"{record['name']} {record['build']}")
    for spec in record.get("constrains", []):
        if match := re.fullmatch(r"__amdgpu_arch ==(\d+)\.(\d+)\.(\w+)", spec):
            names.append(f"gfx{match[1]}{match[2]}{match[3]}")
    return names[0] if names else "not bound"


def age(record: dict[str, Any]) -> tuple[Any, ...]:
    """Sort newest versions first, then builds by number and date."""
    return Newest(record["version"]), -record["build_number"], -record.get("timestamp", 0)


class Published:
    """What a channel folder says of itself: its records by SUBDIR/FILE, and what was withdrawn."""

    def __init__(self, folder: Path) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*/repodata.json")):
            packages = json.loads(path.read_text())["packages.conda"]
            self.records |= {f"{path.parent.name}/{file}": r for file, r in packages.items()}
        self.withdrawn = json.loads((folder / "withdrawn.json").read_text())["withdrawn"]

    def newest(self) -> dict[str, dict[str, Any]]:
        """By name, the record of the newest version."""
        order = sorted(self.records.values(), key=age, reverse=True)
        return {record["name"]: record for record in order}


def dependencies(manifest: Path) -> dict[str, Any]:
    """What the feature of a stack requires."""
    feature = tomllib.loads(manifest.read_text())["feature"][manifest.parent.name]
    return feature["dependencies"]


def stacks(published: Published) -> Iterator[list[str]]:
    """Yield a row for each stack: what of it is here."""
    newest = published.newest()
    for path in sorted(ROOT.glob("stacks/*/pixi.toml")):
        wanted = sorted({*dependencies(path)} & {*recipes()})
        here = ", ".join(escape(f"{n} {newest[n]['version']}") for n in wanted if n in newest)
        missing = ", ".join(escape(n) for n in wanted if n not in newest)
        yield [f"<b>{path.parent.name}</b>", here or "nothing", missing or "nothing"]


def packages(published: Published) -> Iterator[list[str]]:
    """Yield a row for each file, newest builds of a name first."""
    by_name = sorted(
        published.records.items(),
        key=lambda item: (item[1]["name"], *age(item[1]), item[0]),
    )
    for file, record in by_name:
        title = f'<a href="{escape(file)}">{escape(record["name"])}</a>'
        build = f"{escape(record['version'])}<br><small>{escape(record['build'])}</small>"
        yield [title, build, size(record["size"]), gpu_of(record), python_of(record),
               proven(record)]  # fmt: skip


def withdrawals(published: Published) -> Iterator[list[str]]:
    """Yield a row for each withdrawn package, newest first."""
    for entry in reversed(published.withdrawn):
        yield [escape(str(entry[key])) for key in ("file", "date", "reason")]


def install(published: Published, manifest: Path) -> str:
    """The commands that install what a stack needs of this channel, or else all of it."""
    here = published.newest()
    names = [name for name in dependencies(manifest) if name in here] or sorted(here)
    ours, *_ = tomllib.loads(manifest.read_text())["workspace"]["channels"]
    init = f"pixi init mine --channel {ours} --channel conda-forge"
    return escape(f"{init}\ncd mine\npixi add {' '.join(names)}") if names else "nothing is here"


def page(folder: Path) -> str:
    """Make the page of the channel in `folder`."""
    published = Published(folder)
    stack = ROOT / "stacks/attention/pixi.toml"
    total = size(sum(record["size"] for record in published.records.values()))
    runs = {ran_on_gpu(record["sha256"]) for record in published.records.values()}
    warning = "<p><b>Untested: no package of this channel has run on a gfx1151 GPU.</b></p>"
    parts = [
        "<h1>strix-forge</h1>",
        f"<p>Conda packages for AMD Strix Halo (gfx1151). {len(published.records)} packages, "
        f"{total}.</p>",
        *([warning] if runs <= {NOT_RUN} else []),
        f"<h2>Install</h2><pre>{install(published, stack)}</pre>"
        "<p>On another server, the folder of this page is the channel's address.</p>",
        "<h2>Stacks</h2>",
        table(["stack", "here", "missing"], stacks(published)),
        "<h2>Packages</h2>",
        table(
            ["package", "version", "size", "GPU", "Python", "proven by"],
            packages(published),
        ),
    ]
    if published.withdrawn:
        parts += [
            "<h2>Withdrawn</h2>",
            "<p>These packages are no longer here. A lock that names one fails to install it, "
            "unless it is in the package cache: run <code>pixi update</code>.</p>",
            table(["package", "date", "reason"], withdrawals(published)),
        ]
    generator = '<meta name="generator" content="strix-forge">'  # by which publish knows it
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    meta = f'<meta charset="utf-8">{generator}{viewport}'
    head = f"{meta}<title>strix-forge</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(
        [*parts, "</body></html>\n"]
    )


def main(folder: Path) -> None:
    """Write FOLDER/index.html by one rename; `forge clean` removes what a killed one left."""
    with FileLock(folder / ".lock", mode=0o644):
        partial = folder / ".index.html.partial"
        partial.write_text(page(folder), encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(folder / "index.html")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # the bindings have many
        sys.exit(
            f"tools/channel_page.py: no page of {sys.argv[1]}: {type(error).__name__}: {error}"
        )
