# SPDX-License-Identifier: BSD-3-Clause
"""`forge clean` removes the files that killed commands left, and none that a running one uses."""

import fcntl
import shutil
from pathlib import Path

import pytest
from support.project import CHECKOUT

from forge.cli.building import remove_leftovers
from forge.cli.context import Context

# The leftovers that are removed, by the lock file that a running command would hold.
LEFTOVERS = {
    "build/.lock": {
        "build/staging/killed",
        "build/staging/built/bld",
        "build/staging/placed",
        "build/not-attempted/.partial-x",
        "channel/noarch/.partial-x.conda",
        "channel/forge/.partial-x.json",
        "channel/.tmp/repodata.json.0123",
    },
    "build/.forge-x/.lock": {"build/.forge-x"},
    "build/host-base/.lock": {"build/host-base/.partial-base.json"},
    "build/stacks/app/.pixi/.lock": {
        "build/stacks/app/.partial-pixi.toml",
        "build/stacks/app/.pixi/envs/half",
    },
    "build/stacks/app/.pixi/envs/begun/conda-meta/.pixi-environment-fingerprint": {
        "build/stacks/app/.pixi/envs/begun"
    },
    "public/.lock": {
        "public/.index.html.partial",
        "public/noarch/.partial-a.conda",
        "public-withdrawn/noarch/.partial-b.conda",
    },
    "public/.forge-x/.lock": {"public/.forge-x"},
    "cache/pkgs/.forge-x/.lock": {"cache/pkgs/.forge-x"},
    "cache/pkgs/a-1-0.lock": {"cache/pkgs/.a-1-0aBcDeF"},
    "build/sources/.forge-x/.lock": {"build/sources/.forge-x"},
}
# Locks, each with the locks that it includes. While a lock is held, neither its own leftovers nor
# those of the included locks are removed.
WIDER = {
    "channel/.lock": {"build/.lock"},
    "cache/pkgs/.cache.lock": {"cache/pkgs/a-1-0.lock"},
    "build/stacks/app/.pixi/.lock": {
        "build/stacks/app/.pixi/envs/begun/conda-meta/.pixi-environment-fingerprint"
    },
}
BEGUN = "build/stacks/app/.pixi/envs/begun"
FILES = {
    "build/.lock": "",
    "channel/.lock": "",
    "build/host-base/.lock": "",
    "public/.lock": "",
    "public/withdrawn.json": "",
    "thesis/.lock": "",
    "thesis/.partial-draft": "",
    "thesis/text": "",
    "build/stacks/app/.pixi/.lock": "",
    "cache/pkgs/.forge.lock": "",
    "cache/pkgs/.cache.lock": "",
    "cache/pkgs/a-1-0.lock": "mark",
    "build/sources/.forge.lock": "",
    "public/.forge.lock": "",
    "build/staging/killed/engine.log": "",
    "build/staging/failed/failed.json": "",
    "build/staging/built/whole-conda:3": "",
    "build/staging/built/noarch/built-1-0.conda": "",
    "build/staging/built/bld/file": "",
    "build/staging/placed/whole-conda:3": "",
    "build/staging/placed/noarch/placed-1-0.conda": "",
    "channel/noarch/placed-1-0.conda": "",
    "channel/noarch/.partial-x.conda": "",
    "channel/forge/.partial-x.json": "",
    "channel/.tmp/repodata.json.0123": "",
    "channel/.tmp/draft": "",
    "channel/download/.partial-film": "",
    "channel/forge/placed-1-0.json": "",
    "build/not-attempted/.partial-x": "",
    "build/not-attempted/x": "",
    "build/host-base/.partial-base.json": "",
    "build/host-base/base.json": "",
    "build/.forge-x/.lock": "",
    "build/.forge.lock": "",
    "public/noarch/.partial-a.conda": "",
    "public/noarch/a.conda": "",
    "public-withdrawn/noarch/.partial-b.conda": "",
    "public-withdrawn/noarch/b.conda": "",
    "build/stacks/app/pixi.lock": "",
    "build/stacks/app/.partial-pixi.toml": "",
    "build/stacks/app/.pixi/envs/half/conda-meta/history": "",
    "build/stacks/app/.pixi/envs/begun/conda-meta/pixi": "",
    f"{BEGUN}/conda-meta/.pixi-environment-fingerprint": "pixi:installing!",
    "build/stacks/app/.pixi/envs/whole/conda-meta/installed-from": "",
    "build/stacks/app/.pixi/envs/pixis/conda-meta/.pixi-environment-fingerprint": "3c8995d11da7f5",
    "build/stacks/app/.pixi/envs/older/conda-meta/pixi": "{}",
    "public/.index.html.partial": "",
    "public/index.html": "",
    "public/.forge-x/file": "",
    "cache/pkgs/.forge-x/.lock": "",
    "cache/pkgs/.a-1-0aBcDeF/file": "",
    "cache/pkgs/.b-1-0aBcDeF/file": "",
    "cache/pkgs/a-1-0/file": "",
    "public/.forge-x/.lock": "",
    "build/sources/.forge-x/.lock": "",
    "build/sources/0123/data.bin.partial": "",
    "unknown/.forge-x/file": "",
}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A checkout after commands of every kind were killed."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "build/published").mkdir()
    (tmp_path / "build/published/0123").symlink_to(tmp_path / "public")
    # Make two links in build/published to folders into which `publish` refused to write.
    (tmp_path / "build/published/thesis").symlink_to(tmp_path / "thesis")
    (tmp_path / "build/published/root").symlink_to("/")
    context = Context(root=tmp_path)
    # `reconcile` would read the packages of the channel, but these files are no packages.
    monkeypatch.setattr(context.channel, "reconcile", lambda: None)
    return context


def require_removed(context: Context, expected: set[str]) -> None:
    """Remove leftovers, and require that exactly these paths are removed and returned."""
    root = context.root
    assert {str(path.relative_to(root)) for path in remove_leftovers(context)} == expected
    for name in FILES:
        is_leftover = any(f"{name}/".startswith(f"{path}/") for path in expected)
        assert (root / name).exists() == (not is_leftover), name


def test_what_nobody_holds_goes(context: Context) -> None:
    require_removed(context, set().union(*LEFTOVERS.values()))
    assert remove_leftovers(context) == []


@pytest.mark.parametrize("lock", sorted(LEFTOVERS.keys() | WIDER))
def test_what_a_running_command_uses_stays(lock: str, context: Context) -> None:
    locks = WIDER.get(lock, set()) | {lock}
    used_paths: set[str] = set()
    removed_paths: set[str] = set()
    for name, paths in LEFTOVERS.items():
        if name in locks:
            used_paths |= paths
        else:
            removed_paths |= paths
    with (context.root / lock).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        require_removed(context, removed_paths)
    later = {str(path.relative_to(context.root)) for path in remove_leftovers(context)}
    assert later == used_paths


def test_a_clone_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone in which no command has run, no folder and no lock is created."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    assert remove_leftovers(Context(root=tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["variants.yaml"]
