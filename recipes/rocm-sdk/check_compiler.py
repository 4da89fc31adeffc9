# SPDX-License-Identifier: BSD-3-Clause
"""Package test: hipcc of the activated environment compiles for the GPU. No GPU is needed.

usage: check_compiler.py PROGRAM. PROGRAM is a program that hipcc has made.
"""

import sys
from pathlib import Path

from checks import elf, offload
from checks.target import ARCH
from checks.verdict import require

program = Path(sys.argv[1])
images = offload.count_images(elf.section(program, offload.SECTION))
require(images == 1, f"{program} holds {images} device images, expected one for {ARCH}")
needed = elf.dynamic(program).needed
for library in ("libamdhip64.so", "libstdc++.so"):
    is_needed = any(name.startswith(library) for name in needed)
    require(is_needed, f"{program} does not need {library}")
print(f"{program.name}: one image for {ARCH}; needs {', '.join(needed)}")
