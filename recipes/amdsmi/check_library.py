# SPDX-License-Identifier: BSD-3-Clause
"""torch and amdsmi load beside each other, and libamd_smi is the one of this environment."""

import sys
from pathlib import Path

import torch  # noqa: F401  before amdsmi, as in use

from amdsmi import AmdSmiException, amdsmi_get_processor_handles, amdsmi_init, amdsmi_shut_down

files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
found = sorted({file for file in files if "libamd_smi" in file})
print("loaded:", *found)
assert found, "no libamd_smi is loaded"
assert all(Path(file).resolve().is_relative_to(Path(sys.prefix).resolve()) for file in found)

if not Path("/dev/kfd").exists():
    print("SKIPPED: the query of a GPU, because /dev/kfd is not there; nothing ran on gfx1151")
else:
    try:
        amdsmi_init()
        # An APU may be missing from the list; vLLM's patch 0001 is for that case.
        print(f"AMD SMI lists {len(amdsmi_get_processor_handles())} GPUs")
        amdsmi_shut_down()
    except AmdSmiException as error:
        sys.exit(f"AMD SMI does not initialise: {error}")
