# SPDX-License-Identifier: BSD-3-Clause
"""The GPUs that are emulated: what one of them has that another may not, as values of one class.

Nothing else names a GPU or holds a number of one; hip/build.py writes the device's properties from
here, so only the standard library is imported. Sources: LLVM 22's AMDGPU.td and GCNSubtarget
(registers, waves, LDS), its guide (ELF flags, S_WAITCNT), AMD's GPU specifications
(processors, engines, L2); names, clocks and buses of all but gfx1151 are those of one product of
each. AMD's table lacks gfx1153: its L2 is gfx1152's.
"""

from dataclasses import dataclass

from strix_emulate.errors import EmulatorError


@dataclass(frozen=True)
class Target:
    """A GPU of the family GFX11. The defaults are the family's.

    name: LLVM's processor; mach: EF_AMDGPU_MACH of its ELF files. registers: a SIMD's vector
    registers of 32 lanes, granted in multiples of granule; both are halved for waves of 64. waves:
    of a SIMD; simds: of a workgroup processor; widths: lanes of a wave. lds: bytes that a workgroup
    may have; lds_of_processor. threads: of a workgroup. stack: bytes of a lane's scratch that
    hipDeviceSetLimit takes, at most. cache: modifiers of memory instructions. counters: of
    S_WAITCNT, (first bit, bits). cycles: bits of SHADER_CYCLES. wmma: matrix instructions.

    Of the device that HIP sees: product; version (major, minor, stepping); processors, which HIP
    calls multiprocessors, and the engines, of two arrays each, that they are in; l2 in bytes;
    clocks in kHz; bus, the memory's width in bits; integrated: it shares the host's memory.
    """

    name: str
    mach: int
    version: tuple[int, int, int]
    registers: int
    granule: int
    product: str
    processors: int
    engines: int
    l2: int
    clock: int
    memory_clock: int
    bus: int
    integrated: bool
    waves: int = 16
    simds: int = 4
    widths: tuple[int, ...] = (32, 64)
    lds: int = 65536
    lds_of_processor: int = 131072
    threads: int = 1024
    stack: int = 131056
    cache: frozenset[str] = frozenset({"glc", "slc", "dlc"})
    counters: tuple[tuple[str, int, int], ...] = (("lgkm", 4, 6), ("vm", 10, 6))
    cycles: int = 20
    wmma: frozenset[str] = frozenset({
        "v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_bf16", "v_wmma_f16_16x16x16_f16",
        "v_wmma_bf16_16x16x16_bf16", "v_wmma_i32_16x16x16_iu8", "v_wmma_i32_16x16x16_iu4",
    })  # fmt: skip

    @property
    def resident(self) -> int:
        """Waves that the GPU holds at a time, at full occupancy."""
        return self.processors * self.simds * self.waves


#: By name; the first is what a device is unless another is asked for.
TARGETS = {
    target.name: target
    for target in (
        Target("gfx1151", 0x4A, (11, 5, 1), 1536, 24, "AMD Radeon 8060S Graphics",
               20, 2, 2 << 20, 2_900_000, 1_000_000, 256, True),
        Target("gfx1150", 0x43, (11, 5, 0), 1024, 16, "AMD Radeon 890M Graphics",
               8, 1, 2 << 20, 2_900_000, 1_000_000, 128, True),
        Target("gfx1152", 0x55, (11, 5, 2), 1024, 16, "AMD Radeon 860M Graphics",
               4, 1, 1 << 20, 3_000_000, 1_000_000, 128, True),
        Target("gfx1153", 0x58, (11, 5, 3), 1024, 16, "AMD Radeon 840M Graphics",
               2, 1, 1 << 20, 2_900_000, 1_000_000, 128, True),
        Target("gfx1100", 0x41, (11, 0, 0), 1536, 24, "AMD Radeon RX 7900 XTX",
               48, 6, 6 << 20, 2_500_000, 1_250_000, 384, False),
    )
}  # fmt: skip
DEFAULT = next(iter(TARGETS.values()))


def named(name: str) -> Target:
    """Return the GPU that LLVM calls so. Raise EmulatorError."""
    if name not in TARGETS:
        raise EmulatorError(f"no GPU that is emulated is called {name}: {', '.join(TARGETS)}")
    return TARGETS[name]


def of_elf(mach: int) -> Target | None:
    """Return the GPU of an ELF file's EF_AMDGPU_MACH, or None if it is not emulated."""
    return next((target for target in TARGETS.values() if target.mach == mach), None)
