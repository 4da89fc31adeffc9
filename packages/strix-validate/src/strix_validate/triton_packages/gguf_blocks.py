# SPDX-License-Identifier: BSD-3-Clause
"""What the bytes of a GGUF tensor mean, written from the format's definition (ggml-common.h).

A weight is scale * code + offset. The tables of codes, of hundreds of rows, are those of the
package gguf; the rest is written anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

#: Of blocks (count, bytes): scales, codes and offsets, (count, weights of a block) or one for all.
Parts = tuple[ndarray, ndarray, ndarray]

_NONE = np.zeros((1, 1))
#: The codes of IQ4_NL and IQ4_XS.
_CODES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF: its number in files, weights and bytes of a block, where its halves are."""

    number: int
    weights: int
    size: int
    halves: tuple[int, ...]
    parts: Callable[[ndarray], Parts]


def _half(b: ndarray, at: int) -> ndarray:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float64)


def _word(b: ndarray, at: int, count: int) -> ndarray:
    """Return count little-endian numbers of 16 bits."""
    return np.ascontiguousarray(b[:, at : at + 2 * count]).view(np.uint16).astype(np.int64)


def _bits(b: ndarray, *shifts: int, mask: int) -> ndarray:
    """Return fields of each byte: all bytes' first, then all bytes' second, and so on."""
    fields = [b.astype(np.int64) >> shift & mask for shift in shifts]
    return np.stack(fields, 1).reshape(len(b), -1)


def _spread(x: ndarray, count: int) -> ndarray:
    return np.repeat(x, count, 1)


def _signed(b: ndarray) -> ndarray:
    return b.view(np.int8).astype(np.int64)


def _nibbles(b: ndarray) -> ndarray:
    """Return the low halves of each 16 bytes, then the high ones."""
    return _bits(b, 0, 4, mask=15)


def _chunks(b: ndarray, size: int, *shifts: int, mask: int) -> ndarray:
    """As :func:`_bits`, of each `size` bytes by themselves."""
    return _bits(b.reshape(-1, size), *shifts, mask=mask).reshape(len(b), -1)


def _q4(b: ndarray, *, least: int) -> Parts:
    if least:
        return _half(b, 0), _nibbles(b[:, 2:]) + least, _NONE
    return _half(b, 0), _nibbles(b[:, 4:]), _half(b, 2)


def _q5(b: ndarray, *, least: int) -> Parts:
    at = 2 if least else 4
    high = np.unpackbits(b[:, at : at + 4], axis=1, bitorder="little").astype(np.int64)
    codes = _nibbles(b[:, at + 4 :]) + 16 * high + least
    return _half(b, 0), codes, _NONE if least else _half(b, 2)


def _q8(b: ndarray, *, at: int) -> Parts:
    return _half(b, 0), _signed(np.ascontiguousarray(b[:, at:])), _NONE


def _q2_k(b: ndarray) -> Parts:
    groups, codes = b[:, :16].astype(np.int64), _chunks(b[:, 16:80], 32, 0, 2, 4, 6, mask=3)
    scales = _half(b, 80) * (groups & 15)
    return _spread(scales, 16), codes, -_spread(_half(b, 82) * (groups >> 4), 16)


def _q3_k(b: ndarray) -> Parts:
    packed = b[:, 96:108].astype(np.int64)
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    scales = _half(b, 108) * ((low | high << 4) - 32)
    absent = _bits(b[:, :32], *range(8), mask=1) ^ 1  # a bit of hmask that is not set takes off 4
    return _spread(scales, 16), _chunks(b[:, 32:96], 32, 0, 2, 4, 6, mask=3) - 4 * absent, _NONE


def _six_bits(b: ndarray) -> tuple[ndarray, ndarray]:
    """Unpack the eight scales and eight minima of Q4_K and Q5_K from 12 bytes."""
    q = b.astype(np.int64)
    low, middle, high = q[:, :4], q[:, 4:8], q[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], 1)
    return scales, np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], 1)


def _q45_k(b: ndarray, *, fifth: bool) -> Parts:
    scales, minima = _six_bits(b[:, 4:16])
    codes = _chunks(b[:, 48 if fifth else 16 :], 32, 0, 4, mask=15)
    if fifth:
        codes = codes + 16 * _bits(b[:, 16:48], *range(8), mask=1)
    return _spread(_half(b, 0) * scales, 32), codes, -_spread(_half(b, 2) * minima, 32)


def _q6_k(b: ndarray) -> Parts:
    low = _chunks(b[:, :128], 64, 0, 4, mask=15)
    codes = low + 16 * _chunks(b[:, 128:192], 32, 0, 2, 4, 6, mask=3) - 32
    scales = _half(b, 208) * _signed(np.ascontiguousarray(b[:, 192:208]))
    return _spread(scales, 16), codes, _NONE


def _grid(name: str, index: ndarray) -> ndarray:
    """Look up codes in a table of gguf's, a row for each index."""
    from gguf import quants

    table = getattr(quants, name)
    table.init_grid()
    return table.grid[0, 0].astype(np.int64)[index].reshape(len(index), -1)


def _signs(seven: ndarray) -> ndarray:
    """Return 1 or -1 of each code: seven bits, and an eighth that makes their number even."""
    bits = seven[..., None] >> np.arange(7) & 1
    bits = np.concatenate([bits, bits.sum(-1, keepdims=True) & 1], -1)
    return (1 - 2 * bits).reshape(len(seven), -1)


def _written_signs(b: ndarray) -> ndarray:
    return 1 - 2 * np.unpackbits(b, axis=1, bitorder="little").astype(np.int64)


def _packed_signs(pairs: ndarray) -> tuple[ndarray, ndarray]:
    """Split 32 bits, as two words, into four signs of seven bits and a scale of four."""
    word = pairs[..., 0] | pairs[..., 1] << 16
    signs = word[..., None] >> np.array([0, 7, 14, 21]) & 127
    return _signs(signs.reshape(len(word), -1)), word >> 28


def _iq2_xxs(b: ndarray) -> Parts:
    words = _word(b, 2, 32).reshape(len(b), 8, 4)
    index = b[:, 2:66].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), -1)
    signs, scales = _packed_signs(words[:, :, 2:])
    return _spread(_half(b, 0) * (0.5 + scales) / 4, 32), _grid("IQ2_XXS", index) * signs, _NONE


def _half_scales(b: ndarray, at: int) -> ndarray:
    """Return the scales of 16 weights each, of half a step more than their four bits."""
    fours = _chunks(b[:, at : at + 8], 1, 0, 4, mask=15)
    return _spread(_half(b, 0) * (0.5 + fours) / 4, 16)


def _iq2_xs(b: ndarray) -> Parts:
    words = _word(b, 2, 32)
    return _half_scales(b, 66), _grid("IQ2_XS", words & 511) * _signs(words >> 9), _NONE


def _iq2_s(b: ndarray) -> Parts:
    high = _chunks(b[:, 66:74], 1, 0, 2, 4, 6, mask=3)
    codes = _grid("IQ2_S", b[:, 2:34] | high << 8)
    return _half_scales(b, 74), codes * _written_signs(b[:, 34:66]), _NONE


def _iq3_xxs(b: ndarray) -> Parts:
    signs, scales = _packed_signs(_word(b, 66, 16).reshape(len(b), 8, 2))
    codes = _grid("IQ3_XXS", b[:, 2:66]) * signs
    return _spread(_half(b, 0) * (0.5 + scales) / 2, 32), codes, _NONE


def _iq3_s(b: ndarray) -> Parts:
    high = _chunks(b[:, 66:74], 1, *range(8), mask=1)
    codes = _grid("IQ3_S", b[:, 2:66] | high << 8) * _written_signs(b[:, 74:106])
    scales = 1 + 2 * _chunks(b[:, 106:110], 1, 0, 4, mask=15)
    return _spread(_half(b, 0) * scales, 32), codes, _NONE


def _iq1_s(b: ndarray) -> Parts:
    high = _word(b, 34, 8)
    top = (high[..., None] >> np.array([0, 3, 6, 9]) & 7).reshape(len(b), -1)
    scales = _half(b, 0) * (2 * (high >> 12 & 7) + 1)
    delta = scales * np.where(high & 0x8000, -0.125, 0.125)
    return _spread(scales, 32), _grid("IQ1_S", b[:, 2:34] | top << 8), _spread(delta, 32)


def _iq1_m(b: ndarray) -> Parts:
    words, high = _word(b, 48, 4), _chunks(b[:, 32:48], 1, 0, 4, mask=15)
    half = (words >> 12 << np.array([0, 4, 8, 12])).sum(1).astype(np.uint16).view(np.float16)
    threes = (words[..., None] >> np.array([0, 3, 6, 9]) & 7).reshape(len(b), -1)
    scales = _spread(half.astype(np.float64)[:, None] * (2 * threes + 1), 16)
    delta = _spread(np.where(high & 8, -0.125, 0.125), 8)
    return scales, _grid("IQ1_S", b[:, :32] | (high & 7) << 8), scales * delta


def _iq4_nl(b: ndarray) -> Parts:
    return _half(b, 0), _CODES[_nibbles(b[:, 2:])], _NONE


def _iq4_xs(b: ndarray) -> Parts:
    low, high = _chunks(b[:, 4:8], 1, 0, 4, mask=15), _word(b, 2, 1) >> np.arange(0, 16, 2) & 3
    scales = _half(b, 0) * ((low | high << 4) - 32)
    return _spread(scales, 32), _CODES[_chunks(b[:, 8:], 16, 0, 4, mask=15)], _NONE


TYPES: dict[str, BlockType] = {
    "q4_0": BlockType(2, 32, 18, (0,), lambda b: _q4(b, least=-8)),
    "q4_1": BlockType(3, 32, 20, (0, 2), lambda b: _q4(b, least=0)),
    "q5_0": BlockType(6, 32, 22, (0,), lambda b: _q5(b, least=-16)),
    "q5_1": BlockType(7, 32, 24, (0, 2), lambda b: _q5(b, least=0)),
    "q8_0": BlockType(8, 32, 34, (0,), lambda b: _q8(b, at=2)),
    "q8_1": BlockType(9, 32, 36, (0, 2), lambda b: _q8(b, at=4)),
    "q2_k": BlockType(10, 256, 84, (80, 82), _q2_k),
    "q3_k": BlockType(11, 256, 110, (108,), _q3_k),
    "q4_k": BlockType(12, 256, 144, (0, 2), lambda b: _q45_k(b, fifth=False)),
    "q5_k": BlockType(13, 256, 176, (0, 2), lambda b: _q45_k(b, fifth=True)),
    "q6_k": BlockType(14, 256, 210, (208,), _q6_k),
    "iq2_xxs": BlockType(16, 256, 66, (0,), _iq2_xxs),
    "iq2_xs": BlockType(17, 256, 74, (0,), _iq2_xs),
    "iq3_xxs": BlockType(18, 256, 98, (0,), _iq3_xxs),
    "iq1_s": BlockType(19, 256, 50, (0,), _iq1_s),
    "iq4_nl": BlockType(20, 32, 18, (0,), _iq4_nl),
    "iq3_s": BlockType(21, 256, 110, (0,), _iq3_s),
    "iq2_s": BlockType(22, 256, 82, (0,), _iq2_s),
    "iq4_xs": BlockType(23, 256, 136, (0,), _iq4_xs),
    "iq1_m": BlockType(29, 256, 56, (), _iq1_m),
}
