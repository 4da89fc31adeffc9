# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of memory instructions, by mnemonic (RDNA3.5 ISA, chapter 16).

`MEMORY` has the kind of each memory instruction, so that other modules need not derive it from the
mnemonic.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Action = Literal[
    "load",
    "store",
    "scalar_load",
    "atomic",
    "count",
    "exchange",
    "invalidate",
]


@dataclass(frozen=True)
class MemoryKind:
    """The properties of a memory instruction that follow from its mnemonic.

    Attributes:
        action: "atomic" is a read-modify-write, "count" is DS_APPEND or DS_CONSUME, "exchange"
            moves data across lanes through the LDS, "invalidate" empties a cache.
        space: "global", "flat", "scratch", "buffer", "ds" (the LDS), "s", or "s_buffer".
        type: Type of the data at the end of the mnemonic, such as "b32" or "d16_hi_u8".
        size: Bytes that a lane loads or stores by one access. For a scalar load, bytes that a wave
            loads.
        signed: Whether a load extends the sign.
        half: "l" or "h" if half of a register is loaded or stored, else "".
        addresses: Number of accesses: 2 for the 2ADDR forms of the LDS, else 1.
        offset_unit: Bytes by which OFFSET0 and OFFSET1 are multiplied.
        operation: Operation of an atomic, such as "add", or the cache that is emptied.
        returns: Whether an LDS atomic returns the old value. Other atomics return it with GLC.
    """

    action: Action
    space: str
    type: str = ""
    size: int = 0
    signed: bool = False
    half: str = ""
    addresses: int = 1
    offset_unit: int = 1
    operation: str = ""
    returns: bool = False

    @property
    def empties_gl1(self) -> bool:
        """Whether the instruction invalidates the GL1 cache, which several workgroups share."""
        return self.action == "invalidate" and self.operation == "gl1"


class DataType(NamedTuple):
    """Type of the data of a load or store. See `MemoryKind` for the fields."""

    size: int
    signed: bool = False
    half: str = ""


#: Data types of loads and stores by the end of the mnemonic.
TYPES = {
    "b8": DataType(1),
    "b16": DataType(2),
    "b32": DataType(4),
    "b64": DataType(8),
    "b96": DataType(12),
    "b128": DataType(16),
    "u8": DataType(1),
    "i8": DataType(1, signed=True),
    "u16": DataType(2),
    "i16": DataType(2, signed=True),
    "d16_b16": DataType(2, half="l"),
    "d16_hi_b16": DataType(2, half="h"),
    "d16_u8": DataType(1, half="l"),
    "d16_hi_u8": DataType(1, half="h"),
    "d16_i8": DataType(1, signed=True, half="l"),
    "d16_hi_i8": DataType(1, signed=True, half="h"),
    "d16_hi_b8": DataType(1, half="h"),
    "u8_d16": DataType(1, half="l"),
    "u8_d16_hi": DataType(1, half="h"),
    "i8_d16": DataType(1, signed=True, half="l"),
    "i8_d16_hi": DataType(1, signed=True, half="h"),
    "u16_d16": DataType(2, half="l"),
    "u16_d16_hi": DataType(2, half="h"),
    "b16_d16_hi": DataType(2, half="h"),
    "b8_d16_hi": DataType(1, half="h"),
}

#: Types of the atomics of global memory, by operation.
GLOBAL_ATOMICS = {
    "add": ("u32", "u64", "f32"),
    "sub": ("u32", "u64"),
    "inc": ("u32", "u64"),
    "dec": ("u32", "u64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "swap": ("b32", "b64"),
    "csub": ("u32",),
    "min": ("u32", "i32", "u64", "i64", "f32"),
    "max": ("u32", "i32", "u64", "i64", "f32"),
    "cmpswap": ("b32", "b64", "f32"),
}
#: Types of the atomics of the LDS, by operation.
LDS_ATOMICS = {
    "add": ("u32", "u64", "f32"),
    "sub": ("u32", "u64"),
    "rsub": ("u32", "u64"),
    "inc": ("u32", "u64"),
    "dec": ("u32", "u64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "storexchg": ("b32", "b64"),
    "mskor": ("b32", "b64"),
    "min": ("u32", "i32", "u64", "i64", "f32", "f64"),
    "max": ("u32", "i32", "u64", "i64", "f32", "f64"),
    "cmpstore": ("b32", "b64", "f32", "f64"),
}
_INVALIDATIONS = {
    "buffer_gl0_inv": ("buffer", "gl0"),
    "buffer_gl1_inv": ("buffer", "gl1"),
    "s_dcache_inv": ("s", "dcache"),
    "s_gl1_inv": ("s", "gl1"),
    "s_icache_inv": ("s", "icache"),
}


def _loads_and_stores() -> dict[str, MemoryKind]:
    """Return loads and stores of vector registers. Some are not instructions of GFX11."""
    table = {}
    actions: tuple[Action, ...] = ("load", "store")
    for action in actions:
        for space in ("global", "flat", "scratch", "buffer", "ds"):
            for type_name, data_type in TYPES.items():
                kind = MemoryKind(action, space, type_name, *data_type)
                table[f"{space}_{action}_{type_name}"] = kind
        for type_name in ("b32", "b64"):
            size = TYPES[type_name].size
            for suffix, factor in (("", 1), ("_stride64", 64)):
                table[f"ds_{action}_2addr{suffix}_{type_name}"] = MemoryKind(
                    action,
                    "ds",
                    type_name,
                    size,
                    addresses=2,
                    offset_unit=factor * size,
                )
    return table


def _scalar_loads() -> dict[str, MemoryKind]:
    table = {}
    for space in ("s", "s_buffer"):
        for bits in (32, 64, 128, 256, 512):
            type_name = f"b{bits}"
            kind = MemoryKind("scalar_load", space, type_name, bits // 8)
            table[f"{space}_load_{type_name}"] = kind
    return table


def _atomic(space: str, operation: str, type_name: str, returns: bool = False) -> MemoryKind:
    size = int(type_name[1:]) // 8
    return MemoryKind("atomic", space, type_name, size, operation=operation, returns=returns)


def _atomics() -> dict[str, MemoryKind]:
    table = {}
    for space in ("global", "flat", "buffer"):
        for operation, types in GLOBAL_ATOMICS.items():
            if (space, operation) == ("flat", "csub"):
                continue
            for type_name in types:
                kind = _atomic(space, operation, type_name)
                table[f"{space}_atomic_{operation}_{type_name}"] = kind
    for operation, types in LDS_ATOMICS.items():
        for type_name in types:
            if operation != "storexchg":
                table[f"ds_{operation}_{type_name}"] = _atomic("ds", operation, type_name)
            kind = _atomic("ds", operation, type_name, returns=True)
            table[f"ds_{operation}_rtn_{type_name}"] = kind
    return table


#: Memory instructions by mnemonic.
MEMORY: dict[str, MemoryKind] = {
    **_loads_and_stores(),
    **_scalar_loads(),
    **_atomics(),
    "ds_append": MemoryKind("count", "ds", "u32", 4),
    "ds_consume": MemoryKind("count", "ds", "u32", 4),
    "ds_bpermute_b32": MemoryKind("exchange", "ds", "b32", 4),
    "ds_permute_b32": MemoryKind("exchange", "ds", "b32", 4),
    "ds_swizzle_b32": MemoryKind("exchange", "ds", "b32", 4),
    **{
        name: MemoryKind("invalidate", space, operation=cache)
        for name, (space, cache) in _INVALIDATIONS.items()
    },
}


def has_action(name: str, *actions: Action) -> bool:
    """Return whether a mnemonic is that of a memory instruction with one of these actions."""
    kind = MEMORY.get(name)
    return kind is not None and kind.action in actions
