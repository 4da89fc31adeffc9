# SPDX-License-Identifier: BSD-3-Clause
"""pixi.lock of the build tools, and what every manifest and lock of the repository has to be."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
import zstandard
from rattler import LockChannel, LockFile, LockPlatform
from support.lock_format import PACKAGE_KEYS
from support.project import CHECKOUT, MiniProject

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.envs.manifest import PLATFORM, Manifest, match_spec
from forge.envs.repodata import Records
from forge.envs.workspace import Workspace
from forge.errors import BuildFailed, ForgeError
from forge.files import write_text

DATA = CHECKOUT / "tests" / "data" / "conda-forge"
MANIFEST, LOCK = CHECKOUT / "pixi.toml", CHECKOUT / "pixi.lock"
REPLACE = {"conda-forge": CONDA_FORGE}
STACKS = sorted(CHECKOUT.glob("stacks/*/pixi.toml"))


def unpacked(subdir: str) -> bytes:
    packed = (DATA / subdir / "repodata.json.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed)


@pytest.fixture(scope="module")
def known() -> Records:
    return Records(CONDA_FORGE, DATA)


def root(folder: Path, records: Records | None = None, text: str | None = None) -> Workspace:
    """The root manifest (or `text`) and its lock in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pixi.toml").write_text(text or MANIFEST.read_text())
    (folder / "pixi.lock").write_bytes(LOCK.read_bytes())
    records = {CONDA_FORGE: records} if records else {}
    return Workspace("--root", Manifest.load(folder / "pixi.toml"), folder, REPLACE, records)


def test_the_command_leaves_the_lock_as_it_is(tmp_path: Path) -> None:
    """Where conda-forge is not asked it says which records it solved from."""
    project = MiniProject(tmp_path)
    chosen = root(tmp_path)
    (tmp_path / "tests").symlink_to(CHECKOUT / "tests")
    said = project.forge("lock", "--root").stdout
    assert chosen.lock_file.read_bytes() == LOCK.read_bytes()
    assert f"records in {tmp_path / 'tests/data/conda-forge'}" in said


def test_the_same_records_give_the_same_bytes(known: Records, tmp_path: Path) -> None:
    chosen = root(tmp_path, known)
    chosen.lock_file.unlink()
    chosen.lock()
    assert chosen.lock_file.read_bytes() == LOCK.read_bytes()


def test_a_poorer_and_newer_index_changes_nothing(tmp_path: Path) -> None:
    """What is locked stays: an index has newer builds, and no purls or run_exports in it."""
    for subdir in ("linux-64", "noarch"):
        data = json.loads(unpacked(subdir))
        for kind in ("packages", "packages.conda"):
            for record in list(data[kind].values()):
                record.pop("purls", None), record.pop("run_exports", None)
                if record["name"] == "rich":
                    newer = record | {"version": "99.0", "build": "new_0"}
                    data[kind]["rich-99.0-new_0.conda"] = newer
        (tmp_path / subdir).mkdir()
        (tmp_path / subdir / "repodata.json").write_text(json.dumps(data))
    chosen = root(tmp_path, Records(CONDA_FORGE, tmp_path))
    chosen.lock(keep=True)
    assert chosen.lock_file.read_bytes() == LOCK.read_bytes()
    chosen.lock()
    assert b"rich-99.0-new_0.conda" in chosen.lock_file.read_bytes()


@pytest.mark.parametrize("lock", [LOCK, DATA.parent / "pixi" / "pixi.lock"], ids=["root", "pixi"])
def test_the_bindings_write_what_they_read(lock: Path, tmp_path: Path) -> None:
    """The newest of them have the lock format of pixi 0.82 and later."""
    LockFile.from_path(lock).to_path(tmp_path / "pixi.lock")
    assert (tmp_path / "pixi.lock").read_bytes() == lock.read_bytes()


def test_every_record_is_one_of_conda_forge() -> None:
    """url, sha256, md5 and size of each, as the snapshot of real records has them."""
    there = {}
    for subdir in ("linux-64", "noarch"):
        data = json.loads(unpacked(subdir))
        for name, record in (data["packages"] | data["packages.conda"]).items():
            there[f"{CONDA_FORGE}/{subdir}/{name}"] = record
    packages = yaml.safe_load(LOCK.read_text())["packages"]
    assert len(packages) > 200
    for package in packages:
        record = there[package["conda"]]
        for key in ("sha256", "md5", "size", "license", "depends"):
            assert package.get(key) == (record.get(key) or None), package["conda"]


def test_structure_is_that_of_pixi() -> None:
    """Version 7: sections, platforms, environments, each package once, keys in pixi's order."""
    lock = yaml.safe_load(LOCK.read_text())
    assert list(lock) == ["version", "platforms", "environments", "packages"]
    assert lock["version"] == 7
    minimal = ["__unix=0=0", "__linux=4.18", "__glibc=2.28", "__archspec=0=x86_64"]
    assert lock["platforms"] == [{"name": "linux-64", "virtual-packages": minimal}]
    environments = ["default", "dev", "lint", "pack"]
    assert sorted(lock["environments"]) == list(lock["environments"]) == environments
    used = set()
    for environment in lock["environments"].values():
        assert list(environment) == ["channels", "packages"]
        assert environment["channels"] == [{"url": f"{CONDA_FORGE}/"}]
        urls = [entry["conda"] for entry in environment["packages"]["linux-64"]]
        assert len(urls) == len(set(urls))
        used |= set(urls)
    assert [package["conda"] for package in lock["packages"]] == sorted(used)
    for package in lock["packages"]:
        keys = list(package)
        assert keys[0] == "conda" and keys == sorted(keys, key=PACKAGE_KEYS.index)
        assert {"sha256", "md5", "license", "size", "timestamp"} <= set(keys)


def test_the_lock_satisfies_its_manifest(tmp_path: Path) -> None:
    assert root(tmp_path).outdated() == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('rich = "*"', 'rich = "<14"', "default: .*No candidates were found for rich <14"),
        (
            'rich = "*"',
            'rich = "*"\nboltons = "*"',
            "default: .*No candidates were found for boltons",
        ),
        ('git = "*"\n', "", "default: git is locked, but nothing requires it"),
        ('shellcheck = "*"\n', "", "lint: shellcheck is locked, but nothing requires it"),
        ("lint = {", 'more = ["lint"]\nlint = {', "environment more is not locked"),
        (
            "no-default-feature = true",
            "no-default-feature = false",
            "lint: what is locked does not satisfy",
        ),
        ("\nlint = {", "\nlinted = {", "environment lint is not in pixi.toml"),
        ('channels = ["conda-forge"]', 'channels = ["https://x.invalid/y"]', "for the channels"),
        (
            '"linux-64"',
            '{ name = "a", platform = "linux-64", __glibc = "2.39" }',
            "but not for what pixi.toml declares",
        ),
    ],
)
def test_a_change_that_is_not_locked_is_seen(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    text = MANIFEST.read_text()
    assert old in text
    chosen = root(tmp_path, text=text.replace(old, new))
    assert re.search(problem, "\n".join(chosen.outdated()))


def test_a_lock_of_more_platforms_is_outdated(tmp_path: Path) -> None:
    chosen = root(tmp_path)
    lines = chosen.manifest.platforms()["linux-64"].lines
    two = [LockPlatform(PLATFORM, None, lines), LockPlatform("linux-aarch64")]
    lock, record = LockFile(two), chosen.locked("default")[0]
    lock.set_channels("default", [LockChannel(f"{CONDA_FORGE}/")])
    for platform in two:
        lock.add_conda_package("default", platform, record)
    lock.to_path(chosen.lock_file)
    assert "default: locked for other platforms as well" in "\n".join(chosen.outdated())


def test_a_lock_with_marks_of_a_merge_is_named(known: Records, tmp_path: Path) -> None:
    chosen = root(tmp_path, known)
    chosen.lock_file.write_text(f"<<<<<<< ours\n{LOCK.read_text()}")
    for ask in (chosen.outdated, lambda: chosen.lock(keep=True)):
        with pytest.raises(ForgeError, match=r"pixi\.lock is not a lock file"):
            ask()


def test_an_invalid_requirement(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="rich = '>=1,<' is not a valid requirement"):
        root(tmp_path, text=MANIFEST.read_text().replace('rich = "*"', 'rich = ">=1,<"')).outdated()


def test_check_tells_and_writes_nothing(tmp_path: Path) -> None:
    project = MiniProject(tmp_path)
    root(tmp_path, text=MANIFEST.read_text().replace('rich = "*"', 'rich = "<14"'))
    done = project.forge("lock", "--root", "--check", code=1)
    assert "No candidates were found for rich <14" in done.stdout
    assert (tmp_path / "pixi.lock").read_bytes() == LOCK.read_bytes()
    (tmp_path / "pixi.lock").unlink()
    assert "does not exist" in project.forge("lock", "--root", "--check", code=1).stdout
    assert "name either" in project.forge("lock", code=2).stderr
    assert "--update is for" in project.forge("lock", "app", "--update", code=2).stderr
    assert "name either" in project.forge("lock", "app", "--root", code=2).stderr
    error = project.forge("lock", "--root", "--records", str(tmp_path), code=2).stderr
    assert "holds no records" in error


def test_a_lock_that_cannot_be_made_leaves_the_old_one(known: Records, tmp_path: Path) -> None:
    text = MANIFEST.read_text().replace('rich = "*"', 'rich = ">=99"')
    chosen = root(tmp_path, known, text)
    with pytest.raises(BuildFailed, match="environment default does not solve"):
        chosen.lock(keep=True)
    assert chosen.lock_file.read_bytes() == LOCK.read_bytes()


@pytest.mark.parametrize("content", [b"{", b'{"packages": 1}'])
@pytest.mark.parametrize("name", ["repodata.json", "repodata.json.zst"])
def test_damaged_records_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / "linux-64").mkdir()
    (tmp_path / "linux-64" / name).write_bytes(content)
    with pytest.raises(ForgeError, match=f"repodata of {CONDA_FORGE}/linux-64"):
        Records(CONDA_FORGE, tmp_path)


GPU = '{ name = "a", platform = "linux-64", %s }'
ONE = f"platforms = [{GPU}]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('platforms = ["linux-64", "linux-aarch64"]', "is not for linux-64"),
        ('platforms = ["linux-64", "linux-64"]', "needs another name"),
        ("platforms = []", "platforms is no list of entries for linux-64"),
        ('platforms = "linux-64"', "platforms is no list of entries for linux-64"),
        ('platforms = ["linux-aarch64"]', "is not for linux-64"),
        ('platforms = [{ name = "linux-64", platform = "osx-64" }]', "is not for linux-64"),
        ('platforms = [{ name = "linux-64", __x = "1" }]', "needs another name"),
        (ONE % 'archspec = "zen5"', "archspec = 'zen5' is not supported"),
        (ONE % "__x = 1", "__x = 1 is not supported"),
        (ONE % '__amdgpu_arch = "11.5.1"', "__amdgpu_arch requires __amdgpu"),
        (ONE % "amdgpu = false", "amdgpu = False is neither"),
        (
            ONE % 'amdgpu = "gfx11-generic"',
            "amdgpu = 'gfx11-generic' is neither",
        ),
        (ONE % 'amdgpu = "11.5.1"', "amdgpu = '11.5.1' is neither"),
        ('platforms = ["linux-64"]\nchannel-priority = "disabled"', "channel-priority is not"),
        ('platforms = ["linux-64"]\nexclude-newer = "7d"', "[workspace] exclude-newer is not"),
        ('platforms = ["linux-64"]\npreview = ["pixi-build"]', "[workspace] preview is not"),
        ('platforms = ["linux-64"]\n[target.linux-64.dependencies]', "[top level] target is not"),
        ('platforms = ["linux-64"]\n[pypi-dependencies]', "pypi-dependencies is not supported"),
        ('platforms = ["linux-64"]\n[system-requirements]', "system-requirements is not supported"),
        ('platforms = ["linux-64"]\n[build-dependencies]', "build-dependencies is not supported"),
        ('platforms = ["linux-64"]\n[activation.env]\nX = "1"', "activation is not supported"),
        ('platforms = ["linux-64"]\n[feature.x]\nchannels = "y"', "[feature.x] channels is not"),
        ('platforms = ["linux-64"]\n[feature.x]\nplatforms = ["y"]', "platforms: y is not defined"),
        ('platforms = ["linux-64"]\n[feature.x]\nsolve-group = "y"', "solve-group is not"),
        ('platforms = ["linux-64"]\n[feature.x.target.unix]', "[feature.x] target is not"),
        ('platforms = ["linux-64"]\n[feature.default]', "[feature.default] is the name of"),
        (
            'platforms = ["linux-64"]\n[environments]\nx = { features = [], solve-group = "y" }',
            "[environments.x] solve-group is not",
        ),
        ('platforms = ["linux-64"]\n[environments]\n"../x" = []', "lower-case letters"),
        (
            'platforms = ["linux-64"]\n[environments]\nx = ["y"]',
            "environments.x features: y is not defined",
        ),
        ('platforms = ["linux-64"]\n[dependencies]\nx = { path = "." }', "path is not supported"),
        ('platforms = ["linux-64"]\n[dependencies]\nx = { git = "https://x" }', "git is not"),
        ('platforms = ["linux-64"]\n[dependencies]\nx = { channel = "y" }', "channel is not"),
        ('platforms = ["linux-64"]\n[dependencies]\nx = 1', "is missing or no table"),
        ('platforms = ["linux-64"]\n[dependencies]\n"x y" = "*"', "no package has such a name"),
        ('platforms = ["linux-64"]\nchannels = ["https://u:p@x.invalid/y"]', "credential"),
        ('platforms = ["linux-64"]\nchannels = ["https://x.invalid/t/secret/y"]', "credential"),
        (
            'platforms = ["linux-64"]\nchannels = [{ channel = "x" }]',
            "channels is not a list of names",
        ),
        ("", "platforms is no list of entries"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "pixi.toml"
    channels = "" if "a list" in message or "credential" in message else "channels = []\n"
    file.write_text(f"[workspace]\n{channels}{line}\n")
    with pytest.raises(ForgeError, match=re.escape(message)) as error:
        Manifest.load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "name", "declared"),
    [
        ('"linux-64"', "linux-64", []),
        ('{ platform = "linux-64" }', "linux-64", []),
        ('{ name = "x", platform = "linux-64" }', "p1", []),
        (GPU % "amdgpu = true", "p1", ["__amdgpu=0"]),
        (GPU % 'amdgpu = "gfx1151"', "p1", ["__amdgpu=0", "__amdgpu_arch=11.5.1"]),
        (GPU % 'amdgpu = "gfx90a"', "p1", ["__amdgpu=0", "__amdgpu_arch=9.0.10"]),
        (GPU % 'amdgpu = "gfx942", __cuda = "12"', "p1", [
            "__amdgpu=0", "__amdgpu_arch=9.4.2", "__cuda=12"
        ]),
        (GPU % '__amdgpu = "0", __amdgpu_arch = "11.0.0"', "p1", [
            "__amdgpu=0", "__amdgpu_arch=11.0.0"
        ]),
    ],
)  # fmt: skip
def test_a_platform_as_pixi_writes_it(
    tmp_path: Path, entry: str, name: str, declared: list[str]
) -> None:
    """Its name in locks, what is declared, and what pixi assumes of every linux-64 machine."""
    file = tmp_path / "pixi.toml"
    file.write_text(f"[workspace]\nchannels = []\nplatforms = [{entry}]\n")
    (platform,) = Manifest.load(file).platforms().values()
    assumed = ["__unix=0=0", "__linux=4.18", "__glibc=2.28", "__archspec=0=x86_64"]
    assert (platform.name, platform.lines) == (name, [*declared, *assumed])
    assert len(platform.virtual_packages()) == len(platform.lines)


def test_requirements_of_features_add_up(tmp_path: Path) -> None:
    """As in pixi: a feature narrows what the others ask for, and replaces none of it."""
    file = tmp_path / "pixi.toml"
    file.write_text(
        '[workspace]\nchannels = []\nplatforms = ["linux-64"]\n'
        '[dependencies]\npython = ">=3.11"\nalpha = "*"\n'
        '[feature.a.dependencies]\npython = "<3.13"\n[feature.b.dependencies]\nalpha = "*"\n'
        '[environments]\na = ["a", "b"]\nb = { features = ["b"], no-default-feature = true }\n'
    )
    environments = Manifest.load(file).environments()
    assert {name: environment.specs for name, environment in environments.items()} == {
        "default": ["python >=3.11", "alpha *"],
        "a": ["python <3.13", "alpha *", "python >=3.11"],
        "b": ["alpha *"],
    }


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ("*", "alpha *"),
        ("1.2", "alpha ==1.2"),
        ("1.2.*", "alpha 1.2.*"),
        (">=1,<2", "alpha >=1,<2"),
        ("==1.0", "alpha ==1.0"),
        ({"version": "1.2.*", "build": "cpu*"}, "alpha 1.2.* cpu*"),
    ],
)
def test_spec(value: object, spec: str) -> None:
    assert match_spec("alpha", value) == spec


def stack_urls(lock: Path) -> Iterator[str]:
    data = yaml.safe_load(lock.read_text())
    for environment in data["environments"].values():
        yield from (channel["url"] for channel in environment["channels"])
    yield from (package["conda"] for package in data["packages"])


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_a_stack_is_for_every_machine(manifest: Path) -> None:
    """Copied to another machine it means the same; for gfx1151, ours first, strict priority."""
    workspace = tomllib.loads(manifest.read_text())["workspace"]
    assert workspace["channels"] == [PUBLISHED, "conda-forge"]
    assert workspace["channel-priority"] == "strict" and workspace["requires-pixi"]
    assert workspace["name"] == manifest.parent.name
    (platform,) = Manifest.load(manifest).platforms().values()
    assert platform.promised.items() >= {"__amdgpu": "0", "__amdgpu_arch": "11.5.1"}.items()
    # variables are the packages' own, by activation: a copied manifest cannot forget them
    assert not re.search(r"activation|\benv\b", manifest.read_text())
    assert len((manifest.parent / "README.md").read_text().splitlines()) <= 30
    lock = manifest.parent / "pixi.lock"
    for url in stack_urls(lock) if lock.exists() else []:
        assert url.startswith("https://")


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_a_stack_names_its_packages_on_pypi(manifest: Path) -> None:
    """For the channel that it uses; docs/pypi.md shows the same table to paste."""
    data = tomllib.loads(manifest.read_text())
    shown = re.search(r"^```toml\n(.*?)^```", (CHECKOUT / "docs/pypi.md").read_text(), re.M | re.S)
    pasted, names_of = tomllib.loads(shown[1]), data["workspace"]["conda-pypi-map"]
    assert pasted["workspace"]["conda-pypi-map"] == names_of
    ((channel, table),) = names_of.items()
    assert channel == PUBLISHED and table["mapping-mode"] == "replace"
    names = json.loads((CHECKOUT / "recipes/pypi-names.json").read_text())
    assert table["mapping"] == {ours: theirs for ours, theirs in names.items() if theirs}
    # before there was PyPI
    assert pasted["pypi-exclude-newer"] == data["pypi-exclude-newer"]
    assert data["pypi-exclude-newer"] == dict.fromkeys(table["mapping"].values(), "1970-01-01")


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_tasks_of_a_stack_exist(manifest: Path) -> None:
    from strix_validate.cli import app as validate

    commands = {c.name or c.callback.__name__ for c in validate.registered_commands}
    tasks = tomllib.loads(manifest.read_text())["tasks"]
    assert {"doctor", "check", "bench"} <= set(tasks)
    for task in tasks.values():
        assert set(task) == {"cmd", "description"}, "a task with args refuses a program's own flags"
        program, command = task["cmd"].split()[:2]
        assert task["description"]
        assert program in ("strix-validate", "strix-emulate", "vllm", "python")
        assert program != "strix-validate" or command in commands
        assert program != "python" or (manifest.parent / command).is_file()


PIXI = CHECKOUT / "tests" / "data" / "pixi"
OURS, THEIRS = "https://channel.invalid/ours", "https://channel.invalid/theirs"


def written_by_pixi(folder: Path, source: Path = PIXI) -> Workspace:
    """What pixi 0.77 locked, and the records that it had."""
    for name in ("pixi.toml", "pixi.lock"):
        (folder / name).write_bytes((source / name).read_bytes())
    records = {channel: Records(channel, PIXI) for channel in (OURS, THEIRS)}
    return Workspace("app", Manifest.load(folder / "pixi.toml"), folder, {}, records)


def test_a_lock_that_pixi_wrote_is_taken_and_written_again(tmp_path: Path) -> None:
    """Byte for byte: names of platforms, their virtual packages, and no indexed_timestamp."""
    chosen = written_by_pixi(tmp_path)
    assert chosen.outdated() == [] and len(chosen.locked("more")) == 3
    chosen.lock_file.unlink()
    assert chosen.lock() == {"default": 2, "more": 3, "bare": 2}
    assert chosen.lock_file.read_bytes() == (PIXI / "pixi.lock").read_bytes()
    assert "indexed_timestamp" in (PIXI / "noarch/repodata.json").read_text()


def test_a_lock_for_several_machines(tmp_path: Path) -> None:
    """Byte for byte pixi's: each environment on its features' platforms, from their channels."""
    chosen = written_by_pixi(tmp_path, PIXI / "several")
    assert chosen.outdated() == []
    text = chosen.lock_file.read_text()
    chosen.lock_file.unlink()
    assert chosen.lock() == {"default": 3, "gpu": 2, "cpu": 4}  # on 3 platforms, 1 and 2
    assert chosen.lock_file.read_text() == text
    assert {r.url.rpartition("/noarch/")[0] for r in chosen.locked("gpu")} == {OURS}
    with pytest.raises(ForgeError, match="cpu is for several platforms: pixi install chooses one"):
        chosen.locked("cpu")
    manifest = tmp_path / "pixi.toml"
    for old, new, problem in (
        ('["nvidia", ', "[", "cpu: locked for other platforms as well"),
        ('"12"', '"13"', "not for what pixi.toml declares"),
        ('["strix-halo"]', '["strix-halo", "nvidia"]', "gpu: locked for .* but not for what"),
        ('channels = ["https://channel.invalid/ours"]', "", "gpu: locked for the channels"),
    ):
        assert old in manifest.read_text()
        changed = tmp_path / "changed.toml"
        changed.write_text(manifest.read_text().replace(old, new))
        other = replace(chosen, manifest=Manifest.load(changed))
        assert re.search(problem, "\n".join(other.outdated())), new
    changed.write_text(manifest.read_text().replace('cpu = ["cpu"]', 'cpu = ["cpu", "gpu"]'))
    with pytest.raises(ForgeError, match="its features have no platform in common"):
        Manifest.load(changed)


@pytest.mark.parametrize("says", [None, [], ["pkg:pypi/alpha@1.0"]])
def test_a_lock_says_what_ours_are_on_pypi(tmp_path: Path, says: list[str] | None) -> None:
    """Whatever the index says: pixi keeps a lock without it, and takes PyPI's over ours."""
    records = tmp_path / "records"
    for file in PIXI.glob("*/repodata.json"):
        data = json.loads(file.read_bytes())
        for record in data["packages.conda"].values():
            record.pop("purls", None)
            record |= {} if says is None or record["name"] != "alpha" else {"purls": says}
        write_text(records / file.parent.name / file.name, json.dumps(data))
    names = f'[workspace.conda-pypi-map."{OURS}"]\nmapping = {{ alpha = "alpha", beta = "b-b" }}\n'
    write_text(tmp_path / "pixi.toml", (PIXI / "pixi.toml").read_text() + names)
    manifest = Manifest.load(tmp_path / "pixi.toml")
    Workspace("app", manifest, tmp_path, {}, {OURS: Records(OURS, records)}).lock()
    packages = yaml.safe_load((tmp_path / "pixi.lock").read_text())["packages"]
    found = {
        package["conda"].rpartition("/")[2]: package.pop("purls", None) for package in packages
    }
    assert found == {
        "alpha-1.0-h1234567_0.conda": ["pkg:pypi/alpha@1.0"],
        "alpha-1.1-h1234567_0.conda": ["pkg:pypi/alpha@1.1"],
        "beta-2.0-h1234567_0.conda": ["pkg:pypi/b-b@2.0"],
        "gamma-0.3-h1234567_0.conda": None,
    }
    assert packages == yaml.safe_load((PIXI / "pixi.lock").read_text())["packages"]


def test_a_platform_is_what_it_promises(tmp_path: Path) -> None:
    """Neither its name, the order, nor a build string of 0 counts, which newer pixi writes.

    What every linux-64 has may be left out.
    """
    chosen = written_by_pixi(tmp_path)
    text = chosen.lock_file.read_text()
    gpu, arch = "  - __amdgpu=0\n", "  - __amdgpu_arch=11.5.1\n"
    for same in (
        text.replace("p1", "strix-halo"),
        text.replace(gpu + arch, arch + gpu),
        text.replace("  - __linux=4.18\n", ""),
        text.replace(gpu + arch, "  - __amdgpu=0=0\n  - __amdgpu_arch=11.5.1=0\n"),
    ):
        assert same != text
        chosen.lock_file.write_text(same)
        assert chosen.outdated() == []
    for other in (
        text.replace(gpu, ""),
        text.replace("linux-64", "linux-aarch64"),
        text.replace("11.5.1\n  - __unix", "11.0.0\n  - __unix"),
    ):
        chosen.lock_file.write_text(other)
        assert "not for what pixi.toml declares" in "\n".join(chosen.outdated())


PYPI = """\
- pypi: https://files.invalid/wheel-1.0-py3-none-any.whl
  name: wheel
  version: '1.0'
  sha256: 0000000000000000000000000000000000000000000000000000000000000000
"""
SOURCE = """\
- conda_source: made[9a9a9a9a] @ .
  version: '1.0'
  build: h1234567_0
  subdir: noarch
"""


@pytest.mark.parametrize("entry", [PYPI, SOURCE], ids=["pypi", "source"])
def test_a_locked_package_of_no_channel_is_refused(tmp_path: Path, entry: str) -> None:
    chosen = written_by_pixi(tmp_path)
    head, packages = chosen.lock_file.read_text().split("packages:\n- ")
    use = f"      {entry.splitlines()[0]}\n"
    chosen.lock_file.write_text(f"{head}{use}packages:\n- {packages}{entry}")
    with pytest.raises(ForgeError, match=r"pixi\.lock: more: .*comes from PyPI or source"):
        chosen.locked("more")
    assert "comes from PyPI or source" in "\n".join(chosen.outdated())
