# SPDX-License-Identifier: BSD-3-Clause
"""The lock of the build tools (pixi.lock), and rules for all manifests and locks in this tree."""

import asyncio
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import rattler
import yaml
import zstandard
from rattler import LockFile
from rattler.exceptions import SolverError
from support.project import CHECKOUT

from forge.bases import CONDA_FORGE, PUBLISHED, BaseName
from forge.cli import stacks
from forge.cli.context import Context
from forge.cli.stacks import Stack
from forge.conda.solve import virtual_packages
from forge.envs import lockfile
from forge.envs.manifest import Manifest, match_spec
from forge.envs.workspace import Workspace
from forge.errors import ForgeError
from forge.files import write_text

DATA = CHECKOUT / "tests" / "data" / "conda-forge"
MANIFEST = CHECKOUT / "pixi.toml"
LOCK = CHECKOUT / "pixi.lock"
STACKS = sorted(CHECKOUT.glob("stacks/*/pixi.toml"))


def read_repodata(subdir: str) -> bytes:
    """Return the committed records of a subdir of conda-forge."""
    packed = (DATA / subdir / "repodata.json.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed)


@pytest.mark.parametrize("lock", [LOCK, DATA.parent / "pixi/pixi.lock"], ids=["root", "pixi"])
def test_the_bindings_write_what_they_read(lock: Path, tmp_path: Path) -> None:
    """Reading and writing a lock does not change it.

    The bindings have the lock format of pixi 0.77, which wrote the lock in tests/data/pixi.
    """
    LockFile.from_path(lock).to_path(tmp_path / "pixi.lock")
    assert (tmp_path / "pixi.lock").read_bytes() == lock.read_bytes()


def test_every_record_is_one_of_conda_forge() -> None:
    """Each locked package is equal to the committed record of conda-forge with the same URL."""
    records = {}
    for subdir in ("linux-64", "noarch"):
        data = json.loads(read_repodata(subdir))
        for name, record in (data["packages"] | data["packages.conda"]).items():
            records[f"{CONDA_FORGE}/{subdir}/{name}"] = record
    packages = yaml.safe_load(LOCK.read_text())["packages"]
    assert len(packages) > 200
    for package in packages:
        record = records[package["conda"]]
        for key in ("sha256", "md5", "size", "license", "depends"):
            assert package.get(key) == (record.get(key) or None), package["conda"]


def find_problems(folder: Path, text: str) -> list[str]:
    """Return the reasons why the committed lock does not satisfy a manifest.

    `pixi lock --check` would find the same problems. That command needs conda-forge, but this
    function solves with the locked records only.
    """
    (folder / "pixi.toml").write_text(text)
    manifest = Manifest.load(folder / "pixi.toml")
    locked = lockfile.read(LOCK)
    result = [f"environment {name}" for name in locked.keys() ^ manifest.environments.keys()]
    for name in locked.keys() & manifest.environments.keys():
        records = lockfile.records(locked[name]) if locked[name].platforms() else []
        lockfile.require_checkable(records, [CONDA_FORGE])
        solution = rattler.solve(
            [],
            manifest.environments[name],
            locked_packages=records,
            virtual_packages=virtual_packages(),
        )
        try:
            needed = {record.url for record in asyncio.run(solution)}
        except SolverError as error:
            result.append(f"{name}: {error}")
            continue
        for record in records:
            if record.url not in needed:
                result.append(f"{name}: {record.name.normalized}")
    return result


def test_the_lock_satisfies_its_manifest(tmp_path: Path) -> None:
    assert find_problems(tmp_path, MANIFEST.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('rich = "*"', 'rich = "<14"', "default: .*No candidates were found for rich <14"),
        ('rich = "*"', 'rich = "*"\nboltons = "*"', "No candidates were found for boltons"),
        ('git = "*"\n', "", "default: git"),
        ("lint = {", 'more = ["lint"]\nlint = {', "environment more"),
        ("no-default-feature = true", "no-default-feature = false", "lint: "),
    ],
)
def test_a_change_that_is_not_locked_is_seen(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    text = MANIFEST.read_text()
    assert old in text
    assert re.search(problem, "\n".join(find_problems(tmp_path, text.replace(old, new))))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('channel-priority = "disabled"', "channel-priority is not"),
        ('exclude-newer = "7d"', "[workspace] exclude-newer is not"),
        ('preview = ["pixi-build"]', "[workspace] preview is not"),
        ("[target.linux-64.dependencies]", "[top level] target is not"),
        ('[pypi-dependencies]\nx = "*"', "[pypi-dependencies] x is not"),
        ('[feature.x.pypi-dependencies]\nx = "*"', "[feature.x.pypi-dependencies] x is not"),
        ("[system-requirements]", "system-requirements is not supported"),
        ("[build-dependencies]", "build-dependencies is not supported"),
        ('[activation.env]\nX = "1"', "activation is not supported"),
        ('[feature.x]\nchannels = ["y"]', "[feature.x] channels is not"),
        ('[feature.x]\nplatforms = ["y"]', "[feature.x] platforms: y is not a linux-64 platform"),
        ('[feature.x]\nplatforms = ["linux-64", "osx-64"]', "[feature.x] platforms: osx-64 is no"),
        ('[feature.x]\nplatforms = "linux-64"', "feature.x.platforms is not"),
        ('[feature.x]\nsolve-group = "y"', "solve-group is not"),
        ("[feature.x.target.unix]", "[feature.x] target is not"),
        ("[feature.default]", "[feature.default]: this name is reserved"),
        ('[environments]\nx = { features = [], solve-group = "y" }', "x] solve-group is not"),
        ('[environments]\n"../x" = []', "lower-case letters"),
        ('[environments]\nx = ["y"]', "environments.x features: no feature has the name y"),
        ('[dependencies]\nx = { path = "." }', "path is not supported"),
        ('[dependencies]\nx = { git = "https://x" }', "git is not"),
        ('[dependencies]\nx = { channel = "y" }', "channel is not"),
        ("[dependencies]\nx = 1", "is missing, or is not a table"),
        ('[dependencies]\n"x y" = "*"', "no package has such a name"),
        ('channels = ["https://u:p@x.invalid/y"]', "credential"),
        ('channels = ["https://x.invalid/t/secret/y"]', "credential"),
        ('channels = [{ channel = "x" }]', "channels is not a list of names"),
        pytest.param(f"version = {'9' * 5000}", "is not TOML", id="a long integer"),
        pytest.param(f"version = {'[' * 300 + ']' * 300}", "is not TOML", id="a deep list"),
        ('[dependencies]\nrich = ">=1,<"', "rich = '>=1,<' is not a valid requirement"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "pixi.toml"
    channels = "" if "a list" in message or "credential" in message else "channels = []\n"
    file.write_text(f'[workspace]\n{channels}platforms = ["linux-64"]\n{line}\n')
    with pytest.raises(ForgeError, match=re.escape(message)) as error:
        Manifest.load(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


OURS = "https://a.invalid/x"
FORMS = {
    "basic": f'[workspace]\nchannels = ["{OURS}", "conda-forge"]',
    "literal": f"[workspace]\nchannels = ['{OURS}', 'conda-forge']",
    "escaped": '[workspace]\nchannels = ["https://a.invalid/\\u0078", "conda-forge"]',
    "lines": f'[workspace]\nchannels = ["""\n{OURS}""",  # ours\n "conda-forge",\n]',
    "dotted": f'workspace.channels = ["{OURS}", "conda-forge"]',
    "inline": f'workspace = {{ channels = ["{OURS}", "conda-forge"] }}',
}


def test_a_manifest_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "pixi.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(ForgeError) as error:
        Manifest.load(file)
    assert str(error.value) == f"{file} is not UTF-8: invalid start byte at byte 0"


def test_a_copy_asks_pypi_for_nothing(tmp_path: Path) -> None:
    """The driver's copy of a manifest requires nothing from PyPI.

    pixi would ask a server for the PyPI names of packages, and packages of the host base have none.
    """
    file = tmp_path / "pixi.toml"
    torch = 'pypi-dependencies]\ntorch = "*"\n'
    file.write_text(f'[workspace]\nchannels = ["x"]\n[{torch}[feature.a.{torch}')
    assert Manifest.load(file).environments == {"default": []}
    text = Manifest.load(file).localize({}, set())
    assert "pypi-dependencies" not in tomllib.loads(text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replacement", ["file:///b", "/home/jürgen/channel", "/a\\1"])
def test_a_channel_is_replaced_however_it_is_written(
    tmp_path: Path, form: str, replacement: str
) -> None:
    file = tmp_path / "pixi.toml"
    file.write_text(FORMS[form])
    text = Manifest.load(file).localize({OURS: replacement}, set())
    assert tomllib.loads(text)["workspace"] == {"channels": [replacement, "conda-forge"]}


def test_tables_by_channel_follow_their_channel(tmp_path: Path) -> None:
    file = tmp_path / "pixi.toml"
    file.write_text(f"{FORMS['basic']}\nconda-pypi-map.'{OURS}'.mapping-mode = 'replace'\n")
    file.write_text(Manifest.load(file).localize({OURS: "file:///b"}, set()))
    names = tomllib.loads(file.read_text())["workspace"]["conda-pypi-map"]
    assert names == {"file:///b": {"mapping-mode": "replace"}}


def test_requirements_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    """Of a manifest, only keys in tables of dependencies are left out or changed.

    Tasks, dates and texts may contain the same names.
    """
    file = tmp_path / "pixi.toml"
    file.write_text(
        '[workspace]\nchannels = []\ndescription = """\nalpha = 1\npython = 2\n"""\n'
        "[pypi-exclude-newer]\nalpha = '1970-01-01'\n[tasks]\nalpha = 'true'\n"
        "[dependencies]\n'alpha' = '*'\nbeta = '*'\n\"python\" = '>=3.11'\n"
        "[feature.more]\ndependencies.python = '*'\ndependencies.alpha = '*'\n[feature.none]\n"
    )
    before = tomllib.loads(file.read_text())
    after = tomllib.loads(Manifest.load(file).localize({}, {"alpha", "never"}, "3.13.*"))
    assert after.pop("dependencies") == {"beta": "*", "python": "3.13.*"}
    features = after.pop("feature")
    dependencies = {name: table["dependencies"] for name, table in features.items()}
    assert dependencies == {"more": {"python": "3.13.*"}, "none": {}}
    assert after == {key: before[key] for key in ("workspace", "pypi-exclude-newer", "tasks")}


def test_requirements_of_features_add_up(tmp_path: Path) -> None:
    """As in pixi, a feature's requirements are added to those of the other features.

    They replace none.
    """
    file = tmp_path / "pixi.toml"
    file.write_text(
        '[workspace]\nchannels = []\nplatforms = ["linux-64"]\n'
        '[dependencies]\npython = ">=3.11"\nalpha = "*"\n'
        '[feature.a.dependencies]\npython = "<3.13"\n[feature.b.dependencies]\nalpha = "*"\n'
        '[environments]\na = ["a", "b"]\nb = { features = ["b"], no-default-feature = true }\n'
    )
    assert Manifest.load(file).environments == {
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


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_an_environment_is_for_one_platform(manifest: Path) -> None:
    """The environment `emulated` is for any machine, and all others are for the GPU.

    Exactly one feature of each environment names a platform, because pixi uses the platforms that
    all features of an environment have in common.
    """
    data = tomllib.loads(manifest.read_text())
    assert {"default", "emulated"} <= data["environments"].keys()
    for name, features in data["environments"].items():
        tables = [data["feature"][feature] for feature in features]
        platforms = [table["platforms"] for table in tables if "platforms" in table]
        expected = "linux-64" if name == "emulated" else "strix-halo"
        assert platforms == [[expected]]


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_a_stack_is_for_every_machine(manifest: Path) -> None:
    """A copy of a stack has the same meaning on any machine.

    It states the GPU gfx1151, strict channel priority, and our channel before conda-forge.
    """
    workspace = tomllib.loads(manifest.read_text())["workspace"]
    assert workspace["channels"] == [PUBLISHED, "conda-forge"]
    assert workspace["channel-priority"] == "strict"
    assert workspace["requires-pixi"]
    assert workspace["name"] == manifest.parent.name
    strix_halo = {"name": "strix-halo", "platform": "linux-64", "amdgpu": "gfx1151"}
    assert workspace["platforms"] == [strix_halo, "linux-64"]
    assert Manifest.load(manifest).environments["default"]
    # The activation scripts of packages set variables, so that a copied manifest cannot lack them.
    assert not re.search(r"activation|\benv\b", manifest.read_text())
    assert len((manifest.parent / "README.md").read_text().splitlines()) <= 36
    assert not (manifest.parent / "pixi.lock").exists(), (
        "no stack may have a lock before packages are published"
    )


def test_a_stack_is_locked_for_the_gpu_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variant gpu_arch changes the GPU in a stack's platform and in the names of its kernels.

    The default is gfx1151. No package of kernels counts as left out.
    """
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    shutil.copytree(CHECKOUT / "recipes/bases", tmp_path / "recipes/bases")
    texts: dict[tuple[str, Path], str] = {}
    for gpu, variants in (("gfx1151", []), ("gfx1150", ["gpu_arch=gfx1150"])):
        for manifest in STACKS:
            shutil.copytree(
                manifest.parent, tmp_path / "stacks" / manifest.parent.name, dirs_exist_ok=True
            )
            ctx = Context(BaseName.CONDA_FORGE, None, variants, root=tmp_path)
            stack = Stack(ctx, manifest.parent.name)
            stack.write(PUBLISHED)
            text = (stack.copy.folder / "pixi.toml").read_text()
            data = tomllib.loads(text)
            assert data["workspace"]["platforms"][0]["amdgpu"] == gpu
            feature = data["feature"][manifest.parent.name]
            assert f"flash-attn-kernels-{gpu}" in feature["dependencies"]
            # The emulated device is a gfx1151 by default.
            assert text.count("emulate device ") == text.count(f"emulate device --target {gpu} ")
            texts[gpu, manifest] = text
    for manifest in STACKS:
        default = texts["gfx1151", manifest]
        changed = texts["gfx1150", manifest]
        assert "gfx1151" not in changed
        assert changed == default.replace("gfx1151", "gfx1150")
    assert "left out" not in capsys.readouterr().out
    variants_file = tmp_path / "variants.yaml"
    variants_file.write_text(variants_file.read_text().replace("gfx1151", "gfx1152"))
    stack = Stack(Context(BaseName.CONDA_FORGE, root=tmp_path), "attention")
    stack.write(PUBLISHED)
    assert "flash-attn-kernels-gfx1152" in (stack.copy.folder / "pixi.toml").read_text()


def test_the_copy_of_a_stack_has_the_programs_of_its_tasks(tmp_path: Path) -> None:
    """The copy has the programs of the tasks, because pixi runs a task in the manifest's folder."""
    for name in ("variants.yaml", "recipes", "stacks"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    programs = []
    for manifest in STACKS:
        stack = Stack(Context(BaseName.CONDA_FORGE, root=tmp_path), manifest.parent.name)
        stack.write(PUBLISHED)
        for name in re.findall(r'cmd = "python (\S+)"', manifest.read_text()):
            programs.append(name)
            copied = stack.copy.folder / name
            assert copied.read_bytes() == (manifest.parent / name).read_bytes()
    assert sorted(programs) == ["check.py", "check.py", "example.py", "image.py"]
    assert (tmp_path / "build/stacks/finetune/example.jsonl").exists()


def test_a_package_that_is_left_out_is_named_with_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the host base, packages without a build are left out, as are kernels for another GPU.

    `forge build` takes the names of recipes, so a message names the recipe of the package.
    """
    for name in ("variants.yaml", "recipes", "stacks"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    write_text(tmp_path / "build/host-base/noarch/repodata.json", "{}")
    ctx = Context(BaseName.HOST, variants=["gpu_arch=gfx1150"], root=tmp_path)
    ours = ["strix-emulate-hip", "flash-attn-kernels-gfx1150", "pytorch"]
    recipes = SimpleNamespace(owner=dict.fromkeys(ours, "a recipe"))
    built = SimpleNamespace(name="pytorch", build="hostbound_0")
    monkeypatch.setattr(Context, "recipes", recipes)
    monkeypatch.setattr(ctx.channel, "records", lambda: [built])
    Stack(ctx, "attention").write(None)
    printed = capsys.readouterr().out
    assert re.findall(r"left out (\S+): .*\(./forge build (\S+) ", printed) == [
        ("flash-attn-kernels-gfx1151", "flash-attn-kernels-gfx1151"),
        ("strix-emulate-hip", "strix-emulate"),
    ]


def test_pixi_runs_nothing_without_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forge run` refuses an environment that is not installed, with pixi as without it.

    pixi 0.77 would run the command with the system's Python (`pixi run --as-is`). In an environment
    that is installed, Python finds no modules of the driver.
    """
    (tmp_path / "stacks").symlink_to(CHECKOUT / "stacks")
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    monkeypatch.setattr(Stack, "pixi", lambda *_, **__: ["/bin/false"])
    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(Workspace, "run", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", "src")
    context = SimpleNamespace(obj=Context(root=tmp_path))
    with pytest.raises(
        ForgeError, match="attention is not installed: run ./forge install attention"
    ):
        stacks.run(context, "attention", ["true"])
    assert started == []
    (tmp_path / "build/stacks/attention/.pixi/envs/default/conda-meta").mkdir(parents=True)
    stacks.run(context, "attention", ["true"])
    ((program, words, variables),) = started
    assert (program, words) == ("/bin/false", ["/bin/false"])
    assert "PATH" in variables and "PYTHONPATH" not in variables


@pytest.mark.parametrize(
    ("printed", "is_refused"),
    [
        ("pixi 0.77.0", True),
        ("pixi 0.81.9", True),
        ("pixi 0.9.0", True),
        ("pixi 0.82.0", False),
        ("pixi 1.0.0", False),
        ("pixi 0.83.0-rc.1", False),
        ("something else", False),
    ],
)
def test_an_old_pixi_is_named_with_the_way_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, is_refused: bool
) -> None:
    """The driver refuses a pixi that is older than the manifest requires, before pixi runs.

    Unlike pixi's own error, the message mentions FORGE_NO_PIXI.
    """
    shutil.copy(CHECKOUT / "variants.yaml", tmp_path)
    shutil.copytree(CHECKOUT / "recipes/bases", tmp_path / "recipes/bases")
    shutil.copytree(CHECKOUT / "stacks", tmp_path / "stacks")
    pixi = tmp_path / "pixi"
    pixi.write_text(f"#!/bin/sh\necho {printed}\n")
    pixi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("FORGE_NO_PIXI", raising=False)
    stack = Stack(Context(BaseName.CONDA_FORGE, None, [], root=tmp_path), "attention")
    if is_refused:
        message = rf"{printed} is not >=0.82, which .*stacks/attention.*set FORGE_NO_PIXI=1"
        with pytest.raises(ForgeError, match=message):
            stack.pixi("lock")
        monkeypatch.setenv("FORGE_NO_PIXI", "1")
        assert stack.pixi("lock") == []
    else:
        for value in ("", "0"):
            monkeypatch.setenv("FORGE_NO_PIXI", value)
            assert stack.pixi("lock")[:2] == [str(pixi), "lock"]


def test_pixi_reads_the_configuration_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pixi uses the mirrors of the clone in each folder in which the driver calls it.

    pixi reads `.pixi/config.toml` only in the folder of the manifest. A configuration of the copy's
    own is not replaced.
    """
    for name in ("variants.yaml", "stacks"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    monkeypatch.setattr(stacks.shutil, "which", lambda _: "/bin/true")
    monkeypatch.delenv("FORGE_NO_PIXI", raising=False)
    stack = Stack(Context(root=tmp_path), "attention")
    other = tmp_path / "scratch"
    stack.pixi("install")
    assert not stack.copy.folder.exists()
    write_text(tmp_path / ".pixi/config.toml", "[mirrors]")
    stack.pixi("install")
    stack.pixi("lock", folder=other)
    for folder in (stack.copy.folder, other):
        assert (folder / ".pixi/config.toml").read_text() == "[mirrors]"
    (stack.copy.folder / ".pixi/config.toml").unlink()
    write_text(stack.copy.folder / ".pixi/config.toml", "# own")
    again = tmp_path / "scratch again"
    stack.pixi("lock", folder=again)
    for folder in (stack.copy.folder, again):
        assert (folder / ".pixi/config.toml").read_text() == "# own"


def test_pixi_reads_the_configuration_of_a_clone_that_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("variants.yaml", "stacks"):
        write_text(tmp_path / "old/.pixi/config.toml", "[mirrors]")
        (tmp_path / "old" / name).symlink_to(CHECKOUT / name)
    monkeypatch.setattr(stacks.shutil, "which", lambda _: "/bin/true")
    monkeypatch.delenv("FORGE_NO_PIXI", raising=False)
    for name in ("old", "new"):
        if name == "new":
            (tmp_path / "old").rename(tmp_path / "new")
        stack = Stack(Context(root=tmp_path / name), "attention")
        stack.pixi("install")
        assert (stack.copy.folder / ".pixi/config.toml").read_text() == "[mirrors]"


def test_the_versions_of_pixi_that_a_manifest_requires(tmp_path: Path) -> None:
    file = tmp_path / "pixi.toml"
    for value in (">=", ">=0.82,<", [1]):
        file.write_text(f"[workspace]\nchannels = []\nrequires-pixi = {json.dumps(value)}\n")
        with pytest.raises(ForgeError, match=r"pixi.toml: requires-pixi "):
            Manifest.load(file)
    for value in ("*", "0.82.*", ">=0.82,<2", "==0.90"):
        file.write_text(f"[workspace]\nchannels = []\nrequires-pixi = {json.dumps(value)}\n")
        assert Manifest.load(file).requires_pixi == value


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_a_stack_is_a_feature_that_can_be_copied(manifest: Path) -> None:
    """A stack's feature has all that another workspace needs, including torch's name on PyPI."""
    data = tomllib.loads(manifest.read_text())
    name = manifest.parent.name
    assert not data.keys() & {"dependencies", "tasks", "pypi-dependencies"}
    assert data["feature"][name]["pypi-dependencies"] == {"torch": "*"}
    assert data["environments"]["default"] == [name, "strix-halo"]
    assert all(name in features for features in data["environments"].values())
    assert Manifest.load(manifest).environments["default"]


@pytest.mark.parametrize("manifest", STACKS, ids=lambda path: path.parent.name)
def test_tasks_of_a_stack_exist(manifest: Path) -> None:
    from strix_validate.cli import app as validate

    commands = set()
    for each in validate.registered_commands:
        commands.add(each.name or each.callback.__name__)
    tasks = tomllib.loads(manifest.read_text())["feature"][manifest.parent.name]["tasks"]
    assert {"doctor", "check", "bench"} <= set(tasks)
    for task in tasks.values():
        assert set(task) == {"cmd", "description"}, (
            "a task must have no args: with args, it would refuse a program's own flags"
        )
        program, command = task["cmd"].split()[:2]
        assert task["description"]
        assert program in ("strix-validate", "strix-emulate", "vllm", "python")
        assert program != "strix-validate" or command in commands
        assert program != "python" or (manifest.parent / command).is_file()


PIXI = CHECKOUT / "tests" / "data" / "pixi"


def copy_locked(folder: Path, source: Path = PIXI) -> Workspace:
    """Copy a workspace that pixi 0.77 locked, and return the copy."""
    for name in ("pixi.toml", "pixi.lock"):
        (folder / name).write_bytes((source / name).read_bytes())
    return Workspace("app", folder)


def test_a_lock_that_pixi_wrote_is_taken(tmp_path: Path) -> None:
    """A lock of pixi is accepted, although it gives the platform another name."""
    app = copy_locked(tmp_path)
    assert "name: p1" in app.lock_file.read_text()
    assert len(app.locked("more")) == 3


def test_a_lock_for_several_machines_is_pixis(tmp_path: Path) -> None:
    app = copy_locked(tmp_path, PIXI / "several")
    shutil.copy(PIXI / "pixi.toml", tmp_path)
    with pytest.raises(ForgeError, match=r"cpu: .*locked for other platforms"):
        app.locked("cpu")


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
    app = copy_locked(tmp_path)
    head, packages = app.lock_file.read_text().split("packages:\n- ")
    use = f"      {entry.splitlines()[0]}\n"
    app.lock_file.write_text(f"{head}{use}packages:\n- {packages}{entry}")
    with pytest.raises(ForgeError, match=r"pixi\.lock: more: .*is not a conda package"):
        app.locked("more")


def test_a_deep_lock_is_not_parsed_for_ever(tmp_path: Path) -> None:
    """A lock with deeply nested lists is refused, since rattler's parser would need minutes.

    Many small lists are accepted.
    """
    lock = tmp_path / "pixi.lock"
    lock.write_text(f"version: 6\npackages: {'[' * 20_000}{']' * 20_000}\n")
    with pytest.raises(ForgeError, match="nested too deeply"):
        lockfile.read(lock)
    lock.write_text("version: 6\nenvironments: {}\npackages: []\n" + "# [] {}\n" * 1000)
    assert lockfile.read(lock) == {}
