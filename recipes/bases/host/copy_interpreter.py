# SPDX-License-Identifier: BSD-3-Clause
"""Copy the running CPython into a prefix: `PYTHON -I copy_interpreter.py PREFIX`.

CPython finds its prefix by looking for lib/pythonX.Y/os.py in the folders above its executable. So
a copy works in any folder, except for absolute paths in its text files. Unless the original prefix
is /usr, this program replaces it by PREFIX in those paths. rattler-build records files that contain
PREFIX, and the installer rewrites them.
"""

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# Files that do not belong to the standard library, are not needed at run time, or need a screen.
LEFT_OUT = shutil.ignore_patterns(
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "tkinter",
    "__pycache__",
    "_tkinter*.so",
    "libpython*.a",
    "EXTERNALLY-MANAGED",
    # Debian's hook that sends distutils installations to /usr/local
    "_distutils_system_mod.py",
)


def copy(prefix: Path) -> None:
    """Copy the interpreter into bin, lib and include of `prefix`."""
    executable = getattr(sys, "_base_executable", "") or sys.executable
    binaries = prefix / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(executable), binaries / f"python{VERSION}")
    for alias in ("python", "python3"):
        (binaries / alias).symlink_to(f"python{VERSION}")

    library = prefix / "lib" / f"python{VERSION}"
    shutil.copytree(sysconfig.get_path("stdlib"), library, symlinks=False, ignore=LEFT_OUT)
    site_packages = library / "site-packages"
    site_packages.mkdir()
    (site_packages / "README.txt").write_text("Packages of this environment.\n")

    headers = Path(sysconfig.get_path("include"))
    if headers.is_dir():
        shutil.copytree(headers, prefix / "include" / headers.name)

    for line in Path("/proc/self/maps").read_text().splitlines():
        shared = Path(line.split(maxsplit=5)[-1])
        target = prefix / "lib" / shared.name
        if shared.name.startswith("libpython") and not target.exists():
            shutil.copy2(shared, target)


def undo_debian(library: Path) -> None:
    """Undo Debian's changes, so that pip and Python use site-packages.

    Debian patches sysconfig and site, so that pip cannot overwrite files that apt has installed. In
    a conda prefix, apt has no files, and rattler links packages into site-packages. This function
    changes sysconfig back. It cannot change the module site, which is frozen into the interpreter.
    So it makes the folder dist-packages, which the module site uses, a link to site-packages.
    """
    # sysconfig is a module up to Python 3.12, and a package from 3.13 on.
    sysconfig_file = library / Path(sysconfig.__file__).relative_to(sysconfig.get_path("stdlib"))
    text = sysconfig_file.read_text()
    if "DEB_PYTHON_INSTALL_LAYOUT" not in text:
        return
    before = "prefix_scheme = 'posix_local'"
    if before not in text:
        sys.exit(f"{sysconfig_file} has changes by Debian that this program does not know")
    sysconfig_file.write_text(text.replace(before, "prefix_scheme = 'posix_prefix'"))
    (library / "dist-packages").symlink_to("site-packages")


def rewrite_prefix(prefix: Path) -> None:
    """Replace the interpreter's original prefix by `prefix` in text files, unless it is /usr."""
    if sys.base_prefix == "/usr":  # keep paths such as /usr/bin/gcc of a system Python
        return
    old = sys.base_prefix.encode()
    new = str(prefix).encode()
    for path in prefix.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        is_binary = b"\0" in data
        if old in data and not is_binary:
            path.write_bytes(data.replace(old, new))


def main() -> None:
    prefix = Path(sys.argv[1])
    library = prefix / "lib" / f"python{VERSION}"
    copy(prefix)
    undo_debian(library)
    rewrite_prefix(prefix)
    for binary in list(prefix.glob("lib/libpython*.so*")):
        subprocess.run(["strip", "--strip-unneeded", binary], check=False, capture_output=True)
    compileall.compile_dir(
        library,
        quiet=1,
        workers=0,
        stripdir=str(prefix),
        invalidation_mode=compileall.py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


if __name__ == "__main__":  # compileall's worker processes import this file again
    main()
