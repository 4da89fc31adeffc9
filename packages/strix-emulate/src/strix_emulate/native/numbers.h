// SPDX-License-Identifier: BSD-3-Clause
// Conversions and other numeric functions. Unless a comment says otherwise, their results are the
// same as numpy's, even for NaN.
#ifdef __F16C__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

// Returns chosen ? a : b without a branch, so that loops can be vectorized.
static inline uint32_t pick(int chosen, uint32_t a, uint32_t b) {
  const uint32_t mask = -(uint32_t)chosen;
  return (a & mask) | (b & ~mask);
}

static inline float half_value(uint16_t h) {
  uint32_t magnitude = h & 0x7fff, denormal = (magnitude << 13) + 0x38800000;
  uint32_t normal = (magnitude << 13) + pick(magnitude >= 0x7c00, 0x70000000, 0x38000000);
  float value;
  memcpy(&value, &denormal, 4);
  value -= 0x1p-14f;
  memcpy(&denormal, &value, 4);
  normal = pick(magnitude < 0x400, denormal, normal) | (uint32_t)(h & 0x8000) << 16;
  memcpy(&value, &normal, 4);
  return value;
}

// Rounds to half precision, to nearest even. As in numpy, a NaN keeps the high bits of its
// fraction. If these are 0, the fraction becomes 1.
static inline uint16_t half_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  float small;
  memcpy(&small, &magnitude, 4);
  small += 0.5f;
  uint32_t denormal, nan = magnitude >> 13 & 0x3ff;
  memcpy(&denormal, &small, 4);
  uint32_t result = pick(magnitude >= 0x47800000, 0x7c00, normal);
  result = pick(magnitude < 0x38800000, denormal - 0x3f000000, result);
  result = pick(magnitude > 0x7f800000, 0x7c00 | nan | (nan == 0), result);
  return (uint16_t)(sign | result);
}

// Converts sixteen float16 numbers. A signalling NaN may become quiet.
static inline void sixteen_halves(float *to, const uint16_t *from) {
#ifdef __F16C__
  for (int l = 0; l < 16; l += 8)
    _mm256_storeu_ps(to + l, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + l))));
#else
  for (int l = 0; l < 16; l++) to[l] = half_value(from[l]);
#endif
}

static inline float float_to_half(float x) { return half_value(half_bits(x)); }

// Rounds a double to float in the mode "round to odd", so that the result can be rounded a second
// time, to half precision, without a double-rounding error.
static inline float to_odd(double x) {
  float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const int even = ((double)f != x) & !(bits & 1) & (fabs((double)f) < INFINITY);
  bits += even * (2 * (fabs((double)f) < fabs(x)) - 1);
  memcpy(&f, &bits, 4);
  return f;
}

// Defines a function D_of_S, which returns the bits of a number of type S as a number of type D.
#define BITS(TO, FROM, D, S)            \
  static inline TO D##_of_##S(FROM x) { \
    TO y;                               \
    memcpy(&y, &x, sizeof y);           \
    return y;                           \
  }
BITS(float, uint32_t, f, I)
BITS(float, int32_t, f, i)
BITS(uint32_t, float, I, f)
BITS(int32_t, float, i, f)
BITS(double, uint64_t, d, L)
BITS(double, int64_t, d, l)
BITS(uint64_t, double, L, d)
BITS(int64_t, double, l, d)

// Computes nextafter without branches.
static inline double next_double(double x, double to) {
  const int up = x < to, still = x == to, nan = (x != x) | (to != to);
  const int64_t step = up == (x > 0) ? 1 : -1;
  int64_t zero = up ? 1 : INT64_MIN + 1, next = l_of_d(x) + step;
  next = x == 0 ? zero : next;
  return nan ? x + to : still ? to : d_of_l(next);
}

// The two results of numpy's frexp.
static inline double fraction(double x) {
  int power;
  return frexp(x, &power);
}
static inline int power(double x) {
  int power;
  frexp(x, &power);
  return power;
}

static inline float bfloat(uint32_t bits) { return f_of_I(bits << 16); }
