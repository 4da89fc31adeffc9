# SPDX-License-Identifier: BSD-3-Clause
"""The package checks accept correct shared libraries and refuse faulty ones.

gcc links the libraries of these tests.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support.elf_files import GFX1100, GOOD, TARGET, bundle, code_object, library
from support.recipe_checks import RECIPES, run

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
from checks import binaries

AMDSMI = RECIPES / "amdsmi" / "__init__.py"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "env/lib").mkdir(parents=True)
    return tmp_path / "env"


# --- checks.binaries


def test_images_of_a_library(prefix: Path) -> None:
    path = library(prefix, "libtorch_hip.so", GOOD)
    assert binaries.check([path], prefix, 1, False) == []
    (reason,) = binaries.check([path], prefix, 2, False)
    assert "1 device images in all, expected at least 2" in reason
    path = library(prefix, "libtorch_hip.so", bundle({TARGET: code_object(GFX1100)}))
    (reason,) = binaries.check([path], prefix, 0, False)
    assert reason.startswith(str(path)) and "is for processor 0x41" in reason


def test_libraries_of_a_package(tmp_path: Path) -> None:
    """The check reads a package's libraries without importing it, and refuses an absent package."""
    package = tmp_path / "compiled"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    library(tmp_path, "a.so", GOOD, folder="compiled/deep")
    command = "-m", "checks.binaries", tmp_path
    done = run(*command, "compiled", "--min-images", "1", path=tmp_path)
    assert "1 images for gfx1151" in done.stdout, done.stderr
    library(tmp_path, "a.so", bundle({TARGET: code_object(GFX1100)}), folder="compiled/deep")
    done = run(*command, "compiled", path=tmp_path)
    assert done.returncode == 1 and "is for processor 0x41" in done.stderr
    done = run(*command, "absent", path=tmp_path)
    assert done.returncode == 1 and "no Python package" in done.stderr


def test_closure(prefix: Path) -> None:
    """The check follows the requirements of libtorch_hip to AOTriton and to the ROCm SDK."""
    library(prefix, "libamdhip64.so.7", folder="opt/rocm/lib")
    library(
        prefix,
        "libaotriton_v2.so.0.12.0",
        needs=("libamdhip64.so.7",),
        rpath="$ORIGIN/../opt/rocm/lib",
    )
    hip = library(prefix, "libtorch_hip.so", needs=("libaotriton_v2.so.0.12.0",))
    assert binaries.check([hip], prefix, 0, True) == []
    other = library(prefix, "libc10.so")
    assert "no file needs libaotriton_v2" in binaries.check([other], prefix, 0, True)[0]
    # AOTriton requires this library, and libtorch_hip does not.
    (prefix / "opt/rocm/lib/libamdhip64.so.7").unlink()
    (reason,) = binaries.check([hip], prefix, 0, True)
    assert reason.startswith(str(prefix / "lib/libaotriton")) and "needs libamdhip64" in reason


def test_libraries_of_other_packages(prefix: Path) -> None:
    """The check does not judge the search paths of libraries from other packages.

    A library of another package may require a library that is not on its search path, if our
    library loads the required library first.
    """
    library(prefix, "libstdc++.so.6")
    library(
        prefix,
        "libroctx64.so.4",
        needs=("libstdc++.so.6",),
        rpath="/opt/rocm/lib",
        folder="opt/rocm/lib",
    )
    needs = ("libroctx64.so.4", "libstdc++.so.6")
    rpath = "$ORIGIN:$ORIGIN/../opt/rocm/lib"
    path = library(prefix, "libtorch_cpu.so", needs=needs, rpath=rpath)
    assert binaries.check([path], prefix, 0, False) == []
    path = library(prefix, "libtorch_cpu.so", needs=("libroctx64.so.4",), rpath=rpath)
    (reason,) = binaries.check([path], prefix, 0, False)
    assert "libroctx64.so.4: needs libstdc++.so.6" in reason


def test_aotriton_of_another_folder(prefix: Path) -> None:
    """libtorch_hip must load the AOTriton in lib/, because a copy elsewhere finds no images."""
    library(prefix, "libaotriton_v2.so.0.12.0", folder="lib/torch")
    needs = ("libaotriton_v2.so.0.12.0",)
    hip = library(prefix, "libtorch_hip.so", needs=needs, rpath="$ORIGIN/torch")
    assert "no file needs libaotriton_v2" in binaries.check([hip], prefix, 0, True)[0]


@pytest.mark.parametrize(
    ("rpath", "message"),
    [
        ("$ORIGIN:/home/build/work/build/lib", "does not begin with $ORIGIN"),
        ("/opt/rocm/lib", "does not begin with $ORIGIN"),
        ("$ORIGIN/../../other", "out of the environment"),
        ("$ORIGIN/../opt/aotriton/lib", "exists only in builds"),
    ],
)
def test_wrong_rpath(prefix: Path, rpath: str, message: str) -> None:
    path = library(prefix, "libc10.so", rpath=rpath)
    (reason,) = binaries.check([path], prefix, 0, False)
    assert message in reason


def test_a_file_that_is_not_elf(prefix: Path) -> None:
    (prefix / "lib/libc10.so").write_text("INPUT(libc10.so.1)")
    done = run("-m", "checks.binaries", prefix, prefix / "lib/libc10.so")
    assert done.returncode == 1 and "libc10.so is not a readable ELF file" in done.stderr
    assert "Traceback" not in done.stderr


# --- checks.loaded_from


def test_a_library_from_outside_the_environment(tmp_path: Path) -> None:
    path = library(tmp_path, "a.so")
    (tmp_path / "stray.py").write_text(f"import ctypes; ctypes.CDLL('{path}')")
    done = run("-m", "checks.loaded_from", "stray", path=tmp_path)
    assert done.returncode == 1 and f"loaded from outside: {path}" in done.stderr


# --- libaotriton_v2


@pytest.fixture
def aotriton(prefix: Path) -> Path:
    """A prefix with the files of the aotriton package that check_library.py reads."""
    library(prefix, "libamdhip64.so.7", folder="opt/rocm/lib")
    library(prefix, "liblzma.so.5")
    link_aotriton(prefix)
    image = prefix / "lib/aotriton.images/amd-gfx115x/flash/attn_fwd/a.aks2"
    image.parent.mkdir(parents=True)
    image.touch()
    return prefix


def link_aotriton(prefix: Path, **changes: object) -> None:
    """Link the AOTriton library. `changes` are properties that differ from the correct ones."""
    properties = {
        "needs": ("libamdhip64.so.7", "liblzma.so.5"),
        "comment": "AOTriton 0.12.0",
        "rpath": "$ORIGIN/:$ORIGIN/../opt/rocm/lib/",
    }
    library(prefix, "libaotriton_v2.so.0.12.0", **(properties | changes))


def check_library(prefix: Path) -> subprocess.CompletedProcess[str]:
    return run(RECIPES / "aotriton/check_library.py", "0.12.0", PREFIX=prefix)


def test_aotriton_library(aotriton: Path) -> None:
    done = check_library(aotriton)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needs": ("liblzma.so.5",)}, "['libamdhip64.so.7'] missing from DT_NEEDED"),
        ({"rpath": "$ORIGIN"}, "the ROCm SDK is not in RPATH"),
        ({"rpath": "$ORIGIN/../opt/rocm/lib:/opt/rocm/lib"}, "not relative to $ORIGIN"),
        ({"comment": "AOTriton 0.11.0"}, "the version in .comment"),
    ],
)
def test_a_wrong_aotriton_library(aotriton: Path, changes: dict, message: str) -> None:
    link_aotriton(aotriton, **changes)
    done = check_library(aotriton)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_aotriton_without_images(aotriton: Path) -> None:
    next(aotriton.rglob("*.aks2")).unlink()
    done = check_library(aotriton)
    assert done.returncode == 1 and "no image of attn_fwd" in done.stderr


# --- amdsmi


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """A prefix with our amdsmi and with files as in the ROCm SDK.

    As in the SDK, libamd_smi requires a library in the folder rocm_sysdeps/lib.
    """
    prefix = tmp_path / "prefix"
    site = prefix / "lib" / "python3.12" / "site-packages" / "amdsmi"
    module = prefix / "opt/rocm/share/amd_smi/amdsmi"
    lib = prefix / "opt/rocm/lib"
    for folder in (site, module, lib / "rocm_sysdeps" / "lib"):
        folder.mkdir(parents=True)
    (site / "__init__.py").write_text(AMDSMI.read_text())
    (module / "__init__.py").write_text("from .amdsmi_wrapper import which\n")
    # Like AMD's generated wrapper, this wrapper raises a KeyError if no library can be loaded.
    (module / "amdsmi_wrapper.py").write_text(
        "import ctypes, os\n"
        "libraries = {}\n"
        "for folder in (os.environ['ROCM_HOME'] + '/lib', '/opt/rocm/lib'):\n"
        "    try:\n"
        "        libraries['smi'] = ctypes.CDLL(folder + '/libamd_smi.so')\n"
        "        break\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "which = libraries['smi'].which\n"
    )
    link_amd_smi(lib, 1)
    return prefix


def link_amd_smi(lib: Path, number: int) -> None:
    """Link a libamd_smi.so whose function which() returns a number."""
    folder = lib / "rocm_sysdeps" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    (lib / "a.c").write_text(f"int hidden(void) {{ return {number}; }}")
    (lib / "b.c").write_text("int hidden(void); int which(void) { return hidden(); }")
    command = ["cc", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", folder / "libhidden.so", lib / "a.c"], check=True)
    options = ["-L", folder, "-lhidden", "-Wl,-rpath,$ORIGIN/rocm_sysdeps/lib"]
    subprocess.run([*command, "-o", lib / "libamd_smi.so", lib / "b.c", *options], check=True)


PRINT_WHICH = "import os, amdsmi; print(amdsmi.which(), os.environ.get('ROCM_HOME'))"
# torch imports amdsmi in this way.
IMPORT_AS_TORCH = "try:\n import amdsmi\nexcept ImportError as error:\n print('survived:', error)"


def run_python(prefix: Path, code: str, **environment: str) -> str:
    """Run code with the packages of a prefix, and return what it printed."""
    site = next(prefix.glob("lib/python*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_amdsmi_takes_its_own_library(sdk: Path, tmp_path: Path) -> None:
    """amdsmi loads the library of our SDK, even if ROCM_HOME names another ROCm.

    After the import, ROCM_HOME has its old value.
    """
    other = tmp_path / "other"
    link_amd_smi(other / "lib", 2)
    assert run_python(sdk, PRINT_WHICH) == "1 None\n"
    assert run_python(sdk, PRINT_WHICH, ROCM_HOME=str(other)) == f"1 {other}\n"


def test_amdsmi_never_breaks_torch(sdk: Path) -> None:
    """If no library loads, our amdsmi raises ImportError, which torch catches.

    AMD's module raises KeyError, which torch does not catch.
    """
    (sdk / "opt/rocm/lib/rocm_sysdeps/lib/libhidden.so").unlink()
    printed = run_python(sdk, IMPORT_AS_TORCH)
    assert "survived: the AMD SMI library in" in printed and "KeyError('smi')" in printed
    (sdk / "lib/python3.12/site-packages/amdsmi/__init__.py").write_text(
        f"__path__ = ['{sdk}/opt/rocm/share/amd_smi/amdsmi']\nfrom .amdsmi_wrapper import which\n"
    )
    assert "survived" not in run_python(sdk, IMPORT_AS_TORCH)
