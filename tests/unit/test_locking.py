# SPDX-License-Identifier: BSD-3-Clause
"""What of a stack does not solve is named, and costs no other environment its lock."""

import shutil
from pathlib import Path

import pytest
from support import small_channel
from support.project import MiniProject
from support.small_channel import workspace
from typer.testing import CliRunner

from forge.cli.main import app
from forge.envs import lockfile
from forge.envs.workspace import LockedInPart, Workspace
from forge.errors import Failed

MORE = """
[feature.more.dependencies]
gamma = ">=2"

[environments]
more = ["more"]
"""


def locked(chosen: Workspace) -> dict[str, list[str]]:
    return {
        name: sorted(f"{r.name.normalized} {r.version}" for r in lockfile.records(environment))
        for name, environment in lockfile.read(chosen.lock_file).items()
    }


def test_an_environment_that_does_not_solve_costs_no_other(tmp_path: Path) -> None:
    """The requirement is named, with the newest version that there is."""
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta", "gamma")
    chosen = workspace(tmp_path / "app", channel.as_uri(), MORE)
    with pytest.raises(LockedInPart) as raised:
        chosen.lock()
    reason = f"{channel.as_uri()} has no gamma >=2 (the newest is 1.0)"
    where = f"{tmp_path}/app/pixi.toml: environment more does not solve"
    assert str(raised.value) == f"{where}: {reason}" and raised.value.exit_code == 1
    assert locked(chosen) == {"default": ["alpha 1.0", "beta 1.0"]}


def test_what_an_older_lock_has_of_it_stays(tmp_path: Path) -> None:
    """Of the environment that does not solve now; the others are solved anew."""
    served = small_channel.make(tmp_path / "www" / "channel", "alpha", "beta", "gamma")
    text = MORE.replace(">=2", ">=1")
    chosen = workspace(tmp_path / "app", served.as_uri(), text)
    chosen.lock()
    older = locked(chosen)
    assert older["more"] == ["alpha 1.0", "beta 1.0", "gamma 1.0"]
    shutil.rmtree(served)
    small_channel.make(served, "alpha", "beta", version="1.1")
    with pytest.raises(LockedInPart, match="has no gamma >=1$"):
        workspace(tmp_path / "app", served.as_uri(), text).lock()
    assert locked(chosen) == {"default": ["alpha 1.1", "beta 1.1"], "more": older["more"]}


def test_a_conflict_is_named_by_the_requirement_that_brings_it(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta")
    small_channel.make(channel, "gamma", version="2.0", depends=["alpha <1"])
    chosen = workspace(tmp_path / "app", channel.as_uri(), MORE)
    with pytest.raises(LockedInPart, match="more does not solve: (gamma|alpha|beta)") as raised:
        chosen.lock()
    assert "cannot be installed beside the rest" in str(raised.value)
    assert "alpha <1" in str(raised.value) and "\n" not in str(raised.value)


def test_where_nothing_solves_an_older_lock_stays(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta")
    chosen = workspace(tmp_path / "app", channel.as_uri())
    chosen.lock()
    older = chosen.lock_file.read_bytes()
    chosen = workspace(tmp_path / "app", channel.as_uri(), 'nowhere = "*"\n')
    with pytest.raises(Failed, match="default does not solve: .* has no nowhere") as raised:
        chosen.lock()
    assert not isinstance(raised.value, LockedInPart)
    assert chosen.lock_file.read_bytes() == older


@pytest.mark.parametrize("words", [[], ["attention", "broken", "other"]])
def test_locking_goes_on_with_the_other_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    channel = small_channel.make(tmp_path / "www" / "channel", "alpha")
    theirs = small_channel.make(tmp_path / "www" / "theirs", "delta")
    mini = MiniProject(tmp_path / "project")
    mini.recipe("alpha")
    for name, package in {"attention": "alpha", "broken": "beta", "other": "delta"}.items():
        mini.stack(name, package)
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    monkeypatch.setenv("FORGE_NO_PIXI", "1")
    monkeypatch.setattr("forge.cli.stacks.CONDA_FORGE", theirs.as_uri())
    options = ["--base", "conda-forge", "--channel", channel.as_uri()]
    done = CliRunner().invoke(app, ["lock", *words, *options])
    assert done.exit_code == 1, done.output
    assert "failed: broken: " in done.output and "has no beta" in done.output
    stacks = mini.root / "build" / "stacks"
    assert [p.parent.name for p in sorted(stacks.glob("*/pixi.lock"))] == ["attention", "other"]
