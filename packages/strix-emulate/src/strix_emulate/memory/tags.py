# SPDX-License-Identifier: BSD-3-Clause
"""Access tags. A tag says which wave accessed a memory cell, and when by that wave's own clock.

A tag is an int64 with four fields. From the high bits to the low bits they are: the workgroup + 1,
the number of barriers that the wave has passed + 1, the number of its releases since the last
barrier, and the wave's number in its workgroup. The two fields in the middle are the wave's clock.
The tag 0 means that no wave accessed the cell. memory/happens_before.py says what a release is.
native/shadow.h uses the same layout.
"""

import numpy as np

#: Lowest bit of three fields of a tag: the workgroup, the barriers passed, and the releases.
WORKGROUP = 40
BARRIER = 22
RELEASE = 8
#: Value of the wave field if several waves of one workgroup read the cell. Then 8 bits of the
#: release field are used: bit N is set if a wave whose number modulo 8 is N read the cell.
SEVERAL = 0xFF
READERS = 7
#: Tag of a cell that several workgroups read.
EVERYONE = 2**62
#: Masks of the clock and of the releases in a tag.
CLOCK = (1 << WORKGROUP) - 1 & ~0xFF
RELEASES = (1 << BARRIER) - (1 << RELEASE)

_EPOCH_RELEASES = (1 << (BARRIER - RELEASE)) - 1


def make_tags(workgroup, epoch, wave):
    """Return the tags of the waves' accesses. A wave's tags grow with its epoch."""
    clock = epoch + (1 << (BARRIER - RELEASE))
    group = workgroup.astype(np.int64) + 1
    return group << WORKGROUP | clock << RELEASE | wave


def epoch_after_barrier(epoch):
    """Return the epoch of waves after a barrier."""
    barriers = epoch >> (BARRIER - RELEASE)
    return barriers + 1 << (BARRIER - RELEASE)


def epoch_after_release(epoch):
    """Return the epoch of waves after a release. The number of releases stops at its maximum."""
    return epoch + ((epoch & _EPOCH_RELEASES) < _EPOCH_RELEASES)


def store_tags(tags):
    """Return the tags that plain stores of global memory leave in its shadow.

    A wait for stores begins an epoch, as a release does. A store gets the tag of the next epoch.
    This epoch begins when the store has been awaited, or earlier if another wait or release begins
    it.
    """
    return np.where(tags & RELEASES == RELEASES, tags, tags + (1 << RELEASE))


def atomic_tags(tags):
    """Return the tags that atomics of global memory without a return value leave in its shadow.

    Such an atomic begins an epoch. The wait for it begins the next epoch, whose tag it gets.
    """
    return store_tags(store_tags(tags))


def tags_that_stores_release(tags):
    """Return the tags up to which stores with these tags release the accesses of their waves.

    These are the tags of the epochs in which the stores were executed. So stores that had not been
    awaited then are not released. After the maximum number of releases, epochs cannot be told
    apart, so such stores are released, too.
    """
    return np.where(tags & RELEASES == RELEASES, tags, tags - (1 << RELEASE))


def wave_of(tag):
    """Return the tag's wave: the tag without its clock."""
    return tag >> WORKGROUP << WORKGROUP | tag & 0xFF


def barriers_of(tag):
    """Return the tag's workgroup and number of passed barriers, as one number."""
    return tag >> BARRIER


def in_same_workgroup(old, new):
    """Return by element whether two tags are of the same workgroup."""
    return old >> WORKGROUP == new >> WORKGROUP


def wave_bit(tag):
    """Return the bit of the tag's wave among the up to 32 waves of its workgroup."""
    return np.uint32(1) << (tag & 31).astype(np.uint32)


def are_unordered(old, new):
    """Return by element whether two accesses are of different waves, with no barrier between them.

    The access with the new tag is the later one. If the old tag is 0, there is no earlier access.
    """
    if len(old) == 0 or not old.any():
        return np.zeros(len(old), bool)
    no_barrier = barriers_of(old) >= barriers_of(new)
    other_wave = (old ^ new) & 0xFF != 0
    return np.where(
        in_same_workgroup(old, new),
        no_barrier & other_wave,
        old != 0,
    )


def merge_readers(old, new):
    """Return the tags of cells that two waves read, of the same workgroup or of different ones."""
    barriers = np.maximum(barriers_of(old), barriers_of(new)) << BARRIER
    near = barriers | reader_bits(old) | reader_bits(new) | SEVERAL
    return np.where(in_same_workgroup(old, new), near, np.int64(EVERYONE))


def reader_bits(tag):
    """Return which waves read a cell, from the tag of the reads.

    The result has a bit for each wave number modulo 8. Tags of reads have these bits in place of
    the release field.
    """
    one = np.int64(1) << (RELEASE + (tag & READERS))
    return np.where(tag & 0xFF == SEVERAL, tag & RELEASES, one)


def describe(tag: int) -> str:
    """Return the tag's wave and workgroup for a message."""
    if tag >= EVERYONE:
        return "several workgroups"
    wave = "several waves" if tag & 0xFF == SEVERAL else f"wave {tag & 0xFF}"
    return f"{wave} of workgroup {(tag >> WORKGROUP) - 1}"
