// SPDX-License-Identifier: BSD-3-Clause
// D = A B + C of 16 by 16 matrices. See crosslane._compile_wmma. A lane has a row of A and a column
// of B. A register has two rows of C or D (in a wave64, four rows). Each row is in sixteen lanes.

// Returns whether the lanes from 16 on repeat lanes 0 to 15 in some registers, as the ISA requires.
static int repeats(const State *w, int first, int registers) {
  const long width = lanes(w);
  const uint32_t *x = w->v + first * width * w->n;
  uint32_t differ = 0;
  for (long i = 0; i < width * registers * w->n; i += width)
    for (long l = 16; l < width; l += 16)
      for (int k = 0; k < 16; k++) differ |= x[i + k] ^ x[i + l + k];
  return !differ;
}

// A product of two float16 numbers has 22 bits. It is exact in float32, so a fused multiplication
// and addition has the same result. A product of bfloat16 numbers may overflow or underflow
// float32, so it is not fused.
#ifdef __FMA__
#define ADD_EXACT_PRODUCT(a, b, c) __builtin_fmaf(a, b, c)
#else
#define ADD_EXACT_PRODUCT(a, b, c) ((c) + (a) * (b))
#endif

// Returns the offset of row m of C or D in its registers.
static inline long row_at(const State *w, int m, long wave) {
  // A register has 2 or 4 rows. m & rows is the number of row m in its register.
  const int more = (int)w->halves, rows = (1 << more) - 1;
  return (m >> more) * lanes(w) * w->n + lanes(w) * wave + 16 * (m & rows);
}

// Computes sum[m][l] = x[0][m] y[0][l] + x[1][m] y[1][l] + ..., in this order of additions.
static void sum_products(float sum[16][16], float x[16][16], float y[16][16], int exact) {
#ifdef __AVX512F__
  // Compute eight rows at a time, to hide the latency of an addition. In that time, additions for
  // seven other rows can start.
  for (int m = 0; exact && m < 16; m += 8) {
    __m512 total[8], column = _mm512_loadu_ps(y[0]);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) total[j] =
        _mm512_mul_ps(_mm512_set1_ps(x[0][m + j]), column);
    for (int k = 1; k < 16; k++) {
      column = _mm512_loadu_ps(y[k]);
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) total[j] =
          _mm512_fmadd_ps(_mm512_set1_ps(x[k][m + j]), column, total[j]);
    }
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) _mm512_storeu_ps(sum[m + j], total[j]);
  }
  if (exact) return;
#endif
  for (int m = 0; m < 16; m++) {
    float total[16];
    for (int l = 0; l < 16; l++) total[l] = x[0][m] * y[0][l];
    if (exact)
      for (int k = 1; k < 16; k++)
        for (int l = 0; l < 16; l++) total[l] = ADD_EXACT_PRODUCT(x[k][m], y[k][l], total[l]);
    else
      for (int k = 1; k < 16; k++)
        for (int l = 0; l < 16; l++) total[l] += x[k][m] * y[k][l];
    memcpy(sum[m], total, 64);
  }
}

// Executes a floating-point WMMA. The sixteen products are added one after the other, then C.
static int wmma(State *w, const Op *o) {
  const long n = w->n, width = lanes(w), row = width * n;
  const uint32_t *a = w->v + o->source[0].index * row, *b = w->v + o->source[1].index * row;
  const uint32_t *c = w->v + o->source[2].index * row;
  uint32_t *d = w->v + o->target.index * row;
  const int inline_c = o->source[2].file == CONSTANT, shift = 16 * o->half;
  const uint32_t value = (uint32_t)o->source[2].value, keep = 0xffff0000u >> shift;
  if (!w->full || !repeats(w, o->source[0].index, 8) || !repeats(w, o->source[1].index, 8))
    return 1;
  for (long i = 0; i < n; i++) {
    float x[16][16], y[16][16], sum[16][16];  // x[k][row], y[k][column]
    for (int k = 0; k < 16; k++) {
      const uint32_t *p = a + k / 2 * row + width * i, *q = b + k / 2 * row + width * i;
      uint16_t halves[2][16];
      for (int l = 0; l < 16; l++)
        halves[0][l] = (uint16_t)(p[l] >> 16 * (k & 1)),
        halves[1][l] = (uint16_t)(q[l] >> 16 * (k & 1));
      if (o->handler != HANDLER_WMMA_BF16)
        sixteen_halves(x[k], halves[0]), sixteen_halves(y[k], halves[1]);
      else
        for (int l = 0; l < 16; l++) x[k][l] = bfloat(halves[0][l]), y[k][l] = bfloat(halves[1][l]);
    }
    sum_products(sum, x, y, o->handler != HANDLER_WMMA_BF16);
    for (int m = 0; m < 16; m++) {
      const long at = row_at(w, m, i);
      if (o->handler == HANDLER_WMMA_HALF)
        for (int l = 0; l < 16; l++)
          sum[m][l] += half_value((uint16_t)(inline_c ? value : c[at + l] >> shift));
      else
        for (int l = 0; l < 16; l++) sum[m][l] += f_of_I(inline_c ? value : c[at + l]);
    }
    for (int m = 0; m < 16; m++) {
      uint32_t *to = d + row_at(w, m, i);
      if (o->handler == HANDLER_WMMA_HALF)
        for (int l = 0; l < 16; l++)
          to[l] = (to[l] & keep) | (uint32_t)half_bits(sum[m][l]) << shift;
      else memcpy(to, sum[m], 64);
    }
  }
  return 0;
}

// Executes V_WMMA_I32_16X16X16_IU8. Bit 0 of `extended` is set if the bytes of A are signed, and
// bit 1 if the bytes of B are signed.
static int wmma_iu8(State *w, const Op *o) {
  const long n = w->n, width = lanes(w), row = width * n;
  const uint32_t *a = w->v + o->source[0].index * row, *b = w->v + o->source[1].index * row;
  const uint32_t *c = w->v + o->source[2].index * row;
  const int inline_c = o->source[2].file == CONSTANT;
  if (!w->full || !repeats(w, o->source[0].index, 4) || !repeats(w, o->source[1].index, 4))
    return 1;
  for (long i = 0; i < n; i++) {
    int32_t x[16][16], y[16][16], sum[16][16];
    for (int k = 0; k < 16; k++)
      for (int l = 0; l < 16; l++) {
        const long at = (k >> 2) * row + width * i + l;
        const uint8_t p = (uint8_t)(a[at] >> 8 * (k & 3)), q = (uint8_t)(b[at] >> 8 * (k & 3));
        x[k][l] = o->extended & 1 ? (int8_t)p : p;
        y[k][l] = o->extended & 2 ? (int8_t)q : q;
      }
    for (int m = 0; m < 16; m++) {
      const uint32_t *old = c + row_at(w, m, i);
      for (int l = 0; l < 16; l++)
        sum[m][l] = inline_c ? (int32_t)o->source[2].value : (int32_t)old[l];
      for (int k = 0; k < 16; k++)
        for (int l = 0; l < 16; l++) sum[m][l] += x[k][m] * y[k][l];
    }
    for (int m = 0; m < 16; m++) memcpy(w->v + o->target.index * row + row_at(w, m, i), sum[m], 64);
  }
  return 0;
}
