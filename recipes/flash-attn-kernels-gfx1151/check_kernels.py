# SPDX-License-Identifier: BSD-3-Clause
"""Package test: listed files are there, for the GPU, and are what the compiler makes here and now.

``python check_kernels.py PACKAGE [CALLS]``: compiles the kernels of so many calls, by default 4.
"""

import hashlib
import sys
from pathlib import Path

from strix_validate.doctor.kernel_lists import FOLDER, installed
from strix_validate.precompiled import flash_calls
from strix_validate.triton import modes as triton_modes

from checks import elf
from checks.verdict import require

package, wanted = sys.argv[1], int((sys.argv[2:] or ["4"])[0])
kernels = installed(Path(sys.base_prefix))[package]
folder = Path(sys.base_prefix) / FOLDER / package
for key, kernel in kernels.items():
    for name, digest in kernel["files"].items():
        content = (folder / key / name).read_bytes()
        require(hashlib.sha256(content).hexdigest() == digest, f"{key}/{name} is damaged")
        require(b"/site-packages/" not in content, f"{key}/{name} names a folder")
        if name.endswith(".hsaco"):
            fault = elf.fault(content)
            require(not fault, f"{key}/{name} {fault}")

calls = list(flash_calls.FLASH_SETS["sample"]())
step = max(1, len(calls) // wanted)
answers = triton_modes.run(calls[::step][:wanted], "compile").calls
listed = {digest for kernel in kernels.values() for digest in kernel["files"].values()}
compared = set()
for answer in answers:
    require(not answer.error, f"a call failed: {answer.error}")
    for made in answer.kernels:
        digest = hashlib.sha256(made.elf).hexdigest()
        require(digest in listed, f"{made.name} is not byte for byte in the package")
        compared.add(digest)
require(compared, "nothing was compared")
print(f"{len(kernels)} kernels; {len(compared)} compiled again, the same bytes")
