# SPDX-License-Identifier: BSD-3-Clause
"""What the repackaged CPython must be able to do from a prefix that it was not made for."""

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
for name, value in {
    "sys.prefix": sys.prefix,
    "sys.base_prefix": sys.base_prefix,
    "os": os.__file__,
    "purelib": sysconfig.get_path("purelib"),
    "scripts": sysconfig.get_path("scripts"),
}.items():
    assert os.path.realpath(value).startswith(prefix), f"{name} is {value}, outside {prefix}"
purelib = sysconfig.get_path("purelib")
assert purelib.endswith("site-packages"), purelib
assert os.path.realpath(purelib) in map(os.path.realpath, sys.path), sys.path

assert ssl.create_default_context() and ssl.OPENSSL_VERSION
assert sqlite3.connect(":memory:").execute("select 6 * 7").fetchone() == (42,)
assert ctypes.CDLL(None).getpid() == os.getpid()
assert zlib.decompress(zlib.compress(b"x")) == b"x" and hashlib.blake2b(b"").digest_size == 64
with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    inside = subprocess.run(
        [f"{folder}/bin/python", "-c", "import sys; print(sys.base_prefix)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
assert os.path.realpath(inside.stdout.strip()).startswith(prefix), inside.stdout
