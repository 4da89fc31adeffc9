# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the host base: wheels, requirements, the lock and the record. No base is made."""

import base64
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version
from rattler import MatchSpec
from rattler_build import assemble_package
from support.commands import expect_error
from support.mutants import Tally, texts, trees
from support.project import CHECKOUT, MiniProject, module, processes_in
from support.wheels import write_wheel

from forge import bases
from forge.building.jobs import run_job
from forge.conda.local import LocalChannel
from forge.errors import Failed, ForgeError
from forge.files import hold, move_whole, sha256_file, write_text
from forge.hostbase import base as hostbase
from forge.hostbase import wheels
from forge.hostbase.base import LOCK, HostBaseMaker
from forge.hostbase.wheels import PYTHON, Conversion, Wheel, list_depends, match_spec, unpack_wheel
from forge.project import Project
from forge.sources.cache import PYPI_URL, Source


@pytest.mark.parametrize(
    ("requirement", "spec"),
    [
        ("NumPy>=1.26,<3", "numpy <3,>=1.26"),
        ("torch==2.13.0", "pytorch ==2.13.0"),
        ("typing_extensions", "typing_extensions"),
        ("triton~=3.8.0", "triton ~=3.8.0"),
        ("a.b_c!=1.3.*", "a-b-c !=1.3.*"),
        ("x===1.0", "x ==1.0"),
    ],
)
def test_match_spec(requirement: str, spec: str) -> None:
    assert match_spec(Requirement(requirement)) == spec
    MatchSpec(spec)


def wheel_metadata(name: str, *requires: str) -> Wheel:
    """Return a wheel that has only metadata, with these requirements."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
    text += "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata = Metadata.from_email(text, validate=False)
    return Wheel(name, Path(), "", "", Version("1"), "", metadata)


def test_markers_and_extras() -> None:
    """Markers are evaluated for this Python. An extra adds its requirements if it is required."""
    web = wheel_metadata(
        "web",
        "core",
        'tls-lib>=2; extra == "tls"',
        'never; extra == "other"',
        'more; extra == "tls" and python_version < "3"',
    )
    others = {"web": web}
    app = wheel_metadata(
        "app",
        "web[tls]>=1",
        'win-only; sys_platform == "win32"',
        'dev-only; extra == "dev"',
        f'here; python_version == "{PYTHON}"',
    )
    assert list_depends(app.metadata, others) == ["here", "tls-lib >=2", "web >=1"]
    assert list_depends(web.metadata, others) == ["core"]


REQUIREMENTS = (
    "core",
    'cuda-toolkit[cublas]==13; platform_system == "Linux"',
    "Nvidia_NCCL.cu13==2.29",
)


def test_what_requires_nvidias_wheels_gets_stubs(tmp_path: Path) -> None:
    """Without NVIDIA's wheels, a package whose wheel requires them depends on a package of stubs.

    Then the metadata that is unpacked from this wheel must not require NVIDIA's wheels, because
    `pip check` would report them as missing.
    """
    file = write_wheel(tmp_path, "torch", requires=REQUIREMENTS)
    purl = PackageURL("pypi", None, "torch", "1.0", {"file_name": file.name})
    torch = Wheel.read(file, Source(f"{PYPI_URL}/{file.name}", "0" * 64, purl), "")
    without_nvidia = torch.plan_conversion({})
    assert without_nvidia.depends == [f"python {PYTHON}.*", "core", wheels.CUDA_STUBS]
    assert without_nvidia.left_out == ["cuda-toolkit", "nvidia-nccl-cu13"]
    others = {name: wheel_metadata(name) for name in ("cuda-toolkit", "nvidia-nccl-cu13")}
    with_nvidia = torch.plan_conversion(others)
    assert with_nvidia.depends[1:] == ["core", "cuda-toolkit ==13", "nvidia-nccl-cu13 ==2.29"]
    assert not with_nvidia.left_out and with_nvidia.build != without_nvidia.build

    for name, conversion in (("alone", without_nvidia), ("beside", with_nvidia)):
        unpack_wheel(file, tmp_path / name, conversion.left_out)
        (info,) = (tmp_path / name).rglob("*.dist-info")
        (distribution,) = distributions(path=[str(info.parent)])
        required = [Requirement(text) for text in distribution.requires or []]
        expected = REQUIREMENTS[:1] if name == "alone" else REQUIREMENTS
        assert required == [Requirement(text) for text in expected]
        (row,) = [row for row in distribution.files or [] if row.name == "METADATA"]
        digest = hashlib.sha256((info / "METADATA").read_bytes()).digest()
        assert row.hash
        assert row.hash.value == base64.urlsafe_b64encode(digest).decode().rstrip("=")
        assert row.size == (info / "METADATA").stat().st_size


@pytest.mark.parametrize(("setting", "is_set"), [("", False), ("0", False), ("1", True)])
def test_nvidias_wheels_are_fetched_only_if_asked_for(
    machine: HostBaseMaker, monkeypatch: pytest.MonkeyPatch, setting: str, is_set: bool
) -> None:
    """NVIDIA's wheels are fetched with FORGE_NVIDIA_WHEELS, or if requirements.in names them.

    With the variable, the key of the base changes, so that another base is made.
    """
    names = ("torch", "triton", "nvidia-cublas", "cuda-bindings", "nvidia-ml-py")
    lines = [f"{name}==1 --hash=sha256:{'0' * 64}\n" for name in names]
    (machine.recipe / LOCK).write_text("".join(lines))
    (machine.recipe / "requirements.in").write_text("torch\nnvidia_ml.py\n")
    monkeypatch.delenv("FORGE_NVIDIA_WHEELS", raising=False)
    plain = HostBaseMaker(machine.project, machine.base)
    monkeypatch.setenv("FORGE_NVIDIA_WHEELS", setting)
    host = HostBaseMaker(machine.project, machine.base)
    assert (host.key == plain.key) == (not is_set)
    fetched: list[str] = []

    def fetch_wheels(pins: list, *_: object) -> list:
        fetched.extend(pin.name for pin in pins)
        return []

    monkeypatch.setattr(hostbase, "fetch_wheels", fetch_wheels)
    assert not list(host._fetch_wheels(print))
    expected = set(names)
    if not is_set:
        expected -= {"nvidia-cublas", "cuda-bindings"}
    assert set(fetched) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a==$absent", "requirements.in uses $absent, for which no variants file has a value"),
        ("a==$", "requirements.in: Invalid placeholder"),
        ("!!", "requirements.in: '!!' is not a requirement"),
    ],
)
def test_a_malformed_list_of_requirements(machine: HostBaseMaker, line: str, message: str) -> None:
    (machine.recipe / "requirements.in").write_text(f"# comment\n{line}\n")
    with pytest.raises(ForgeError) as raised:
        machine.names()
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "extra: 1", "extra: {cost: []}", "extra:"])
def test_a_host_base_without_a_cost(machine: HostBaseMaker, text: str) -> None:
    (machine.recipe / "recipe.yaml").write_text(text)
    with pytest.raises(ForgeError, match=r"host/recipe\.yaml.*extra\.cost"):
        _ = machine.cost


def test_unpack_wheel(tmp_path: Path) -> None:
    """Console scripts run from any prefix. Files in .data are installed as PEP 427 defines."""
    file = write_wheel(
        tmp_path,
        "demo",
        files={
            "demo/__init__.py": "def main():\n    import sys; print(sys.executable)\n",
            "demo/tests/test_demo.py": "",
            "demo-1.0.data/scripts/plain": "#!python\nprint('plain script')\n",
            "demo-1.0.data/data/share/demo.txt": "data\n",
            "demo-1.0.data/headers/demo.h": "/* header */\n",
            "demo-1.0.dist-info/entry_points.txt": "[console_scripts]\ndemo = demo:main\n",
        },
    )
    prefix = tmp_path / "test" / "prefix"
    unpack_wheel(file, prefix)
    assert (prefix / "share/demo.txt").read_text() == "data\n"
    assert list(prefix.glob("include/**/demo.h"))
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    assert [file.parts[-3] for file in modules.rglob("*.pyc")] == ["demo"], (
        "the wheel's tests must not be compiled"
    )
    assert (modules / "demo-1.0.dist-info/INSTALLER").read_text() == "conda"

    moved = tmp_path / "else where"
    prefix.rename(moved)
    (moved / "bin" / "python").symlink_to(sys.executable)
    environment = os.environ | {"PYTHONPATH": str(moved / modules.relative_to(prefix))}
    for script, expected in (("demo", str(moved / "bin" / "python")), ("plain", "plain script")):
        done = subprocess.run(
            [moved / "bin" / script], capture_output=True, text=True, check=True, env=environment
        )
        assert expected in done.stdout


@pytest.mark.parametrize("name", ["sysconfig.py", "sysconfig/__init__.py"])
def test_debians_python_installs_into_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The copy of Debian's sysconfig is changed so that Python installs into its own prefix.

    sysconfig is a package since Python 3.13. Other Pythons than Debian's are not changed.
    """
    copier = module(CHECKOUT / "recipes/bases/host/copy_interpreter.py")
    stdlib = Path(copier.sysconfig.get_path("stdlib"))
    monkeypatch.setattr(copier.sysconfig, "__file__", str(stdlib / name))
    write_text(tmp_path / name, "")
    copier.undo_debian(tmp_path)
    assert not (tmp_path / "dist-packages").exists()
    write_text(tmp_path / name, "# DEB_PYTHON_INSTALL_LAYOUT\nprefix_scheme = 'posix_local'\n")
    copier.undo_debian(tmp_path)
    assert "prefix_scheme = 'posix_prefix'" in (tmp_path / name).read_text()
    assert (tmp_path / "dist-packages").readlink() == Path("site-packages")
    write_text(tmp_path / name, "# DEB_PYTHON_INSTALL_LAYOUT\n")
    with pytest.raises(SystemExit, match="has changes by Debian that this program does not know"):
        copier.undo_debian(tmp_path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostBaseMaker:
    """A host base that is not made yet, on a machine that seems to have compilers."""
    project = MiniProject(tmp_path)
    (tmp_path / "build" / "host-base").unlink()
    monkeypatch.setattr(hostbase.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hostbase.subprocess, "getoutput", lambda _: "14")
    checkout = Project.at(project.root)
    return HostBaseMaker(checkout, bases.load(checkout, "host"))


def pin(machine: HostBaseMaker, *wheels: Path) -> None:
    """Replace the requirements and the lock of the base by ones for these wheels only."""
    requirements = ""
    lock = ""
    for file in wheels:
        name, version, *_ = file.name.split("-")
        requirements += f"{name}\n"
        lock += f"{name}=={version} --hash=sha256:{sha256_file(file)}\n"
    (machine.recipe / LOCK).write_text(lock)
    (machine.recipe / "requirements.in").write_text(requirements)


def test_two_checkouts_that_share_a_host_base(
    machine: HostBaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkout reports that it waits for the first, and then has nothing to make."""
    messages: list[str] = []
    is_waiting = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        is_waiting.set()

    def make(*_: object) -> None:
        pytest.fail("the base was made twice")

    monkeypatch.setattr(HostBaseMaker, "_make", make)
    with hold(machine.folder, "making the host base in"):
        second = threading.Thread(target=machine.make, args=(say, None))
        second.start()
        assert is_waiting.wait(300), (
            "the second caller must notice that the first one makes the base"
        )
        machine._write_sealed("base.json", packages={})
    second.join(300)
    assert not second.is_alive()
    process = os.getpid()
    assert messages == [
        f"process {process} is making the host base in {machine.folder}. Waiting for it"
    ]


def test_an_interrupted_host_base_is_made_by_the_next(
    machine: HostBaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(HostBaseMaker, "_make", lambda *_: calls.append("make"))
    machine.make(print, None)
    assert calls == ["make"]
    assert not machine.is_current()
    machine._write_sealed("base.json", packages={})
    machine.make(print, None)
    assert calls == ["make"]
    with monkeypatch.context() as patch:
        patch.setattr(hostbase.subprocess, "getoutput", lambda _: "15")
        next_maker = HostBaseMaker(machine.project, machine.base)
        assert not next_maker.is_current(), "with another compiler, the base must not be current"
    (machine.recipe / "requirements.in").write_text("torch==${pytorch}\n")
    next_maker = HostBaseMaker(machine.project, machine.base)
    assert not next_maker.is_current(), "with other requirements, the base must not be current"


def test_only_the_code_that_makes_packages_names_them() -> None:
    """A package's name has a hash of wheels.py, which makes the packages, and of no other code.

    With a hash of more code, a gigabyte of packages would be made again after a message is edited.
    """
    assert sha256_file(Path(wheels.__file__)) == wheels.CODE
    assert "assemble_package" not in Path(hostbase.__file__).read_text()


def test_a_lock_that_is_older_than_the_requirements(machine: HostBaseMaker, tmp_path: Path) -> None:
    """A lock that does not satisfy requirements.in is refused before anything is fetched."""
    pin(machine, write_wheel(tmp_path, "alpha"))
    (machine.recipe / "requirements.in").write_text("alpha>=2\n")
    with pytest.raises(ForgeError, match=r"pins alpha 1\.0, but alpha>=2 is required"):
        HostBaseMaker(machine.project, machine.base).make(print, None)


def test_no_compiler(tmp_path: Path) -> None:
    """A missing compiler is reported before anything is downloaded."""
    project = MiniProject(tmp_path)
    (tmp_path / "build" / "host-base").unlink()
    project.recipe("alpha")
    error = expect_error("build-all", **project.environment | {"PATH": str(tmp_path)})
    assert "needs gcc and g++" in str(error)
    assert "apt-get" in str(error)
    assert error.exit_code == 3


def test_the_recipe_runs_programs_whose_paths_have_spaces() -> None:
    """The recipe's commands work if the paths in its environment variables have spaces.

    A user's Python may be in any folder.
    """
    text = (CHECKOUT / "recipes/bases/host/recipe.yaml").read_text()
    replaced = re.sub(r"\$\{\{ env\.get\(\"(FORGE_\w+)\".*?\) \}\}", r"/my folder/\1", text)
    commands: list[list[str]] = []
    for output in yaml.safe_load(replaced)["outputs"]:
        script = output["build"].get("script", [])
        lines = script["content"] if "env" in script else script
        commands += [shlex.split(line) for line in lines if "/my folder/" in line]
    assert [command[:2] for command in commands] == [["/my folder/FORGE_PYTHON", "-I"]] * 2
    assert commands[1][3:5] == ["/my folder/FORGE_TORCH", "/my folder/FORGE_PYELFTOOLS"]


@pytest.fixture
def small(machine: HostBaseMaker, monkeypatch: pytest.MonkeyPatch) -> HostBaseMaker:
    """A finished host base of one package. Each time it is made, its bytes are different."""

    def build(self: HostBaseMaker, *_: object) -> set[str]:
        scratch = self.project.build / "scratch"
        (scratch / "tree").mkdir(parents=True, exist_ok=True)
        (scratch / "tree" / "text").write_bytes(os.urandom(999))
        package = assemble_package(
            "python", "3", "linux-64", "hostbound_h1234567_0", scratch, files_dir=scratch / "tree"
        )
        move_whole(package.path, self.folder / "linux-64" / package.path.name)
        return {package.path.name}

    monkeypatch.setattr(HostBaseMaker, "_build_recipe", build)
    pin(machine)
    machine.make(lambda _: None, None)
    assert HostBaseMaker(machine.project, machine.base).is_current(), (
        "the next command must be able to use the base"
    )
    return machine


def cut(path: Path) -> None:
    """Remove the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "empty base.json": ("base.json", lambda path: path.write_bytes(b"")),
    "base.json of another kind": ("base.json", lambda path: path.write_bytes(b"[]")),
    "base.json that is no text": ("base.json", lambda path: path.write_bytes(b"\xff{")),
    "no base.json": ("base.json", Path.unlink),
    "cut base.json": ("base.json", cut),
    "cut index": ("linux-64/repodata.json", cut),
    "empty index": (
        "linux-64/repodata.json",
        lambda path: path.write_text('{"packages.conda": {}}'),
    ),
    "no index": ("linux-64/repodata.json", Path.unlink),
    "cut package": ("linux-64/python-3-hostbound_h1234567_0.conda", cut),
    "lost package": ("linux-64/python-3-hostbound_h1234567_0.conda", Path.unlink),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_base_is_found_and_made_anew(small: HostBaseMaker, case: str) -> None:
    name, damage = DAMAGE[case]
    damage(small.folder / name)
    assert not small.is_current()
    small.make(lambda _: None, None)
    assert small.is_current()
    (record,) = LocalChannel(small.folder).records()
    assert record.sha256 == sha256_file(LocalChannel(small.folder).path(record))


def test_wheels_become_packages(machine: HostBaseMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are converted in parallel. A failure names the log and keeps the finished packages."""
    monkeypatch.setattr(HostBaseMaker, "_build_recipe", lambda *_: set())
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT / "src"))
    run = functools.partial(run_job, machine.project, 2, lambda _: None, threading.Event())

    def make(*wheels: Path) -> None:
        for wheel in wheels:
            source = machine.project.sources / sha256_file(wheel)
            source.mkdir(exist_ok=True)
            shutil.copy(wheel, source)
        pin(machine, *wheels)
        next_maker = HostBaseMaker(machine.project, machine.base)
        next_maker.make(lambda _: None, run)
        assert next_maker.is_current()

    machine.project.sources.mkdir(parents=True, exist_ok=True)
    folder = machine.project.root
    alpha = write_wheel(folder, "alpha", files={"alpha.py": "ONE = 1\n"})
    future = {"beta-1.0.dist-info/WHEEL": "Wheel-Version: 9.0\nRoot-Is-Purelib: true\n"}
    with pytest.raises(Failed, match=r"Incompatible Wheel-Version 9(?s:.*)work folder"):
        make(alpha, write_wheel(folder, "beta", files={"beta.py": ""} | future))
    (first,) = machine.folder.glob("linux-64/alpha-1.0-hostbound_py*_0.conda")
    inode = first.stat().st_ino
    make(alpha, write_wheel(folder, "beta", files={"beta.py": ""}))
    assert first.stat().st_ino == inode
    assert {record.name for record in LocalChannel(machine.folder).records()} == {"alpha", "beta"}
    index = machine.folder / "linux-64" / "repodata.json"
    written = json.loads(index.read_bytes())["packages.conda"]
    index.unlink()
    LocalChannel(machine.folder).index()
    for name, record in json.loads(index.read_bytes())["packages.conda"].items():
        assert written[name].items() <= record.items(), (
            "our record must agree with the one that rattler reads from the package"
        )
        assert {"depends", "sha256", "size"} <= written[name].keys()
    assert not machine.output.exists()


CONVERT = """
import json, sys, threading
from pathlib import Path
from forge.building.jobs import run_job
from forge.project import Project
root, job = Path(sys.argv[1]), json.loads(sys.argv[2])
run_job(Project.at(root), 2, lambda _: None, threading.Event(), job, root / "log")
"""


# A sitecustomize.py with which a conversion stops halfway, on a machine of any speed.
HANGS = """
import py_compile, time
compile = py_compile.compile
def hang(file, *words, **options):
    if file.endswith("long.py"):
        time.sleep(600)
    return compile(file, *words, **options)
py_compile.compile = hang
"""


def wait_until(is_true: Callable[[], object]) -> None:
    while not is_true():
        time.sleep(0.02)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_conversion(machine: HostBaseMaker, tmp_path: Path, kind: signal.Signals) -> None:
    """A conversion that is killed leaves no process and no part of a package.

    The next run makes the missing package.
    """
    subdir = tmp_path / "linux-64"
    output = tmp_path / "out"
    conversions = []
    for name in ("long", "short"):
        file = write_wheel(tmp_path, name, files={f"{name}.py": ""})
        conversions.append(asdict(Conversion(str(file), name, "1.0", "0", [], None, "")))
    subdir.mkdir()
    job = {
        "action": "convert",
        "subdir": str(subdir),
        "output_dir": str(output),
        "wheels": conversions,
    }
    command = [sys.executable, "-c", CONVERT, str(machine.project.root), json.dumps(job)]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "src")}
    work = tmp_path / "work"
    work.mkdir()
    write_text(tmp_path / "hangs/sitecustomize.py", HANGS)
    path = f"{tmp_path / 'hangs'}{os.pathsep}{environment['PYTHONPATH']}"

    def is_halfway() -> bool:
        # Use os.walk, because a glob would fail if the conversion removes a folder during the walk.
        is_unpacked = any("long.py" in files for _, _, files in os.walk(output))
        return is_unpacked and bool(list(subdir.glob("short-*")))

    with subprocess.Popen(
        command, cwd=work, env=environment | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL
    ) as child:
        wait_until(lambda: child.poll() is not None or is_halfway())
        child.send_signal(kind)
    wait_until(lambda: not processes_in(work))
    assert {file.name for file in subdir.iterdir()} == {"short-1.0-0.conda"}
    subprocess.run(command, cwd=work, env=environment, check=True)
    assert {file.name for file in subdir.iterdir()} == {"short-1.0-0.conda", "long-1.0-0.conda"}


def test_mutants_of_what_a_run_left(
    small: HostBaseMaker, record_property: Callable[[str, object], None]
) -> None:
    """A record that the driver did not write in this form is read as an empty record."""
    name = "base.json"
    file = small.folder / name
    tally = Tally(name, record_property)
    valid = file.read_bytes()
    record_before = small._read_sealed(name)
    assert record_before
    allowed = (record_before, {})
    for data in texts(valid, 8, 70):
        file.write_bytes(data)
        tally.give(lambda: small._read_sealed(name), lambda record: record in allowed, data)
    for tree in trees(json.loads(valid), 8, 70):
        file.write_text(json.dumps(tree))
        tally.give(lambda: small._read_sealed(name), lambda record: record in allowed, tree)
    file.write_bytes(valid)
    assert small._read_sealed(name) == record_before


def test_to_name_a_base_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the packages of a base runs no program and does not change the environment."""
    project = Project.at(MiniProject(tmp_path).root)
    before = dict(os.environ)
    monkeypatch.setattr(hostbase.subprocess, "run", None)
    names = HostBaseMaker(project, bases.load(project, "host")).names()
    assert {"pytorch", "numpy", "python", "hostgcc_linux-64"} <= names
    assert dict(os.environ) == before


def test_extras_of_other_wheels_count() -> None:
    """A package's file name changes with the requirements of an extra that it requires.

    The requirements of the extra are in the metadata of another wheel.
    """
    app = wheel_metadata("app", "web[tls]")
    file_names = set()
    for requirement in ("one", "two"):
        web = wheel_metadata("web", f'{requirement}; extra == "tls"')
        file_names.add(app.plan_conversion({"web": web}).file_name)
    assert len(file_names) == 2


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    file = tmp_path / "demo-1.0-py3-none-any.whl"
    file.write_bytes(b"an error page")
    with pytest.raises(ForgeError, match="is not a wheel"):
        Wheel.read(file, Source(f"x/{file.name}", "0" * 64), "")
    # As pip does, accept a wheel whose metadata has a field of a later metadata version.
    metadata = "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nLicense-Expression: MIT\n"
    file = write_wheel(tmp_path, "demo", files={"demo-1.0.dist-info/METADATA": metadata})
    assert Wheel.read(file, Source(f"x/{file.name}", "0" * 64), "").name == "demo"
