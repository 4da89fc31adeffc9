# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as its code object describes it: code, arguments, and what its descriptor asks for."""

from dataclasses import dataclass, field, replace

from strix_emulate.code.target import Target

#: Bytes of a lane's scratch that a kernel gets whose functions need an unknown amount (clr's
#: rocclr/device/device.cpp).
STACK = 1024


@dataclass(frozen=True)
class Argument:
    """One kernel argument in the kernarg segment: byte offset, byte size, LLVM's value kind."""

    name: str
    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Image:
    """The loaded file: bytes by address, relocated for address 0; the kernel's first instruction.

    code: (address, size) of the functions beside the kernels. pointers: where 64-bit addresses
    stand that count from the image's own address.
    """

    data: bytes
    entry: int
    code: tuple[tuple[int, int], ...]
    pointers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A kernel: machine code and what its descriptor and metadata say.

    lds and scratch are bytes per workgroup and per lane; denormals_* are True where the descriptor
    keeps denormal numbers; width is the lanes of a wave; user_sgprs names what the first SGPRs
    hold, in order, one per SGPR pair or single as (name, count); user_count is how many SGPRs stand
    in front of the workgroup's numbers, at least: gfx1100 has some that hold nothing (LLVM's
    FeatureUserSGPRInit16Bug); workgroup_ids says which numbers are set; target is the GPU that it
    was made for; two_units: a workgroup is on both compute units of a processor (WGP mode).
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
        """Add scratch for recursion and for calls by a pointer, if the kernel has them."""
        return replace(self, scratch=max(self.scratch, size)) if self.dynamic_stack else self
