# SPDX-License-Identifier: BSD-3-Clause
"""The GPUs that are emulated, with everything that one of them has and another may not.

Nothing else names a GPU or holds a number of one; hip/build.py writes the device's properties from
here, so only the standard library is imported. Sources: LLVM 22's AMDGPU.td and GCNSubtarget
(registers, waves, LDS), its guide (ELF flags, S_WAITCNT), AMD's GPU specifications
(processors, engines, L2); names, clocks and buses of all but gfx1151 are those of one product of
each. AMD's table lacks gfx1153: its L2 is gfx1152's.
"""

from dataclasses import dataclass

from strix_emulate.errors import EmulatorError

_WMMA = frozenset(
    {
        "v_wmma_f32_16x16x16_f16",
        "v_wmma_f32_16x16x16_bf16",
        "v_wmma_f16_16x16x16_f16",
        "v_wmma_bf16_16x16x16_bf16",
        "v_wmma_i32_16x16x16_iu8",
        "v_wmma_i32_16x16x16_iu4",
    }
)


@dataclass(frozen=True)
class Target:
    """A GPU of the family GFX11. The defaults are the family's.

    Attributes:
        name: LLVM's name of the processor.
        mach: EF_AMDGPU_MACH of its ELF files.
        version: Version of the device that HIP sees: major, minor, stepping.
        registers: Vector registers of 32 lanes of a SIMD; half as many for waves of 64.
        granule: Number of registers of which multiples are granted; half for waves of 64.
        product: Name of the device that HIP sees.
        processors: Workgroup processors, which HIP calls multiprocessors.
        engines: Shader engines that the processors are in, with two arrays each.
        l2: Bytes of the L2 cache.
        clock: Clock of the processors in kHz.
        memory_clock: Clock of the memory in kHz.
        bus: Width of the memory's bus in bits.
        integrated: Whether it shares the host's memory.
        waves: Waves of a SIMD.
        simds: SIMDs of a workgroup processor.
        widths: Lanes that a wave can have.
        lds: Bytes of LDS that a workgroup may have.
        lds_of_processor: Bytes of LDS of a workgroup processor.
        threads: Threads that a workgroup may have.
        stack: Bytes of a lane's scratch that hipDeviceSetLimit takes, at most.
        cache: Modifiers of memory instructions that are for caches.
        counters: Fields of S_WAITCNT: name, first bit, bits.
        cycles: Bits of SHADER_CYCLES.
        wmma: Matrix instructions.
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
    wmma: frozenset[str] = _WMMA

    @property
    def resident(self) -> int:
        """Waves that the GPU holds at a time, at full occupancy."""
        return self.processors * self.simds * self.waves


_GPUS = (
    Target(
        name="gfx1151",
        mach=0x4A,
        version=(11, 5, 1),
        registers=1536,
        granule=24,
        product="AMD Radeon 8060S Graphics",
        processors=20,
        engines=2,
        l2=2 << 20,
        clock=2_900_000,
        memory_clock=1_000_000,
        bus=256,
        integrated=True,
    ),
    Target(
        name="gfx1150",
        mach=0x43,
        version=(11, 5, 0),
        registers=1024,
        granule=16,
        product="AMD Radeon 890M Graphics",
        processors=8,
        engines=1,
        l2=2 << 20,
        clock=2_900_000,
        memory_clock=1_000_000,
        bus=128,
        integrated=True,
    ),
    Target(
        name="gfx1152",
        mach=0x55,
        version=(11, 5, 2),
        registers=1024,
        granule=16,
        product="AMD Radeon 860M Graphics",
        processors=4,
        engines=1,
        l2=1 << 20,
        clock=3_000_000,
        memory_clock=1_000_000,
        bus=128,
        integrated=True,
    ),
    Target(
        name="gfx1153",
        mach=0x58,
        version=(11, 5, 3),
        registers=1024,
        granule=16,
        product="AMD Radeon 840M Graphics",
        processors=2,
        engines=1,
        l2=1 << 20,
        clock=2_900_000,
        memory_clock=1_000_000,
        bus=128,
        integrated=True,
    ),
    Target(
        name="gfx1100",
        mach=0x41,
        version=(11, 0, 0),
        registers=1536,
        granule=24,
        product="AMD Radeon RX 7900 XTX",
        processors=48,
        engines=6,
        l2=6 << 20,
        clock=2_500_000,
        memory_clock=1_250_000,
        bus=384,
        integrated=False,
    ),
)
#: Supported GPUs by name. The first is the default.
TARGETS = {target.name: target for target in _GPUS}
DEFAULT = _GPUS[0]


def find_target(name: str) -> Target:
    """Return the GPU that LLVM calls so. Raise EmulatorError."""
    if name not in TARGETS:
        raise EmulatorError(f"no GPU that is emulated is called {name}: {', '.join(TARGETS)}")
    return TARGETS[name]


def find_target_of_elf(mach: int) -> Target | None:
    """Return the GPU of an ELF file's EF_AMDGPU_MACH, or None if it is not emulated."""
    return next((target for target in TARGETS.values() if target.mach == mach), None)
