# SPDX-License-Identifier: BSD-3-Clause
"""Package test: check the files of a package of compiled kernels, and compile some kernels again.

    python check_kernels.py PACKAGE [CALLS]

Each file must have the hash in the package's list, and no path in site-packages. Each code object
must be for the GPU. CALLS is the number of calls whose kernels are compiled again, by default 4.
For each of these kernels, the package must have an identical code object.
"""

import hashlib
import sys

from strix_validate import testing

from checks import elf
from checks.verdict import require

package = sys.argv[1]
calls = int(sys.argv[2]) if len(sys.argv) > 2 else 4
folder, kernels = testing.packaged_kernels(package)
listed = set()
for key, kernel in kernels.items():
    for name, digest in kernel["files"].items():
        listed.add(digest)
        content = (folder / key / name).read_bytes()
        require(hashlib.sha256(content).hexdigest() == digest, f"{key}/{name} is damaged")
        require(b"/site-packages/" not in content, f"{key}/{name} has a path in site-packages")
        if name.endswith(".hsaco"):
            fault = elf.fault(content)
            require(not fault, f"{key}/{name} {fault}")

compared = set()
for compiled in testing.compile_sample(calls):
    digest = hashlib.sha256(compiled.elf).hexdigest()
    require(digest in listed, f"no packaged file is identical to the new {compiled.name}")
    compared.add(digest)
require(compared, "nothing was compared")
print(f"{len(kernels)} kernels; {len(compared)} compiled again, with identical results")
