# SPDX-License-Identifier: BSD-3-Clause
"""The choice of a base, with and without an answer from conda-forge, and the Pythons of a base."""

from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject
from support.static_channel import Source
from typer.testing import CliRunner

from forge import bases
from forge.bases import BaseName
from forge.cli.context import Context
from forge.cli.main import app
from forge.conda.local import HOST_BOUND
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import RecipeSet

PROJECT = Project.at(CHECKOUT)


@pytest.mark.parametrize(
    ("error", "name", "reason"),
    [("", "conda-forge", "the server answers"), ("busy", "host", "does not answer: busy")],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, error: str, name: str, reason: str) -> None:
    def find_outage(url: str, _: int) -> str:
        assert url.startswith(bases.CONDA_FORGE)
        return error

    monkeypatch.setattr(bases.network, "find_outage", find_outage)
    base_name, line = bases.choose(BaseName.AUTO)
    assert base_name == name
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize(("host_bound", "name"), [(True, "host"), (False, "conda-forge")])
def test_a_channel_stays_on_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bound: bool, name: str
) -> None:
    """The driver uses the base of a channel's packages, whether or not conda-forge answers.

    If the user names a base, that base is used instead.
    """
    outage = "no" if name != "host" else ""
    monkeypatch.setattr(bases.network, "find_outage", lambda *_: outage)
    monkeypatch.delenv("FORGE_BASE", raising=False)
    project = MiniProject(tmp_path)
    source = Source(project.channel)
    forge = Context(root=tmp_path)
    assert forge.channel.is_host_bound() is None
    assert forge.base.name != name
    tag = HOST_BOUND if host_bound else ""
    source.make("alpha", build=f"{tag}h1234567_0")
    forge = Context(root=tmp_path)
    assert forge.base.name == name
    other_base = BaseName.CONDA_FORGE if host_bound else BaseName.HOST
    assert Context(other_base, root=tmp_path).base.name == other_base


def test_a_named_base_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases.network, "find_outage", None)
    assert bases.choose(BaseName.CONDA_FORGE)[0] == "conda-forge"


def test_bases_differ_in_channel_and_variants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mirror in the configuration of this machine would change the channel's URL.
    monkeypatch.setattr(bases.network, "_read_mirrors", dict)
    conda_forge = bases.load(PROJECT, "conda-forge")
    host = bases.load(PROJECT, "host")
    assert conda_forge.channel_url == "https://conda.anaconda.org/conda-forge"
    assert host.channel_url.startswith("file://")
    shared = {"pytorch", "triton", "amd_aiter_min", "python", "c_compiler", "c_stdlib"}
    for base in (conda_forge, host):
        assert shared <= set(base.variants.keys())
    assert conda_forge.variants["pytorch"] == host.variants["pytorch"]


@pytest.mark.parametrize(
    ("values", "pythons", "oldest"),
    [
        (["3.13"], ["3.13.* *_cp313"], "3.13"),
        (["3.13", "3.12"], ["3.13.* *_cp313", "3.12.* *_cpython"], "3.12"),
        (["3.14", "3.11"], ["3.14.*", "3.11.*"], "3.11"),
        (["3.14.2"], ["3.14.2"], "3.14.2"),
        (["3.14.* *_cp314", "3.9.* *_cpython"], ["3.14.* *_cp314", "3.9.* *_cpython"], "3.9"),
    ],
)
def test_a_python_by_its_number(values: list[str], pythons: list[str], oldest: str) -> None:
    """A number such as 3.13 is expanded to a spec.

    python_min is the oldest Python of the base, unless the user sets it.
    """
    base = bases.load(PROJECT, "conda-forge", {"python": values})
    assert base.overrides["python"] == pythons == base.variants["python"]
    assert base.variants["python_min"] == [oldest]
    with_minimum = bases.load(PROJECT, "conda-forge", {"python": values, "python_min": ["3.11"]})
    assert with_minimum.variants["python_min"] == ["3.11"]


def test_a_python_that_cannot_be_had() -> None:
    with pytest.raises(ForgeError, match="--variant python: Exceeds the limit"):
        bases.load(PROJECT, "conda-forge", {"python": ["9" * 5000]})
    with pytest.raises(ForgeError, match="--variant python: Invalid version: 'new'; write"):
        bases.load(PROJECT, "conda-forge", {"python": ["new"]})
    with pytest.raises(ForgeError, match="Python that runs.*FORGE_NO_PIXI=1.*FORGE_PYTHON"):
        bases.load(PROJECT, "host", {"python": ["3.13"]})


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
    """The help of each option that takes a channel states the default channel."""
    for arguments in ([], ["lock"]):
        shown = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"}).output
        assert "(default: channel/)" in shown
