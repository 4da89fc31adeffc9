# SPDX-License-Identifier: BSD-3-Clause
"""What killed commands left goes with `forge clean`; what a running one uses stays."""

import fcntl
import shutil
from pathlib import Path

import pytest
from support.project import CHECKOUT

from forge.cli.building import remove_leftovers
from forge.cli.context import Context

# what goes, by the lock file that a running command would hold
LEFT = {
    "build/.lock": {
        "build/staging/killed", "build/staging/built/bld", "build/staging/placed",
        "build/not-attempted/.partial-x", "channel/noarch/.partial-x.conda", "channel/.tmp/x",
    },
    "build/.forge-x/.lock": {"build/.forge-x"},
    "build/host-base/.lock": {"build/host-base/.partial-base.json"},
    "build/stacks/app/.pixi/.lock": {
        "build/stacks/app/.partial-pixi.toml", "build/stacks/app/.pixi/envs/half",
    },
    "build/stacks/app/.pixi/envs/begun/conda-meta/.pixi-environment-fingerprint": {
        "build/stacks/app/.pixi/envs/begun"
    },
    "public/.lock": {
        "public/.index.html.partial", "public/noarch/.partial-a.conda",
        "public-withdrawn/noarch/.partial-b.conda",
    },
    "public/.forge-x/.lock": {"public/.forge-x"},
    "cache/pkgs/.forge-x/.lock": {"cache/pkgs/.forge-x"},
    "cache/pkgs/a-1-0.lock": {"cache/pkgs/.a-1-0aBcDeF"},
    "build/sources/.forge-x/.lock": {"build/sources/.forge-x"},
}  # fmt: skip
# locks of more than one: while one of these is held, what hangs on it stays as well
WIDER = {
    "channel/.lock": {"build/.lock"},
    "cache/pkgs/.cache.lock": {"cache/pkgs/a-1-0.lock"},
    "build/stacks/app/.pixi/.lock": {
        "build/stacks/app/.pixi/envs/begun/conda-meta/.pixi-environment-fingerprint"
    },
}
FILES = {
    "build/.lock": "", "channel/.lock": "", "build/host-base/.lock": "", "public/.lock": "",
    "public/withdrawn.json": "", "thesis/.lock": "", "thesis/.partial-draft": "", "thesis/text": "",
    "build/stacks/app/.pixi/.lock": "",
    "cache/pkgs/.forge.lock": "", "cache/pkgs/.cache.lock": "", "cache/pkgs/a-1-0.lock": "mark",
    "build/sources/.forge.lock": "", "public/.forge.lock": "",
    "build/staging/killed/engine.log": "", "build/staging/failed/failed.json": "",
    "build/staging/built/whole-conda:3": "", "build/staging/built/noarch/built-1-0.conda": "",
    "build/staging/built/bld/file": "",
    "build/staging/placed/whole-conda:3": "", "build/staging/placed/noarch/placed-1-0.conda": "",
    "channel/noarch/placed-1-0.conda": "", "channel/noarch/.partial-x.conda": "",
    "channel/.tmp/x": "", "channel/forge/placed-1-0.json": "",
    "build/not-attempted/.partial-x": "", "build/not-attempted/x": "",
    "build/host-base/.partial-base.json": "", "build/host-base/base.json": "",
    "build/.forge-x/.lock": "", "build/.forge.lock": "",
    "public/noarch/.partial-a.conda": "", "public/noarch/a.conda": "",
    "public-withdrawn/noarch/.partial-b.conda": "", "public-withdrawn/noarch/b.conda": "",
    "build/stacks/app/pixi.lock": "", "build/stacks/app/.partial-pixi.toml": "",
    "build/stacks/app/.pixi/envs/half/conda-meta/history": "",
    "build/stacks/app/.pixi/envs/begun/conda-meta/pixi": "",
    "build/stacks/app/.pixi/envs/begun/conda-meta/.pixi-environment-fingerprint":
        "pixi:installing!",
    "build/stacks/app/.pixi/envs/whole/conda-meta/installed-from": "",
    "build/stacks/app/.pixi/envs/pixis/conda-meta/.pixi-environment-fingerprint": "3c8995d11da7f5",
    "build/stacks/app/.pixi/envs/older/conda-meta/pixi": "{}",
    "public/.index.html.partial": "", "public/index.html": "", "public/.forge-x/file": "",
    "cache/pkgs/.forge-x/.lock": "", "cache/pkgs/.a-1-0aBcDeF/file": "",
    "cache/pkgs/.b-1-0aBcDeF/file": "", "cache/pkgs/a-1-0/file": "",
    "public/.forge-x/.lock": "", "build/sources/.forge-x/.lock": "",
    "build/sources/0123/data.bin.partial": "", "unknown/.forge-x/file": "",
}  # fmt: skip


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
    for folder in (tmp_path / "thesis", Path("/")):  # that publish refused
        (tmp_path / f"build/published/{folder.name or 'root'}").symlink_to(folder)
    context = Context(root=tmp_path)
    monkeypatch.setattr(context.channel, "reconcile", lambda: None)  # no package is one
    return context


def require_gone(context: Context, gone: set[str]) -> None:
    """Exactly that goes, and is named."""
    root = context.root
    assert {str(path.relative_to(root)) for path in remove_leftovers(context)} == gone
    stay = {n for n in FILES if not any(f"{n}/".startswith(f"{left}/") for left in gone)}
    assert {n for n in FILES if (root / n).exists()} == stay


def test_what_nobody_holds_goes(context: Context) -> None:
    require_gone(context, set().union(*LEFT.values()))
    assert remove_leftovers(context) == []


@pytest.mark.parametrize("lock", sorted(LEFT.keys() | WIDER))
def test_what_a_running_command_uses_stays(lock: str, context: Context) -> None:
    held = WIDER.get(lock, set()) | {lock}
    with (context.root / lock).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        require_gone(context, set().union(*(LEFT[name] for name in LEFT if name not in held)))
    later = set().union(*(LEFT[name] for name in LEFT if name in held))
    assert {str(p.relative_to(context.root)) for p in remove_leftovers(context)} == later


def test_a_clone_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing worked there yet: no folder and no lock is made."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    assert remove_leftovers(Context(root=tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["variants.yaml"]
