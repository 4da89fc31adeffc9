# SPDX-License-Identifier: BSD-3-Clause
"""Choosing a base: what answers, what does not, and what is said about it."""

from __future__ import annotations

import http.server
import threading

import pytest
from support.project import CHECKOUT, MiniProject
from typer.testing import CliRunner

from forge import bases
from forge.bases import BaseName
from forge.cli import main
from forge.cli.context import Context
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import RecipeSet


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers HEAD with the server's `status`."""

    def do_HEAD(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "name", "why"),
    [(200, "conda-forge", "its repodata answers"), (503, "host", "does not answer")],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, status: int, name: str, why: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.status = status
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/conda-forge"
        monkeypatch.setattr(bases, "CONDA_FORGE", url)
        found, line = bases.choose(BaseName.AUTO)
        server.shutdown()
        thread.join()
    assert found == name and why in line and "\n" not in line


def test_auto_with_nothing_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "CONDA_FORGE", "http://127.0.0.1:9/conda-forge")
    name, line = bases.choose(BaseName.AUTO)
    assert name == "host" and "refused" in line


def test_asked_for_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_base_option_may_stand_anywhere(project: MiniProject, place: str) -> None:
    project.recipe("alpha")
    arguments = {
        "before": ["--base", "conda-forge", "plan"],
        "after": ["plan", "--base", "conda-forge"],
        "joined": ["plan", "--base=conda-forge"],
    }[place]
    done = project.forge(*arguments)
    assert "base: conda-forge" in done.stderr and "hostbound" not in done.stdout


def test_what_the_base_has_is_no_unknown_name(project: MiniProject) -> None:
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
        shown = CliRunner().invoke(main.app, [*arguments, "--help"], env={"COLUMNS": "200"}).output
        assert "if not" in shown and "channel/" in shown
