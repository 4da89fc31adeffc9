# SPDX-License-Identifier: BSD-3-Clause
"""Arguments of a kernel that a runtime fills in: sizes, and what runs on the host."""

import re

from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap

#: What a kernel wants these pointers for, which are null here.
_ABSENT = {
    "hidden_hostcall_buffer": "printf, assert's text and other calls of the host from a kernel",
    "hidden_printf_buffer": "printf from a kernel",
    "hidden_heap_v1": "malloc and free in a kernel",
    "hidden_multigrid_sync_arg": "grid.sync() in a launch that is not cooperative",
    "hidden_default_queue": "launches from a kernel",
}
#: Addresses that come of a null pointer.
_NEAR_NULL = 1 << 16


def missing(kernel: Kernel, trap: Trap) -> str:
    """Say what a trap at an address near null hints at, or nothing."""
    at = re.search(r"at 0x([0-9a-f]+) do not lie", trap.args[0])
    wanted = [_ABSENT[a.kind] for a in kernel.arguments if a.kind in _ABSENT]
    if not at or int(at[1], 16) >= _NEAR_NULL or not wanted:
        return ""
    return f"; the kernel has an argument for what is not there: {'; '.join(wanted)}"


def write(
    raw: bytearray, kernel: Kernel, grid, block, pointers: dict[str, int] | None = None
) -> None:
    """Write hidden arguments into a kernarg segment (LLVM's guide, "Code Object V5 Metadata").

    pointers: addresses by kind of the argument. Those for which there is nothing here, such as the
    heap, stay.
    """
    sizes = {
        f"hidden_{name}_{axis}": value
        for name, values in (
            ("block_count", grid),
            ("group_size", block),
            ("remainder", (0, 0, 0)),
            ("global_offset", (0, 0, 0)),
        )
        for axis, value in zip("xyz", values, strict=True)
    } | {
        **(pointers or {}),
        "hidden_grid_dims": max([i + 1 for i in range(3) if grid[i] * block[i] > 1], default=1),
    }
    for hidden in kernel.arguments:
        if hidden.kind in sizes:
            raw[hidden.offset : hidden.offset + hidden.size] = int(sizes[hidden.kind]).to_bytes(
                hidden.size, "little"
            )
