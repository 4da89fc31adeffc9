# SPDX-License-Identifier: BSD-3-Clause
"""Package test: the copied CPython works in another prefix than the original CPython."""

import ctypes
import hashlib
import os
import sqlite3
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import zlib

prefix = os.path.realpath(os.environ["CONDA_PREFIX"])
purelib = os.path.realpath(sysconfig.get_path("purelib"))


def require(condition: object, message: str) -> None:
    """End with a message unless the condition holds."""
    if not condition:
        raise SystemExit(message)


paths = {
    "sys.prefix": sys.prefix,
    "sys.base_prefix": sys.base_prefix,
    "os": os.__file__,
    "purelib": purelib,
    "scripts": sysconfig.get_path("scripts"),
}
for name, path in paths.items():
    is_inside = os.path.realpath(path).startswith(prefix)
    require(is_inside, f"{name} is {path}, outside {prefix}")
require(purelib.endswith("site-packages"), f"purelib is {purelib}")
require(purelib in map(os.path.realpath, sys.path), f"{purelib} is not in {sys.path}")

require(ssl.create_default_context(), "ssl has no context")
answer = sqlite3.connect(":memory:").execute("select 6 * 7").fetchone()
require(answer == (42,), f"sqlite3 returned {answer}")
require(ctypes.CDLL(None).getpid() == os.getpid(), "ctypes calls another getpid")
require(zlib.decompress(zlib.compress(b"x")) == b"x", "zlib changes what it compresses")
require(hashlib.blake2b(b"").digest_size == 64, "hashlib has another blake2b")
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    inside = subprocess.run(
        [f"{folder}/bin/python", "-c", "import sys; print(sys.base_prefix)"],
        check=True,
        capture_output=True,
        text=True,
    )
venv_base = os.path.realpath(inside.stdout.strip())
require(venv_base.startswith(prefix), f"a venv has the base {venv_base}, outside {prefix}")
