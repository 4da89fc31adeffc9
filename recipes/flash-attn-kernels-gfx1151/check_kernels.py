# SPDX-License-Identifier: BSD-3-Clause
"""Package test: listed files are there, for the GPU, and are what the compiler makes here and now.

``python check_kernels.py PACKAGE [CALLS]``: compiles the kernels of so many calls, by default 4.
"""

import hashlib
import sys

from strix_validate import testing

from checks import elf
from checks.verdict import require

package, wanted = sys.argv[1], int((sys.argv[2:] or ["4"])[0])
folder, kernels = testing.packaged_kernels(package)
for key, kernel in kernels.items():
    for name, digest in kernel["files"].items():
        content = (folder / key / name).read_bytes()
        require(hashlib.sha256(content).hexdigest() == digest, f"{key}/{name} is damaged")
        require(b"/site-packages/" not in content, f"{key}/{name} names a folder")
        if name.endswith(".hsaco"):
            fault = elf.fault(content)
            require(not fault, f"{key}/{name} {fault}")

listed = {digest for kernel in kernels.values() for digest in kernel["files"].values()}
compared = set()
for made in testing.compile_sample(wanted):
    digest = hashlib.sha256(made.elf).hexdigest()
    require(digest in listed, f"{made.name} is not byte for byte in the package")
    compared.add(digest)
require(compared, "nothing was compared")
print(f"{len(kernels)} kernels; {len(compared)} compiled again, the same bytes")
