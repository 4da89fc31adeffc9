# SPDX-License-Identifier: BSD-3-Clause
"""Manifests and locks from anywhere: read right, or refused with one line."""

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from support.mutants import Tally, texts, trees
from support.project import CHECKOUT

from forge.bases import CONDA_FORGE
from forge.envs.manifest import Manifest
from forge.envs.workspace import Workspace

MANIFEST = """\
[workspace]
name = "app"
channels = ["conda-forge", "https://ours.invalid/channel"]
channel-priority = "strict"
platforms = [{ name = "gpu", platform = "linux-64", amdgpu = "gfx1151", __cuda = "12" }]

[dependencies]
python = ">=3.11"
alpha = { version = "1.0.*", build = "cpu_*" }

[feature.more.dependencies]
beta = "*"

[feature.more.tasks]
check = { cmd = "true", description = "x" }

[environments]
more = ["more"]
bare = { features = ["more"], no-default-feature = true }
"""
LOCKED = {"tzdata", "ca-certificates", "_openmp_mutex", "libgomp"}
SIMPLE = '[workspace]\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n[dependencies]\n'
Record = Callable[[str, object], None]


def toml(value: Any) -> str:
    """A tree of JSON as TOML, in inline tables. Raises ValueError for what TOML cannot say."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if value is None:
        raise ValueError("TOML has no null")
    return json.dumps(value)


def manifests() -> Iterator[bytes]:
    for tree in trees(tomllib.loads(MANIFEST), 1, 500):
        with contextlib.suppress(ValueError, AttributeError):
            lines = [f"{json.dumps(key)} = {toml(value)}\n" for key, value in tree.items()]
            yield "".join(lines).encode()
    yield from texts(MANIFEST.encode(), 2, 300)


def believable(manifest: Manifest) -> bool:
    """What solving and installing rely on."""
    specs = [spec for specs in manifest.environments.values() for spec in specs]
    return (
        all(re.fullmatch(r"[a-z0-9-]+", name) for name in manifest.environments)
        and all(isinstance(spec, str) and "\n" not in spec for spec in specs)
        and all(isinstance(c, str) and not ("://" in c and "@" in c) for c in manifest.channels)
    )


def test_manifests(tmp_path: Path, record_property: Record) -> None:
    tally, file = Tally("manifest", record_property), tmp_path / "pixi.toml"
    for mutant in manifests():
        file.unlink(missing_ok=True)  # to write over a file waits for the disk
        file.write_bytes(mutant)
        tally.give(lambda: Manifest.load(file), believable, mutant)
    assert min(tally.outcomes.values()) > 50 and sum(tally.outcomes.values()) > 600


def small_lock() -> dict[str, Any]:
    """Four packages of this repository's own lock."""
    lock = yaml.load((CHECKOUT / "pixi.lock").read_text(), yaml.CSafeLoader)
    default = lock["environments"]["default"]

    def wanted(package: dict[str, Any]) -> bool:
        return package["conda"].rpartition("/")[2].rsplit("-", 2)[0] in LOCKED

    packages = list(filter(wanted, default["packages"]["linux-64"]))
    default = default | {"packages": {"linux-64": packages}}
    kept = {"environments": {"default": default}}
    return lock | kept | {"packages": list(filter(wanted, lock["packages"]))}


def test_locks(tmp_path: Path, record_property: Record) -> None:
    """Read for an installation."""
    tally = Tally("lock", record_property)
    (tmp_path / "pixi.toml").write_text(SIMPLE + "".join(f'{name} = "*"\n' for name in LOCKED))
    workspace = Workspace("app", tmp_path)
    valid = yaml.safe_dump(small_lock(), sort_keys=False).encode()
    workspace.lock_file.write_bytes(valid)
    assert len(workspace.locked("default")) == 4

    def right(records: list[Any]) -> bool:
        inside = re.compile(re.escape(CONDA_FORGE) + r"/(linux-64|noarch)/[\w.+!=-]+")
        return all(inside.fullmatch(r.url) and len(r.sha256) == 32 and r.size >= 0 for r in records)

    dumped = (
        yaml.safe_dump(tree, sort_keys=False).encode() for tree in trees(small_lock(), 3, 400)
    )
    for mutant in [*dumped, *texts(valid, 4, 300)]:
        workspace.lock_file.unlink()
        workspace.lock_file.write_bytes(mutant)
        tally.give(lambda: workspace.locked("default"), right, mutant)
    assert min(tally.outcomes.values()) > 50 and sum(tally.outcomes.values()) == 700
