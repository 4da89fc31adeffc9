# SPDX-License-Identifier: BSD-3-Clause
"""If an environment of a stack cannot be solved, the reason is named and the others are locked."""

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


def read_locked(app: Workspace) -> dict[str, list[str]]:
    """Return the locked packages of each environment, each as `NAME VERSION`."""
    result = {}
    for name, environment in lockfile.read(app.lock_file).items():
        records = lockfile.records(environment)
        result[name] = sorted(f"{record.name.normalized} {record.version}" for record in records)
    return result


def test_an_environment_that_does_not_solve_costs_no_other(tmp_path: Path) -> None:
    """The error has the requirement and the newest version in the channel."""
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta", "gamma")
    stack = workspace(tmp_path / "app", channel.as_uri(), MORE)
    with pytest.raises(LockedInPart) as raised:
        stack.lock()
    reason = f"{channel.as_uri()} has no gamma >=2 (the newest is 1.0)"
    where = f"{tmp_path}/app/pixi.toml: environment more does not solve"
    assert str(raised.value) == f"{where}: {reason}" and raised.value.exit_code == 1
    assert read_locked(stack) == {"default": ["alpha 1.0", "beta 1.0"]}


def test_what_an_older_lock_has_of_it_stays(tmp_path: Path) -> None:
    """An environment that cannot be solved now keeps its older lock. Others are locked anew."""
    served = small_channel.make(tmp_path / "www" / "channel", "alpha", "beta", "gamma")
    text = MORE.replace(">=2", ">=1")
    stack = workspace(tmp_path / "app", served.as_uri(), text)
    stack.lock()
    older = read_locked(stack)
    assert older["more"] == ["alpha 1.0", "beta 1.0", "gamma 1.0"]
    shutil.rmtree(served)
    small_channel.make(served, "alpha", "beta", version="1.1")
    with pytest.raises(LockedInPart, match="has no gamma >=1$"):
        workspace(tmp_path / "app", served.as_uri(), text).lock()
    assert read_locked(stack) == {"default": ["alpha 1.1", "beta 1.1"], "more": older["more"]}


def test_a_conflict_is_named_by_the_requirement_that_brings_it(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta")
    small_channel.make(channel, "gamma", version="2.0", depends=["alpha <1"])
    stack = workspace(tmp_path / "app", channel.as_uri(), MORE)
    with pytest.raises(LockedInPart, match="more does not solve: (gamma|alpha|beta)") as raised:
        stack.lock()
    assert "cannot be installed with the other requirements" in str(raised.value)
    assert "alpha <1" in str(raised.value) and "\n" not in str(raised.value)


def test_where_nothing_solves_an_older_lock_stays(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "channel", "alpha", "beta")
    stack = workspace(tmp_path / "app", channel.as_uri())
    stack.lock()
    older = stack.lock_file.read_bytes()
    stack = workspace(tmp_path / "app", channel.as_uri(), 'nowhere = "*"\n')
    with pytest.raises(Failed, match="default does not solve: .* has no nowhere") as raised:
        stack.lock()
    assert not isinstance(raised.value, LockedInPart)
    assert stack.lock_file.read_bytes() == older


@pytest.mark.parametrize("words", [[], ["attention", "broken", "other"]])
def test_locking_goes_on_with_the_other_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    channel = small_channel.make(tmp_path / "www" / "channel", "alpha")
    conda_forge = small_channel.make(tmp_path / "www" / "conda-forge", "delta")
    mini = MiniProject(tmp_path / "project")
    mini.recipe("alpha")
    for name, package in {"attention": "alpha", "broken": "beta", "other": "delta"}.items():
        mini.stack(name, package)
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    monkeypatch.setenv("FORGE_NO_PIXI", "1")
    monkeypatch.setattr("forge.cli.stacks.CONDA_FORGE", conda_forge.as_uri())
    options = ["--base", "conda-forge", "--channel", channel.as_uri()]
    done = CliRunner().invoke(app, ["lock", *words, *options])
    assert done.exit_code == 1, done.output
    assert "failed: broken: " in done.output and "has no beta" in done.output
    stacks = mini.root / "build" / "stacks"
    assert [p.parent.name for p in sorted(stacks.glob("*/pixi.lock"))] == ["attention", "other"]
