# SPDX-License-Identifier: BSD-3-Clause
"""The supported GPUs, with all properties in which GPUs may differ.

hip/build.py generates the HIP device's properties from this module.

Sources: LLVM 22's AMDGPU.td and GCNSubtarget for registers, waves and LDS; LLVM's guide for ELF
flags and S_WAITCNT; AMD's GPU specifications for workgroup processors, shader engines and the L2
cache. The specifications do not list gfx1153, so this module gives it the L2 cache of gfx1152.
Several products may have the same GPU. In that case, the product name, the number of workgroup
processors, the clocks and the bus are those of one of the products.
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
    """A GPU of the family GFX11. The default values are those of the whole family.

    Attributes:
        name: LLVM's name of the processor.
        mach: EF_AMDGPU_MACH of ELF files for this GPU.
        version: Version of the device that HIP sees: major, minor, stepping.
        registers: Vector registers of a SIMD for waves of 32 lanes. Waves of 64 lanes have half as
            many.
        granule: A wave of 32 lanes is allocated a multiple of this number of vector registers. For
            waves of 64 lanes the number is half.
        product: Name of the device that HIP sees.
        processors: Number of workgroup processors, which HIP calls multiprocessors.
        engines: Number of shader engines. Each has two shader arrays.
        l2: Bytes of the L2 cache.
        clock: Clock of the processors in kHz.
        memory_clock: Clock of the memory in kHz.
        bus: Width of the memory's bus in bits.
        integrated: Whether the GPU shares the host's memory.
        waves: Maximum number of waves of a SIMD.
        simds: Number of SIMDs of a workgroup processor.
        widths: Numbers of lanes that a wave can have.
        lds: Maximum bytes of LDS of a workgroup.
        lds_of_processor: Bytes of LDS of a workgroup processor.
        threads: Maximum number of threads of a workgroup.
        stack: Maximum bytes of a lane's scratch that hipDeviceSetLimit accepts.
        cache: Modifiers of memory instructions that control caches.
        counters: Fields of S_WAITCNT, as (name, first bit, number of bits).
        cycles: Number of bits of SHADER_CYCLES.
        wmma: Mnemonics of the matrix instructions.
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
        """Maximum number of waves that are resident on the GPU at a time."""
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
    """Return the GPU with this LLVM name. Raise EmulatorError if it is not supported."""
    if name not in TARGETS:
        raise EmulatorError(f"GPU {name} is not supported; supported are {', '.join(TARGETS)}")
    return TARGETS[name]


def find_target_of_elf(mach: int) -> Target | None:
    """Return the GPU with an ELF file's EF_AMDGPU_MACH, or None if it is not supported."""
    return next((target for target in TARGETS.values() if target.mach == mach), None)
