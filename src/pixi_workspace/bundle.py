# SPDX-License-Identifier: BSD-3-Clause
"""An environment of a lock as one file, and its installation on a machine without a network.

The file is a tar in pixi-pack's layout, for pixi-unpack to install, too (not run yet):
channel/SUBDIR with packages and repodata.json, environment.yml, pixi-pack.json. To the last we add
the sha256 of every other member. It comes last: a file that was cut off anywhere lacks it. One lock
gives one file, byte for byte.

Layout: pixi-pack's src/pack.rs and src/unpack.rs at c45671612fb7 (2026-07-16).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import rattler
from rattler import RepoData, RepoDataRecord
from rattler.networking import Client
from rattler.package_streaming import download_to_path
from rattler.shell import ActivationVariables, PathModificationBehavior, activate

from forge_publish.places import redacted
from forge_store.channel import HOST_BOUND
from forge_store.project import SUBDIRS, BuildFailed, ForgeError, sha256_file
from pixi_workspace import PLATFORM, Workspace
from pixi_workspace.workspace import local_file

METADATA = "pixi-pack.json"
FORMAT = "1"
ENVIRONMENT = "env"  # as pixi-unpack calls it
UNPACKED = ".bundle-"


@dataclass(frozen=True)
class Bundle:
    """What a bundle says of itself. `host_bound` names the packages made for one machine only."""

    stack: str
    environment: str
    packages: int
    host_bound: list[str]


def write(workspace: Workspace, environment: str, file: Path) -> Bundle:
    """Write the locked packages of `environment` and their index to `file`.

    `file` is whole or not there. Raises ForgeError when there is no lock, BuildFailed when a
    package cannot be had or differs from the lock.
    """
    records = sorted(workspace.locked(environment), key=lambda r: (r.subdir, r.file_name))
    host_bound = [r.name.normalized for r in records if str(r.build).startswith(HOST_BOUND)]
    bundle = Bundle(workspace.name, environment, len(records), host_bound)
    partial = file.with_name(f".partial-{file.name}")
    try:
        with (
            tempfile.TemporaryDirectory(dir=file.parent) as folder,
            tarfile.open(partial, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            _fill(tar, records, bundle, Path(folder))
        partial.replace(file)
    except OSError as error:
        reason = error.strerror or error
        raise BuildFailed(f"cannot write {file}: {reason}. Nothing was left there") from None
    finally:
        partial.unlink(missing_ok=True)
    return bundle


def _fill(
    tar: tarfile.TarFile, records: list[RepoDataRecord], bundle: Bundle, folder: Path
) -> None:
    """Add the packages of each subdir, its index, and at last the list of all."""
    digests: dict[str, str] = {}

    def add(name: str, content: bytes) -> None:
        digests[name] = hashlib.sha256(content).hexdigest()
        _add(tar, name, len(content), io.BytesIO(content))

    for subdir in SUBDIRS:
        index: dict[str, dict[str, Any]] = {"packages": {}, "packages.conda": {}}
        for record in (r for r in records if r.subdir == subdir):
            path, name = _bring(record, folder), f"channel/{subdir}/{record.file_name}"
            digests[name] = record.sha256.hex()
            with path.open("rb") as stream:
                _add(tar, name, path.stat().st_size, stream)
            if path.parent == folder:
                path.unlink()
            # where it came from stays out: the bundle is its own channel
            entry = json.loads(record.to_json())
            entry = {k: v for k, v in entry.items() if k not in ("fn", "url", "channel")}
            index["packages.conda" if name.endswith(".conda") else "packages"][path.name] = entry
        data = {"info": {"subdir": subdir}, **index, "repodata_version": 2}
        add(f"channel/{subdir}/repodata.json", _json(data))
    lines = [f"  - {r.name.normalized}={r.version}={r.build}\n" for r in records]
    head = "channels:\n  - ./channel\n  - nodefaults\ndependencies:\n"
    add("environment.yml", (head + "".join(lines)).encode())
    ours = {"stack": bundle.stack, "environment": bundle.environment}
    ours |= {"host-bound": bundle.host_bound, "sha256": digests}
    metadata = {"version": FORMAT, "pixi-pack-version": None, "platform": PLATFORM}
    add(METADATA, _json(metadata | {"strix-forge": ours}))


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _add(tar: tarfile.TarFile, name: str, size: int, stream: IO[bytes]) -> None:
    info = tarfile.TarInfo(name)  # owner, group and time are 0
    info.size, info.mode = size, 0o644
    tar.addfile(info, stream)


def _bring(record: RepoDataRecord, folder: Path) -> Path:
    """The file of a locked package, fetched into `folder` where its channel is remote."""
    if record.sha256 is None:
        raise BuildFailed(f"{record.url} is locked without a sha256; lock the stack again")
    path = local_file(record.url)
    if path is None:
        path = folder / record.file_name
        try:
            asyncio.run(download_to_path(Client(), record.url, path))
        except Exception as error:
            raise BuildFailed(f"cannot fetch {record.url}: {redacted(error)}") from None
    if not path.exists():
        raise BuildFailed(f"{path} is locked but missing; lock the stack again")
    if (found := sha256_file(path)) != record.sha256.hex():
        raise BuildFailed(f"{record.url} has sha256 {found}, its lock says {record.sha256.hex()}")
    return path


def install(file: Path, folder: Path) -> Bundle:
    """Install the bundle `file` into FOLDER/env, and write FOLDER/activate.sh, as pixi-unpack does.

    Needs no network. Raises ForgeError when there is an environment already or the path has a
    space, BuildFailed for a bundle that is damaged, cut off or was changed; nothing is then left
    of it.
    """
    prefix = (folder / ENVIRONMENT).absolute()
    # what a killed run was unpacking from: the environment beside it is not whole
    leftovers = list(folder.glob(f"{UNPACKED}*"))
    if prefix.exists() and not leftovers:
        raise ForgeError(f"{prefix} exists; name another folder or delete it")
    if " " in str(prefix):
        # rattler does not quote the path in the scripts that stand for entry points
        raise ForgeError(f"{prefix}: programs do not start below a path with a space; name another")
    made = not folder.exists()
    try:
        for leftover in [*leftovers, *([prefix] if leftovers else [])]:
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        # in the folder itself: the installer can link from there instead of copying
        with tempfile.TemporaryDirectory(dir=folder, prefix=UNPACKED) as unpacked:
            bundle, records = _unpack(file, Path(unpacked))
            try:
                cache = Path(unpacked, "cache")
                asyncio.run(rattler.install(records, prefix, cache_dir=cache, show_progress=False))
            except Exception as error:
                raise BuildFailed(f"cannot install {file} into {prefix}: {error}") from None
            # conda run -p asks for it
            (prefix / "conda-meta" / "history").touch()
            # $PATH as it is where the script is read, not here
            path = ActivationVariables(None, ["$PATH"], PathModificationBehavior.Replace)
            script = activate(prefix, path).script
            (folder / "activate.sh").write_text(script)
    except BaseException as error:
        shutil.rmtree(folder if made else prefix, ignore_errors=True)
        if isinstance(error, OSError):
            raise BuildFailed(
                f"cannot unpack {file} into {folder}: {error.strerror or error}. Mend that or "
                "name another folder"
            ) from None
        raise
    return bundle


def _unpack(file: Path, folder: Path) -> tuple[Bundle, list[RepoDataRecord]]:
    """Unpack into `folder`, check every member against the bundle's own list."""
    found: dict[str, str] = {}
    damaged = BuildFailed(f"{file} is no bundle, or it is damaged or cut off; get it again")
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if not member.isdir():
                    found[member.name] = _extract(tar, member, folder, file)
        metadata = json.loads((folder / METADATA).read_bytes())
        version, platform = metadata["version"], metadata["platform"]
        ours = metadata["strix-forge"]
        stack, environment, host_bound = ours["stack"], ours["environment"], ours["host-bound"]
        wanted = dict(ours["sha256"])
        del found[METADATA]
    except (tarfile.TarError, FileNotFoundError, ValueError, KeyError, TypeError):
        raise damaged from None
    if version != FORMAT or platform != PLATFORM:
        raise ForgeError(f"{file} has format {version} for {platform}, "
                         f"this reads format {FORMAT} for {PLATFORM}")  # fmt: skip
    if changed := sorted(n for n in wanted.keys() | found if wanted.get(n) != found.get(n)):
        raise BuildFailed(f"{file}: {', '.join(changed)} differs from the bundle's own list, so "
                          "it was damaged or changed; get it again")  # fmt: skip
    records = []
    for subdir in SUBDIRS:
        channel = rattler.Channel((folder / "channel").as_uri())
        index = RepoData.from_path(folder / "channel" / subdir / "repodata.json")
        records += index.into_repo_data(channel)
    return Bundle(stack, environment, len(records), host_bound), records


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, file: Path) -> str:
    """Write one regular file below `folder`; returns its sha256."""
    path = PurePosixPath(member.name)
    if not member.isfile() or path.is_absolute() or ".." in path.parts:
        raise BuildFailed(f"{file}: refused {member.name!r}, which no bundle of ours holds")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(tar.extractfile(member)) as stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out, 1 << 20)
    return sha256_file(target)
