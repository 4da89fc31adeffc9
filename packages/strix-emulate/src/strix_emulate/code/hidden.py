# SPDX-License-Identifier: BSD-3-Clause
"""Hidden arguments of a kernel, which a runtime fills in: sizes, and addresses of host services."""

import re

from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap

#: Features that need a hidden pointer, by the pointer's kind. The emulator may pass a null pointer.
_FEATURES = {
    "hidden_hostcall_buffer": "printf, assert's text and other calls of the host from a kernel",
    "hidden_printf_buffer": "printf from a kernel",
    "hidden_heap_v1": "malloc and free in a kernel",
    "hidden_multigrid_sync_arg": "grid.sync() in a launch that is not cooperative",
    "hidden_default_queue": "launches from a kernel",
}
#: An access below this address is assumed to come from a null pointer.
_NEAR_NULL = 1 << 16


def hint_for_null_pointer(kernel: Kernel, trap: Trap) -> str:
    """Return a hint for a trap at an address near null.

    The hint names the features whose hidden pointers the kernel has, because one of these pointers
    may be null. It is empty for other addresses, and for a kernel without such pointers.
    """
    address = re.search(r"at 0x([0-9a-f]+) do not lie", trap.args[0])
    if not address or int(address[1], 16) >= _NEAR_NULL:
        return ""
    features = [_FEATURES[a.kind] for a in kernel.arguments if a.kind in _FEATURES]
    if not features:
        return ""
    return f"; the kernel has hidden arguments that may be null, for: {'; '.join(features)}"


def write(
    raw: bytearray,
    kernel: Kernel,
    grid,
    block,
    pointers: dict[str, int] | None = None,
) -> None:
    """Write hidden arguments into a kernarg segment (LLVM's guide, "Code Object V5 Metadata").

    A hidden argument without a value keeps its bytes.

    Args:
        raw: The segment.
        kernel: The kernel.
        grid: Number of workgroups in each of three dimensions.
        block: Number of threads of a workgroup in each of three dimensions.
        pointers: Addresses for hidden pointers, by the argument's kind.
    """
    values = dict(pointers or {})
    for i, axis in enumerate("xyz"):
        values[f"hidden_block_count_{axis}"] = grid[i]
        values[f"hidden_group_size_{axis}"] = block[i]
        values[f"hidden_remainder_{axis}"] = 0
        values[f"hidden_global_offset_{axis}"] = 0
    values["hidden_grid_dims"] = 1
    for i in range(3):
        if grid[i] * block[i] > 1:
            values["hidden_grid_dims"] = i + 1
    for argument in kernel.arguments:
        if argument.kind in values:
            end = argument.offset + argument.size
            value = int(values[argument.kind])
            raw[argument.offset : end] = value.to_bytes(argument.size, "little")
