# SPDX-License-Identifier: BSD-3-Clause
"""Choosing a base: what answers, what does not, and what is said about it."""

from __future__ import annotations

import contextlib
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request

import pytest
from support.project import CHECKOUT, MiniProject
from typer.testing import CliRunner

from forge import bases
from forge.bases import BaseName
from forge.cli.context import Context
from forge.cli.main import app
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import RecipeSet


@pytest.mark.parametrize(
    ("error", "name", "why"),
    [
        (None, "conda-forge", "its repodata answers"),
        (HTTPError("", 503, "busy", Message(), None), "host", "does not answer: busy"),
        (URLError("refused"), "host", "does not answer: refused"),
    ],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, error: OSError | None, name: str, why: str) -> None:
    def answer(request: Request, timeout: float) -> contextlib.nullcontext[None]:
        assert request.full_url.startswith(bases.CONDA_FORGE) and request.method == "HEAD"
        if error:
            raise error
        return contextlib.nullcontext()

    monkeypatch.setattr(bases.urllib.request, "urlopen", answer)
    chosen, line = bases.choose(BaseName.AUTO)
    assert chosen == name and why in line and "\n" not in line


def test_the_former_name_of_the_host_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert BaseName("embedded") is BaseName.HOST
    said = capsys.readouterr()
    assert "called host now" in said.err and said.err.count("\n") == 1 and not said.out
    with pytest.raises(ForgeError, match="other"):
        BaseName("other")


def test_a_named_base_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases.urllib.request, "urlopen", None)
    assert bases.choose(BaseName.CONDA_FORGE)[0] == "conda-forge"


def test_bases_differ_in_channel_and_variants_only() -> None:
    project = Project.at(CHECKOUT)
    ours, host = (bases.load(project, name) for name in ("conda-forge", "host"))
    assert ours.channel == "https://conda.anaconda.org/conda-forge"
    assert host.channel.startswith("file://")
    shared = {"pytorch", "triton", "amd_aiter_min", "python", "c_compiler", "c_stdlib"}
    for base in (ours, host):
        assert shared <= set(base.variants.keys())
    assert ours.variants["pytorch"] == host.variants["pytorch"]


@pytest.mark.parametrize("place", ["before", "after", "joined"])
def test_base_option_may_stand_anywhere(tmp_path: Path, place: str) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    arguments = {
        "before": ["--base", "conda-forge", "plan"],
        "after": ["plan", "--base", "conda-forge"],
        "joined": ["plan", "--base=conda-forge"],
    }[place]
    done = project.forge(*arguments)
    assert "base: conda-forge" in done.stderr and "hostbound" not in done.stdout


def test_what_the_base_provides_is_not_an_unknown_name(tmp_path: Path) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    project.recipe("beta")
    base = bases.load(Project.at(project.root), BaseName.CONDA_FORGE)
    recipes = RecipeSet(Project.at(project.root), base, {"beta"})
    with pytest.raises(ForgeError, match="beta is not built here: provided by the base"):
        Context().select(["alpha", "beta"], recipes)
    with pytest.raises(ForgeError, match="no recipe gamma; there are: alpha"):
        Context().select(["gamma"], recipes)


def test_help_names_the_defaults() -> None:
    """Rich takes words in brackets for markup and drops them."""
    for arguments in ([], ["lock"]):
        shown = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"}).output
        assert "if not" in shown and "channel/" in shown
