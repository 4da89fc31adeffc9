# SPDX-License-Identifier: BSD-3-Clause
"""Tests beyond `selftest_memory`: buffer ranges, mixed apertures, counters, reused shadows."""

import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from selftest_memory import IN_LDS, TO_LDS, TO_SCRATCH, execute
from single import LANE, run
from strix_emulate.errors import Trap
from strix_emulate.memory import pages
from strix_emulate.memory.shadow import Memory
from test_checks import EXCHANGE, LOAD, STORE
from test_checks import execute as launch


def test_a_scalar_offset_lessens_a_buffer() -> None:
    """A thread loads if its offset is below the number of records minus the scalar offset."""
    body = """
s_mov_b32 s10, 0x140
s_movk_i32 s12, 0x100
v_mov_b32 v20, 0
v_mov_b32 v21, 0
v_mov_b32 v22, 0
v_mov_b32 v23, 0
buffer_load_b32 v20, v1, s[8:11], s12 offen
"""
    out = bytes(256) + struct.pack("<192I", *range(1, 193))
    got = np.frombuffer(execute(body, bytes(512), out)[512:], np.uint32)[::4]
    # Thread i loads at 256 + 16 i, and the buffer ends at 320.
    assert got.tolist() == [1, 5, 9, 13, *[0] * 28]


def access_records(
    first: str, resource: int, name: str = "load_b32 v20", wide: int = 16, count: int = 32
) -> np.ndarray:
    """Let threads access a buffer of `count` records, at the start of an array of 96 records.

    Returns:
        The words of the array. Each of the records 32 to 63 has the registers v20 to v23 of a
        thread, and the others are as the access leaves them.
    """
    body = f"""
v_mov_b32 v20, 0
v_add_nc_u32 v30, 8, v0
v_and_b32 v31, 4, v0
s_or_b32 s9, s9, {wide << 16:#x}
s_mov_b32 s10, {count}
s_mov_b32 s11, {resource:#x}
buffer_{name}, {first}
"""
    out = struct.pack("<384I", *(100 + i for i in range(384)))
    both = [execute(body, bytes(512), out, native) for native in (False, True)]
    assert both[0] == both[1]
    return np.frombuffer(both[0], np.uint32)


def records(first: str, resource: int, wide: int = 16) -> list[int]:
    """Return the words that threads load from a buffer of 32 records."""
    return access_records(first, resource, wide=wide)[128:256:4].tolist()


#: Bits of word 3 of a buffer resource: a format, and whether the range limits only the index.
#: Without BY_INDEX, the range limits the offset, too.
FORMAT, BY_INDEX = 0x1000, 0x1000_0000


def test_records_of_a_buffer() -> None:
    """Each thread loads the eighth record after its own, if the buffer has so many."""
    loaded = [100 + 4 * (i + 8) for i in range(24)] + [0] * 8
    assert records("v30, s[8:11], 0 idxen", FORMAT | BY_INDEX) == loaded
    assert records("v30, s[8:11], 0 idxen", FORMAT) == loaded
    # The range check ignores the scalar offset.
    assert records("v30, s[8:11], 4 idxen", FORMAT) == [x and x + 1 for x in loaded]
    # In every other group of four threads, the offset is 4.
    offset = [x and x + i // 4 % 2 for i, x in enumerate(loaded)]
    assert records("v[30:31], s[8:11], 0 idxen offen", FORMAT | BY_INDEX) == offset
    # An offset of 20 reaches the next record. A range that limits only the index allows this.
    assert records("v30, s[8:11], 0 idxen offset:20", FORMAT | BY_INDEX)[:2] == [137, 141]
    assert records("v30, s[8:11], 0 idxen offset:20", FORMAT) == [0] * 32
    assert records("v30, s[8:11], 0 idxen", BY_INDEX) == [0] * 32
    # Bytes 16 to 19 reach the next record. Bytes 12 to 15 do not.
    assert records("v30, s[8:11], 0 idxen offset:16", FORMAT, wide=18) == [0] * 32
    assert all(records("v30, s[8:11], 0 idxen offset:12", FORMAT, wide=18)[:24])


@pytest.mark.parametrize("in_range", [0, 3, 4, 7, 8, 12, 15, 16])
def test_each_word_is_in_the_range_of_a_buffer_or_not(in_range: int) -> None:
    """The range ends before, inside of or after the 16 bytes that thread 4 accesses."""
    raw = {"resource": 0x3000_0000, "wide": 0, "count": 64 + in_range}
    words = access_records("v1, s[8:11], 0 offen", name="load_b128 v[20:23]", **raw)[128:256]
    whole = (64 + in_range) // 4
    assert words[:whole].tolist() == [100 + i for i in range(whole)]
    assert not words[whole:20].any()
    stored = access_records("v1, s[8:11], 0 offen", name="store_b96 v[0:2]", **raw)
    for thread in (3, 4):
        for word in range(4):
            place = 4 * thread + word
            is_stored = word < 3 and place < whole
            assert (stored[place] != 100 + place) == is_stored


@pytest.mark.parametrize(
    ("first", "resource"),
    [
        ("v30, s[8:11], 0 idxen", 0x3000_0000 | FORMAT),  # a raw buffer
        ("v1, s[8:11], 0 offen", FORMAT | BY_INDEX),  # a buffer of records
        ("v30, s[8:11], 0 idxen", FORMAT | BY_INDEX | 1 << 23),  # one that adds the lane's number
    ],
)
def test_buffers_of_another_kind_than_the_access(first: str, resource: int) -> None:
    with pytest.raises(Trap, match="a buffer resource that is (not raw|swizzled)"):
        records(first, resource)


def test_a_buffer_that_is_swizzled() -> None:
    with pytest.raises(Trap, match="swizzled or of another unsupported kind"):
        records("v30, s[8:11], 0 idxen", FORMAT | BY_INDEX, wide=16 | 1 << 14)


def test_records_that_nobody_has() -> None:
    """A store beyond the buffer's range does nothing.

    A load in the range, but outside of the array, causes a trap.
    """
    words = access_records("v30, s[8:11], 0 idxen", FORMAT | BY_INDEX, "store_b32 v0", count=16)
    expected = 100 + np.arange(384)
    # Thread i stores in record i + 8, and the buffer has 16 records.
    expected[32:64:4] = np.arange(8)
    assert (words[:128] == expected[:128]).all()
    assert (words[256:] == expected[256:]).all()
    with pytest.raises(Trap, match="do not lie in an argument's array"):
        records("v30, s[8:11], 0 idxen", FORMAT | BY_INDEX, wide=160)


#: v[2:3] is a flat address: in LDS for odd lanes, in scratch for every fourth lane, and in the
#: output for all others.
MIXED = """
s_mov_b64 s[12:13], src_shared_base
s_mov_b64 s[14:15], src_private_base
s_mov_b32 exec_lo, 0xaaaaaaaa
v_mov_b32 v2, v1
v_mov_b32 v3, s13
s_mov_b32 exec_lo, 0x11111111
v_mov_b32 v2, 0
v_mov_b32 v3, s15
s_mov_b32 exec_lo, -1
"""


@pytest.mark.parametrize("checks", [False, True])
def test_one_flat_access_reaches_several_apertures(checks):
    data, cells = (bytes(range(start, start + 256)) * 2 for start in (0, 0))
    body = (
        TO_LDS
        + TO_SCRATCH
        + MIXED
        + """
flat_store_b32 v[2:3], v4
flat_atomic_add_u32 v[2:3], v5 offset:4
s_waitcnt lgkmcnt(0)
s_waitcnt_vscnt null, 0x0
flat_load_b32 v20, v[2:3] offset:4
ds_load_b32 v21, v1
scratch_load_b32 v22, off, off
"""
    )
    out = execute(body, data[::-1], cells + bytes(512), checks=checks)
    got = np.frombuffer(out, np.uint32).reshape(2, 32, 4)
    old, new = (np.frombuffer(x, np.uint32).reshape(32, 4) for x in (cells, data[::-1]))
    lds = LANE % 2 == 1
    scratch = LANE % 4 == 0
    assert (got[0, :, 0] == np.where(lds | scratch, old[:, 0], new[:, 0])).all()
    assert (got[1, :, 0] == old[:, 1] + new[:, 1]).all()
    assert (got[1, :, 1] == np.where(lds, new[:, 0], old[:, 0])).all()
    assert (got[1, :, 2] == np.where(scratch, new[:, 0], old[:, 0])).all()


@pytest.mark.parametrize(("where", "wait"), [(IN_LDS, "lgkmcnt"), ("", "vmcnt")])
def test_the_counter_of_a_flat_load_is_that_of_its_aperture(where, wait):
    body = TO_LDS + where + "flat_load_b32 v20, v[2:3]\ns_waitcnt {}(0)\nv_mov_b32 v21, v20\n"
    execute(body.format(wait), bytes(512), bytes(1024))
    with pytest.raises(Trap, match="pending"):
        execute(
            body.format({"lgkmcnt": "vmcnt", "vmcnt": "lgkmcnt"}[wait]), bytes(512), bytes(1024)
        )


def test_a_flat_store_to_lds_ends_with_lgkmcnt():
    """Without a wait for lgkmcnt before the barrier, the store is a race."""
    store = "s_mov_b64 s[12:13], src_shared_base\nv_mov_b32 v4, v1\nv_mov_b32 v5, s13\n"
    store += "flat_store_b32 v[4:5], v0\ns_waitcnt {}\ns_barrier"
    body = EXCHANGE.replace("ds_store_b32 v1, v0\ns_waitcnt lgkmcnt(0)\ns_barrier", store)
    assert (launch(body.format("lgkmcnt(0)")) == np.arange(64) ^ 32).all()
    with pytest.raises(Trap, match="race"):
        launch(body.format("vmcnt(0)"))


def test_half_of_an_aperture_is_refused():
    with pytest.raises(Trap, match="an aperture in 32 bits"):
        run("s_mov_b32 s0, src_shared_base")


def test_append_counts_the_lanes_of_every_wave():
    """Each of two waves gets the counter's previous value. Either wave may be the first."""
    body = (
        LOAD
        + """
    v_mov_b32 v3, 0
    v_mov_b32 v4, 100
    ds_store_b32 v3, v4
    s_waitcnt lgkmcnt(0)
    s_barrier
    s_mov_b32 m0, 0
    ds_append v2
    s_waitcnt lgkmcnt(0)
    """
        + STORE
    )
    counters = launch(body).reshape(2, 32)
    assert (counters == counters[:, :1]).all()
    assert sorted(counters[:, 0]) == [100, 132]
    with pytest.raises(Trap, match=r"modifiers \['gds'\]"):
        run("ds_append v2 gds")


def hide(descriptor: int, count: int, offset: int) -> bytes:
    raise PermissionError


PAGEMAPS = {"whole": os.pread, "hidden": hide, "cut off": lambda *words: os.pread(*words)[:-8]}


@pytest.mark.parametrize("pagemap", PAGEMAPS)
def test_a_shadow_that_a_launch_left_is_used_again_and_clear(pagemap, monkeypatch) -> None:
    """All touched pages of the shadow are cleared."""
    monkeypatch.setattr(pages, "os", SimpleNamespace(pread=PAGEMAPS[pagemap]))
    monkeypatch.setattr(pages, "_cache", {})
    first = Memory("memory", (4 << 20) - 4)
    address = first.written.ctypes.data
    first.written[[0, 5000, -1]] = 1
    first.writers[[7, -1]] = 1
    first.release_tags()
    second = Memory("memory", (4 << 20) - 64)
    assert address in {
        second.written.ctypes.data,
        second.read.ctypes.data,
        second.swapped.ctypes.data,
        second.released.ctypes.data,
    }
    arrays = (second.written, second.read, second.swapped, second.released, second.writers)
    for tags in arrays:
        assert len(tags) == (1 << 20) - 15
        assert not tags.any()
    # Pages beyond the cache's limit are not kept for later launches.
    Memory("memory", 1 << 26).release_tags()
    assert pages.cached_bytes() <= pages._CACHE_LIMIT
