# SPDX-License-Identifier: BSD-3-Clause
"""The commands that check this repository: test, lint, patches."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer
from typer import Argument, Option

from forge.build.display import Display
from forge.cli.context import Context, command, err, out
from forge.upkeep import patches

app = typer.Typer()
patches_app = typer.Typer(help="The patches that recipes name.", no_args_is_help=True)
app.add_typer(patches_app, name="patches")

Words = Annotated[list[str] | None, Argument(metavar="ARGS...")]
Strict = Annotated[bool, Option("--strict", help="Exit 3 for an unreachable source.")]
# a file's tests share a worker, because they share what their fixtures made
PARALLEL = ["-n", "auto", "--dist", "loadgroup", "--no-loadscope-reorder"]
LINTERS = {
    "ruff format": ["ruff", "format", "--check", "."],
    "ruff check": ["ruff", "check", "."],
    "mypy": ["mypy"],
    # without the programs that it would call where they are installed: the same findings everywhere
    "actionlint": ["actionlint", "-shellcheck=", "-pyflakes="],
    "zizmor": ["zizmor", "--offline", "--no-progress", "--persona", "pedantic", ".github"],
}


@command(app, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def test(forge: Context, words: Words = None) -> None:
    """Run the tests of this repository; ARGS go to pytest."""
    tests = [sys.executable, "-m", "pytest", *PARALLEL, *(words or [])]
    raise typer.Exit(subprocess.run(tests, cwd=forge.project.root, check=False).returncode)


@command(app)
def lint(forge: Context) -> None:
    """Lint code, types, workflows and patches. Exit 1 for findings, 3 for a missing linter."""
    results = {}
    for name, words in LINTERS.items():
        out.print(f"{name}:")
        try:
            done = subprocess.run(words, cwd=forge.project.root, check=False)
            results[name] = "findings" if done.returncode else "clean"
        except FileNotFoundError:
            results[name] = f"not run: {words[0]} is not installed"
    results["patches"] = "findings" if lint_patches(forge) else "clean"
    for name, result in results.items():
        out.print(f"{name}: {result}")
    states = set(results.values())
    raise typer.Exit(1 if "findings" in states else 3 if states != {"clean"} else 0)


def lint_patches(forge: Context) -> int:
    """Print the findings on every patch; returns their number."""
    findings = patches.lint(forge.project, forge.all_recipes.recipes)
    for finding in findings:
        err.print(finding)
    out.print(f"{len(patches.all_patches(forge.project))} patches, {len(findings)} findings")
    return len(findings)


@command(patches_app, "lint")
def patches_lint(forge: Context) -> None:
    """Check the form, trailers and numbers of every patch, and that one recipe names it."""
    raise typer.Exit(1 if lint_patches(forge) else 0)


@command(patches_app)
def check(forge: Context, strict: Strict = False) -> None:
    """Apply every patch to its source, without fuzz. Unfetchable sources are reported."""
    states = set()
    with Display(out) as display:
        for result in patches.check(forge.project, forge.all_recipes.recipes, display.download):
            states.add(result.state)
            detail = f": {result.detail}" if result.detail else ""
            display.say(f"{result.package}: {result.count} patches: {result.state}{detail}")
    raise typer.Exit(1 if "fails" in states else 3 if strict and "not attempted" in states else 0)
