// SPDX-License-Identifier: BSD-3-Clause
// Conversions that C lacks, with the results of numpy's, NaNs included.
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float half_value(uint16_t h)
{
  uint32_t magnitude = h & 0x7fff, bits = magnitude << 13;
  float normal, denormal = (float)(int32_t)magnitude * 0x1p-24f;
  bits += magnitude >= 0x7c00 ? 0x70000000 : 0x38000000;
  memcpy(&normal, &bits, 4);
  float value = magnitude < 0x400 ? denormal : normal;
  memcpy(&bits, &value, 4);
  bits |= (uint32_t)(h & 0x8000) << 16;
  memcpy(&value, &bits, 4);
  return value;
}

// to nearest even; like numpy, keeps of a NaN the high bits of the fraction, or 1
static inline uint16_t half_bits(float x)
{
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  float small, half = 0.5f;
  memcpy(&small, &magnitude, 4);
  small = small < 1.0f ? small + half : 1.0f;
  uint32_t denormal, nan = magnitude >> 13 & 0x3ff;
  memcpy(&denormal, &small, 4);
  denormal -= 0x3f000000;
  uint32_t result = magnitude < 0x38800000 ? denormal : magnitude >= 0x47800000 ? 0x7c00 : normal;
  result = magnitude > 0x7f800000 ? 0x7c00 | (nan ? nan : 1) : result;
  return (uint16_t)(sign | result);
}

static inline float float_to_half(float x) { return half_value(half_bits(x)); }

// to odd first, so that the second rounding is right
static inline float double_to_half(double x)
{
  float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((double)f != x && !(bits & 1) && x == x && fabs(x) < INFINITY && fabs(f) < INFINITY)
    f = nextafterf(f, (double)f < x ? INFINITY : -INFINITY);
  return float_to_half(f);
}

#define BITS(TO, FROM, D, S) \
  static inline TO D##_of_##S(FROM x) { TO y; memcpy(&y, &x, sizeof y); return y; }
BITS(float, uint32_t, f, I)
BITS(float, int32_t, f, i)
BITS(uint32_t, float, I, f)
BITS(int32_t, float, i, f)
BITS(double, uint64_t, d, L)
BITS(double, int64_t, d, l)
BITS(uint64_t, double, L, d)
BITS(int64_t, double, l, d)

// numpy's frexp in two
static inline double fraction(double x) { int power; return frexp(x, &power); }
static inline int power(double x) { int power; frexp(x, &power); return power; }

static inline float bfloat(uint32_t bits) { return f_of_I(bits << 16); }
