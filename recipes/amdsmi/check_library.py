# SPDX-License-Identifier: BSD-3-Clause
"""Package test: libamd_smi loads from this environment; on the GPU, it also lists processors."""

import sys
from pathlib import Path

from amdsmi import AmdSmiException, amdsmi_get_processor_handles, amdsmi_init, amdsmi_shut_down
from checks.gpu import find_skip_reason
from checks.loaded_from import foreign, loaded
from checks.verdict import require

libraries = [file for file in loaded() if "libamd_smi" in file.name]
print("loaded:", *libraries)
require(libraries, "libamd_smi is not loaded")
outside = foreign(libraries, Path(sys.prefix))
require(not outside, f"libamd_smi is not from this environment: {outside}")

reason = find_skip_reason()
if reason:
    print(f"SKIPPED: GPU query, because {reason}; nothing ran on gfx1151")
else:
    try:
        amdsmi_init()
        # The list may lack an APU. For that case, vLLM has patch 0001.
        gpus = amdsmi_get_processor_handles()
        print(f"AMD SMI lists {len(gpus)} GPUs")
        amdsmi_shut_down()
    except AmdSmiException as error:
        sys.exit(f"AMD SMI does not list the GPUs: {error}")
