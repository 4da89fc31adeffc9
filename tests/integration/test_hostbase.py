# SPDX-License-Identifier: BSD-3-Clause
"""The host base: wheels become packages correctly, the compilers resolve, nothing leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version
from support.project import CHECKOUT, MiniProject

from forge.channel.local import Channel
from forge.errors import NotAttempted
from forge.files import sha256_file
from forge.hostbase.base import _resolved
from forge.hostbase.wheels import PYTHON, Wheel, depends, match_spec, unpack_wheel


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
    from rattler import MatchSpec

    assert match_spec(Requirement(requirement)) == spec
    MatchSpec(spec)


def test_resolution_of_a_wheel_without_a_stated_hash(tmp_path: Path) -> None:
    """pip 23.0 gives none for a local file; an index that gives none cannot be trusted with one."""
    wheel = tmp_path / "demo-1.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    url = wheel.as_uri().replace("+", "%2B")
    metadata = {"name": "demo", "version": "1.0+cpu"}
    entry = {"download_info": {"url": url, "archive_info": {}}, "metadata": metadata}
    assert _resolved(entry) == (wheel.name, "1.0+cpu", "demo", sha256_file(wheel))
    entry["download_info"]["url"] = "https://index.invalid/demo-1.0-py3-none-any.whl"
    with pytest.raises(NotAttempted, match="no sha256"):
        _resolved(entry)


def wheel_metadata(name: str, *requires: str) -> Wheel:
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
    text += "".join(f"Requires-Dist: {line}\n" for line in requires)
    return Wheel(None, Version("1"), "", Metadata.from_email(text, validate=False))


def test_markers_and_extras() -> None:
    """Markers are decided here; an extra brings what it asks for, and only where it is asked."""
    wheels = {
        "web": wheel_metadata(
            "web", "core", 'tls-lib>=2; extra == "tls"', 'never; extra == "other"',
            'more; extra == "tls" and python_version < "3"',
        ),
    }  # fmt: skip
    asks = wheel_metadata(
        "app", "web[tls]>=1", 'win-only; sys_platform == "win32"', 'dev-only; extra == "dev"',
        f'here; python_version == "{PYTHON}"',
    )  # fmt: skip
    assert depends(asks.metadata, wheels) == ["here", "tls-lib >=2", "web >=1"]
    assert depends(wheels["web"].metadata, wheels) == ["core"]


def test_unpack_wheel(tmp_path: Path) -> None:
    """Console scripts run from any prefix, .data trees land where PEP 427 says."""
    files = {
        "demo/__init__.py": "def main():\n    import sys; print(sys.executable)\n",
        "demo-1.0.data/scripts/plain": "#!python\nprint('plain script')\n",
        "demo-1.0.data/data/share/demo.txt": "data\n",
        "demo-1.0.data/headers/demo.h": "/* header */\n",
        "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
        "demo-1.0.dist-info/entry_points.txt": "[console_scripts]\ndemo = demo:main\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for name, text in files.items()
    )
    file = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("demo-1.0.dist-info/RECORD", record + "demo-1.0.dist-info/RECORD,,\n")
    prefix = tmp_path / "made"
    unpack_wheel(file, prefix)
    assert (prefix / "share/demo.txt").read_text() == "data\n"
    assert list(prefix.glob("include/**/demo.h"))
    modules = prefix / "lib" / f"python{PYTHON}" / "site-packages"
    assert list(modules.glob("demo/__pycache__/*.pyc"))
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


def test_base_channel_is_host_bound_and_recorded() -> None:
    folder = CHECKOUT / "build" / "host-base"
    records = Channel(folder).records()
    assert {"python", "python_abi", "pytorch", "hostgcc_linux-64", "numpy"} <= {
        record.name for record in records
    }
    assert all(record.build.startswith("hostbound_") for record in records)
    (torch,) = [record for record in records if record.name == "pytorch"]
    assert torch.version == "2.13.0"
    assert torch.build.startswith(("hostbound_cpu_", "hostbound_cuda_"))
    wheels = json.loads((folder / "base.json").read_text())["wheels"]
    assert all(len(wheel["sha256"]) == 64 and wheel["purl"] for wheel in wheels)


def test_compilers_resolve_unchanged(project: MiniProject) -> None:
    """The recipe says compiler('c') and stdlib('c') as on conda-forge, and gets the machine's."""
    recipe = project.recipe("hello", test="hello | grep -q 42 && hello-cxx | grep -q 42")
    text = (recipe / "recipe.yaml").read_text().replace("  noarch: generic\n", "")
    names = [f'"${{{{ {name} }}}}"' for name in ("compiler('c')", "compiler('cxx')", "stdlib('c')")]
    build = f"  build: [{', '.join(names)}]"
    (recipe / "recipe.yaml").write_text(text.replace("requirements:", f"requirements:\n{build}"))
    (recipe / "h.c").write_text('#include <stdio.h>\nint main(void) { puts("42"); return 0; }\n')
    (recipe / "h.cc").write_text("#include <iostream>\nint main() { std::cout << 42; }\n")
    (recipe / "build.sh").write_text(
        'mkdir -p "$PREFIX/bin"\ncp "$RECIPE_DIR"/h.c* .\n'
        '"$CC" $CFLAGS h.c $LDFLAGS -o "$PREFIX/bin/hello"\n'
        '"$CXX" $CXXFLAGS h.cc $LDFLAGS -o "$PREFIX/bin/hello-cxx"\n'
    )
    project.forge("build-all")
    assert len(list(project.channel.glob("linux-64/hello-*.conda"))) == 1


def test_publish_refuses_host_bound(project: MiniProject, tmp_path: Path) -> None:
    project.recipe("alpha")
    project.forge("build-all")
    (note,) = (project.channel / "forge").glob("*_0.json")
    assert json.loads(note.read_text())["tests"] == 1
    error = project.forge("publish", "--to", str(tmp_path / "out"), code=2).stderr
    assert "host-bound" in error and not list((tmp_path / "out").glob("**/*.conda"))


def test_renamed_package_is_refused(project: MiniProject, tmp_path: Path) -> None:
    """Another file name does not hide the mark, which is in the package's own metadata too."""
    project.recipe("alpha")
    project.forge("build-all")
    (file,) = project.channel.glob("noarch/*.conda")
    renamed = file.rename(file.with_name("alpha-1.0-h1234567_0.conda"))
    (project.channel / "noarch/repodata.json").unlink()
    Channel(project.channel).index()
    error = project.forge("publish", "--to", str(tmp_path / "out"), code=2).stderr
    assert f"{renamed} calls itself {file.name}" in error
