# SPDX-License-Identifier: BSD-3-Clause
"""A kernel from a code object: code, arguments, and the settings in its descriptor."""

from dataclasses import dataclass, field, replace

from strix_emulate.code.target import Target

#: Default scratch bytes of a lane if a kernel's functions need an unknown amount. Source: clr's
#: rocclr/device/device.cpp.
STACK = 1024


@dataclass(frozen=True)
class Argument:
    """One kernel argument.

    Attributes:
        name: Its name; "" if the code object has none.
        offset: Byte offset in the kernarg segment.
        size: Bytes.
        kind: LLVM's value kind.
    """

    name: str
    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Image:
    """A code object in memory. Addresses count from the start of the image.

    Attributes:
        data: Bytes by address, relocated for address 0.
        entry: Address of the kernel's first instruction. 0 in `loader.Module`.
        code: (address, size) of the functions outside the kernels. In `loader.Module`, all code.
        pointers: Addresses of 64-bit pointers. Loading adds the image's address to these pointers.
    """

    data: bytes
    entry: int
    code: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A kernel: its machine code, and the values in its descriptor and metadata.

    Attributes:
        name: Its name.
        code: Its machine code.
        lds: Bytes of LDS of a workgroup, without `launch_lds`.
        scratch: Bytes of scratch of a lane.
        kernarg: Bytes of the kernarg segment.
        vgprs: Number of vector registers.
        sgprs: Number of scalar registers.
        denormals_32: Whether float32 operations keep denormal numbers.
        denormals_16_64: Whether float16 and float64 operations keep denormal numbers.
        ieee: Whether it starts in IEEE mode.
        clamp_nan: Whether CLAMP turns NaN into 0 (DX10_CLAMP).
        width: Lanes of a wave.
        user_sgprs: Values in the first SGPRs, in order, as (name, number of SGPRs).
        user_count: Minimum number of SGPRs in front of the workgroup IDs. On gfx1100, some of them
            may be unused (LLVM's FeatureUserSGPRInit16Bug).
        workgroup_ids: Whether the workgroup ID is passed, for x, y and z.
        max_threads: Maximum number of threads of a workgroup.
        vgpr_spills: Number of vector registers that were spilled.
        sgpr_spills: Number of scalar registers that were spilled.
        arguments: Its arguments.
        finite_16: Whether float16 overflows to the largest number (FP16_OVFL).
        launch_lds: Bytes of LDS that a launch adds.
        image: The code object in memory.
        dynamic_stack: Whether the kernel needs an unknown amount of scratch, for recursion or calls
            by a pointer.
        target: The GPU that it was compiled for.
        two_units: Whether a workgroup runs on both compute units of a workgroup processor (WGP
            mode).
    """

    name: str
    code: bytes
    lds: int
    scratch: int
    kernarg: int
    vgprs: int
    sgprs: int
    denormals_32: bool
    denormals_16_64: bool
    ieee: bool
    clamp_nan: bool
    width: int
    user_sgprs: tuple[tuple[str, int], ...]
    user_count: int
    workgroup_ids: tuple[bool, ...]
    max_threads: int
    vgpr_spills: int
    sgpr_spills: int
    arguments: tuple[Argument, ...]
    finite_16: bool
    launch_lds: int
    image: Image | None = field(compare=False, repr=False)
    dynamic_stack: bool
    target: Target
    two_units: bool

    def with_stack(self, size: int) -> "Kernel":
        """Return the kernel, with at least `size` scratch bytes if it needs an unknown amount."""
        if not self.dynamic_stack:
            return self
        return replace(self, scratch=max(self.scratch, size))
