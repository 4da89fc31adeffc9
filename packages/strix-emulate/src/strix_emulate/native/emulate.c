// SPDX-License-Identifier: BSD-3-Clause
// Executes runs of instructions on the registers of waves. Except for some NaNs and the last bit of
// some logarithms, the results are those of the Python code, which executes the same instructions
// with numpy.
//
// The C functions of the operations are in operations.inc, which generate.py generates from the
// Python tables of operations. strix_run stops before an instruction that C does not handle, for
// example because of a possible race, an address out of bounds, or a partial EXEC in a WMMA. Python
// then executes that instruction with numpy, or traps.
#include "numbers.h"

// Loops over n lanes. LANES requires a multiple of 32, so that its vector code has no remainder.
#define EACH for (long l = 0; l < n; l++)
#define LANES _Pragma("GCC ivdep") for (long l = 0; l < (n & ~31l); l++)
enum { EXEC = 126, NIL = 124 };

typedef void Function(void *const *p, long n);
typedef struct {
  const char *name;
  Function *function;
} Named;

// A function that is compiled once and not inlined, because a hundred operations call it.
#define ONCE static __attribute__((noinline)) void
ONCE from_halves(float *restrict to, const uint16_t *restrict from, long n) {
  EACH to[l] = half_value(from[l]);
}
ONCE to_halves(uint16_t *restrict to, const float *restrict from, long n) {
  EACH to[l] = half_bits(from[l]);
}

#include "operations.inc"

// The structures of this file have the layout of those in library.py.
typedef struct {
  int32_t file, index, bits, half, neg, abs, flush, pad;
  uint64_t value;
} Operand;
enum { NONE, VECTOR, SCALAR, CONSTANT, MASK, SCC, SPARE, LANE };

typedef struct {
  Function *function;
  int32_t handler, results, sources, after, write_exec, step, place;
  float factor;
  int32_t dpp, zero_bound, fetch_inactive, size, words, offset, half, extended, memory, highest,
      resource, acquires, indexed, number, polls;
  // For DPP: mask of the lanes with a valid source lane, and masks of the lanes to write, one for
  // each half of a wave64. The source lanes are the same for both halves.
  uint32_t valid, written[2];
  uint8_t lanes[32];
  uint32_t apertures[2];  // for a flat access, high halves of the addresses of LDS and scratch
  Operand target, flag, source[4];
} Op;
// generate.py defines the macros HANDLER_..., which are the values of Op.handler. They have the
// numbers of library.HANDLERS.

// The bits of Op.after.
enum { CLAMP = 1, FLUSH = 2, FACTOR = 4 };

typedef struct {
  uint64_t start, size;
  int64_t offset, mode;
} Range;
enum { READ_ONLY = 1, UNWRITTEN = 3 };  // modes of an array, as in arena.py

typedef struct {
  uint8_t *bytes;
  int64_t *written, *read;  // tags of the race shadow, or null if races are not checked
  uint32_t *writers, *store_addresses;
  const int64_t *slots;  // row of each wave in LDS or scratch
  int64_t size, stride, shift, strict, co_writers;
  const Range *ranges;  // sorted ranges of global memory; a range may be empty
  int64_t range_count, last_range;
  uint64_t accessed_ranges;  // bit mask of the ranges that were accessed
} Memory;
enum { GLOBAL, LDS, SCRATCH, FLAT };

typedef struct {
  uint32_t *v, *s;
  uint8_t *scc;
  int64_t n, halves;  // n: number of waves; halves: number of halves of a wave, with 32 lanes each
  const int64_t *tags;
  int64_t exec_changed, atomics_order;    // atomics_order: whether an atomic ordered any accesses
  int (*classify)(int64_t, int64_t);      // Order.classify of happens_before.py
  int64_t classified[2], classification;  // last arguments and result of classify
  uint64_t *stored, *loaded_ranges;       // records for doubts.py, or null
  int64_t *polled, polled_memory;         // offsets of the last poll for polls.py, or null
  uint32_t *masks;                        // for each lane, all ones if it is active, or else 0
  uint64_t *spare[8];                     // spare registers, with 64 bits for each lane
  int64_t *log;                           // accesses that may be outstanding at the end of the run
  int64_t full;                           // whether all lanes are active
  int64_t has_readers;                    // whether other waves read the cells of the last load
  int64_t shares_cells;                   // whether several waves may access the same cells
  Memory memory[3];
} State;

// Number of lanes of a wave.
static inline long lanes(const State *w) { return 32 * w->halves; }
// Row of the wave to which a lane belongs.
static inline long wave_of(const State *w, long lane) { return lane >> (4 + w->halves); }
// Returns the address of the 32-bit lane mask in a scalar register, for half h of the waves. A
// wave64 has two halves, and a wave32 is one half. The halves of all waves are numbered
// consecutively.
static inline uint32_t *mask_of(const State *w, int index, long h) {
  const long second = w->halves - 1;
  return w->s + (index + (h & second)) * w->n + (h >> second);
}

// Derives `full` and `masks` from EXEC.
static void update_masks(State *w) {
  const long halves = w->n * w->halves;
  uint32_t all = 0xffffffff;
  for (long h = 0; h < halves; h++) all &= *mask_of(w, EXEC, h);
  w->full = all == 0xffffffff;
  if (!w->full)
    for (long h = 0; h < halves; h++) {
      const uint32_t exec = *mask_of(w, EXEC, h);
      uint32_t *masks = w->masks + 32 * h;
#ifdef __AVX512F__
      _mm512_storeu_si512(masks, _mm512_maskz_set1_epi32((__mmask16)exec, -1));
      _mm512_storeu_si512(masks + 16, _mm512_maskz_set1_epi32((__mmask16)(exec >> 16), -1));
#else
      for (int l = 0; l < 32; l++) masks[l] = -(exec >> l & 1);
#endif
    }
}

// clang-format off
#define MODIFY(T, SIGN, TINY) { \
    T *x = at; const T sign = SIGN; \
    if (o->flush) EACH { T m = x[l] & ~sign; x[l] = m < TINY ? x[l] & sign : x[l]; } \
    if (o->abs) EACH x[l] &= ~sign; \
    if (o->neg) EACH x[l] ^= sign; }
// clang-format on

static void flush(void *at, int bits, long n) {
  Operand plain = {.flush = 1}, *o = &plain;
  if (bits == 64) MODIFY(uint64_t, 1ull << 63, 1ull << 52)
  else if (bits == 32) MODIFY(uint32_t, 1u << 31, 1u << 23)
  else MODIFY(uint16_t, 1u << 15, 1u << 10)
}

// Returns the values of a source: one for each lane, or one for each wave if width is 1. The result
// is `temporary`, or else the register itself or spare[7].
static void *fetch(State *w, const Operand *o, void *temporary, long width) {
  const long waves = w->n, n = waves * width;
  const uint32_t *row = o->file == VECTOR ? w->v + o->index * n : w->s + o->index * waves;
  void *at = temporary;
  uint32_t *x = temporary;
  uint64_t *wide = temporary;
  uint16_t *narrow = temporary;
  const int shift = o->half ? 16 : 0, modified = o->neg | o->abs | o->flush;
  switch (o->file) {
  case SPARE: return w->spare[7];
  case SCC:
    for (long i = 0; i < waves; i++) x[i] = w->scc[i];
    return x;
  case MASK:
    for (long h = 0; h < n / 32; h++) {
      const uint32_t bits = *mask_of(w, o->index, h);
      for (long l = 0; l < 32; l++) x[h * 32 + l] = bits >> l & 1;
    }
    return x;
  case LANE: LANES x[l] = (uint32_t)(l & (width - 1)); return x;
  case CONSTANT:
    if (o->bits == 64) EACH wide[l] = o->value;
    else if (o->bits == 32) EACH x[l] = (uint32_t)o->value;
    else EACH narrow[l] = (uint16_t)o->value;
    break;
  case VECTOR:
    if (o->bits == 64) LANES wide[l] = row[l] | (uint64_t)row[l + n] << 32;
    else if (o->bits == 16) LANES narrow[l] = (uint16_t)(row[l] >> shift);
    else if (modified) memcpy(x, row, 4 * n);
    else return (void *)row;
    break;
  default:
    if (width == 1 && o->bits == 32 && !modified) return (void *)row;
    for (long i = 0; i < waves; i++) {
      uint64_t value = row[i];
      const long first = i * width, end = first + width;
      if (o->bits == 64) value |= (uint64_t)row[i + waves] << 32;
      if (o->bits == 64)
        for (long l = first; l < end; l++) wide[l] = value;
      else if (o->bits == 32)
        for (long l = first; l < end; l++) x[l] = (uint32_t)value;
      else
        for (long l = first; l < end; l++) narrow[l] = (uint16_t)(value >> shift);
    }
  }
  if (modified) {
    if (o->bits == 64) MODIFY(uint64_t, 1ull << 63, 1ull << 52)
    else if (o->bits == 32) MODIFY(uint32_t, 1u << 31, 1u << 23)
    else MODIFY(uint16_t, 1u << 15, 1u << 10)
  }
  return at;
}

// clang-format off
#define PERMUTE(T) { \
    const T *x = from, zero = (T)o->source[0].neg << (8 * sizeof(T) - 1); T *y = to; \
    for (long i = 0; i < halves; i++) \
      for (int l = 0; l < 32; l++) y[32 * i + l] = x[32 * i + o->lanes[l]]; \
    if (o->zero_bound) for (long i = 0; i < halves; i++) \
      for (int l = 0; l < 32; l++) if (!(fetched[i] >> l & 1)) y[32 * i + l] = zero; }
// clang-format on

// Applies DPP to source 0, and sets the masks of the lanes to write. See crosslane.dpp_source.
static void apply_dpp(State *w, const Op *o, const void *from, void *to, uint32_t *masks) {
  const long halves = w->n * w->halves;
  uint32_t fetched[halves];
  for (long i = 0; i < halves; i++) {
    const uint32_t exec = *mask_of(w, EXEC, i);
    fetched[i] = o->valid;
    if (!w->full && !o->fetch_inactive)
      for (int l = 0; l < 32; l++)
        if (!(exec >> o->lanes[l] & 1)) fetched[i] &= ~(1u << l);
    uint32_t lanes =
        exec & o->written[i & (w->halves - 1)] & (o->zero_bound ? 0xffffffff : fetched[i]);
    for (int l = 0; l < 32; l++) masks[32 * i + l] = -(lanes >> l & 1);
  }
  if (o->source[0].bits == 64) PERMUTE(uint64_t)
  else if (o->source[0].bits == 32) PERMUTE(uint32_t)
  else PERMUTE(uint16_t)
}

// Applies output modifiers in the ISA's order. See mode_register.output_modifiers.
static void apply_output_modifiers(const Op *o, void *at, long n) {
  float *x = at;
  if (o->after & FACTOR) {
    LANES x[l] *= o->factor;
    flush(at, 32, n);
    LANES x[l] += 0.0f;
  }
  if (o->after & CLAMP) LANES {
      float y = x[l] != x[l] || !(x[l] > 0) ? 0.0f : x[l];
      x[l] = y < 1.0f ? y : 1.0f;
    }
  if (o->after & FLUSH) flush(at, o->target.bits, n);
}

static void store_vector(State *w, const Operand *d, const void *from, const uint32_t *m) {
  const long n = lanes(w) * w->n;
  uint32_t *row = w->v + d->index * n;
  const uint32_t *x = from;
  const uint64_t *wide = from;
  const uint16_t *narrow = from;
  const uint32_t keep = d->half ? 0xffff : 0xffff0000;
  const int shift = d->half ? 16 : 0;
  if (d->file == SPARE) memcpy(w->spare[7], x, 4 * n);
  else if (d->bits == 64) LANES {
      uint32_t low = (uint32_t)wide[l], high = (uint32_t)(wide[l] >> 32);
      row[l] = m ? (row[l] & ~m[l]) | (low & m[l]) : low;
      row[l + n] = m ? (row[l + n] & ~m[l]) | (high & m[l]) : high;
    }
  else if (d->bits == 16) LANES {
      uint32_t both = (row[l] & keep) | (uint32_t)narrow[l] << shift;
      row[l] = m ? (row[l] & ~m[l]) | (both & m[l]) : both;
    }
  else if (!m) memcpy(row, x, 4 * n);
  else LANES row[l] = (row[l] & ~m[l]) | (x[l] & m[l]);
}

static void compute(State *w, const Op *o) {
  const long n = lanes(w) * w->n;
  void *p[8], *value = w->spare[0];
  const uint32_t *m = w->full ? 0 : w->masks;
  int count = 0, direct = 0;
  if (o->target.file) {
    direct = !m && !o->dpp && !o->after && o->target.bits == 32 && o->target.file == VECTOR;
    if (direct) value = w->v + o->target.index * n;
    p[count++] = value;
  }
  if (o->flag.file) p[count++] = w->spare[1];
  for (int i = 0; i < o->sources; i++)
    p[count + i] = fetch(w, &o->source[i], w->spare[2 + i], lanes(w));
  if (o->dpp) {
    apply_dpp(w, o, p[count], w->spare[6], w->masks);
    p[count] = w->spare[6];
    m = w->masks;
  }
  o->function(p, n);
  if (o->target.file && !direct) {
    if (o->after) apply_output_modifiers(o, value, n);
    store_vector(w, &o->target, value, m);
  }
  if (o->flag.file) {
    const uint32_t *flags = (const uint32_t *)w->spare[1];
    for (long h = 0; h < w->n * w->halves; h++) {
      uint32_t bits = 0;
      for (int l = 0; l < 32; l++) bits |= (flags[32 * h + l] & (m ? m[32 * h + l] : 1) & 1) << l;
      if (o->flag.index != NIL) *mask_of(w, o->flag.index, h) = bits;
    }
  }
  if (o->write_exec || (o->dpp && !w->full)) update_masks(w);
  w->exec_changed |= o->write_exec;
}

static void compute_scalar(State *w, const Op *o) {
  void *p[8];
  int count = 0;
  if (o->target.file) p[count++] = w->spare[0];
  if (o->flag.file) p[count++] = w->spare[1];
  for (int i = 0; i < o->sources; i++) p[count + i] = fetch(w, &o->source[i], w->spare[2 + i], 1);
  o->function(p, w->n);
  if (o->after & FLUSH) flush(p[0], o->target.bits, w->n);
  uint32_t *row = w->s + o->target.index * w->n;
  if (o->target.file && o->target.index != NIL) {
    if (o->target.bits == 64)
      for (long i = 0; i < w->n; i++) {
        row[i] = (uint32_t)w->spare[0][i];
        row[i + w->n] = (uint32_t)(w->spare[0][i] >> 32);
      }
    else memcpy(row, w->spare[0], 4 * w->n);
  }
  if (o->flag.file)
    for (long i = 0; i < w->n; i++) w->scc[i] = ((uint32_t *)w->spare[1])[i] != 0;
  if (o->write_exec) update_masks(w), w->exec_changed = 1;
}

// Executes S_*_SAVEEXEC: writes the old EXEC to the target, and the result to EXEC. SCC is set if
// the result is not 0.
static void save_exec(State *w, const Op *o) {
  void *p[3] = {w->spare[0]};
  for (int i = 0; i < 2; i++) p[1 + i] = fetch(w, &o->source[i], w->spare[2 + i], 1);
  o->function(p, w->n);
  const int words = o->target.bits / 32;
  memset(w->scc, 0, w->n);
  for (long i = 0; i < w->n; i++)
    for (int k = 0; k < words; k++) {
      uint32_t *exec = w->s + (EXEC + k) * w->n + i;
      const uint32_t result = ((uint32_t *)p[0])[words * i + k];
      if (o->target.index != NIL) w->s[(o->target.index + k) * w->n + i] = *exec;
      *exec = result;
      w->scc[i] |= result != 0;
    }
  update_masks(w), w->exec_changed = 1;
}

#include "exchange.h"
#include "matrix.h"
#include "memory.h"

// Returns whether all waves continue with the trace's next block. See traces.py.
static int all_follow(const State *w, const Op *o) {
  const uint32_t *low = w->s + o->target.index * w->n, *high = low + (w->halves - 1) * w->n;
  int others = 0;
  for (long i = 0; i < w->n; i++)
    others |= ((o->target.file == SCC ? w->scc[i] : low[i] | high[i]) != 0) != o->words;
  return !others;
}

// Executes count operations. Returns the number of executed operations, which is less than count if
// numpy has to execute the next operation, or if the next operation is the guard at which the waves
// leave a trace. kept: for each operation, its row of the log or -1. kept is null if there is no
// log.
long strix_run(State *w, const Op *ops, long count, const int32_t *kept) {
  w->exec_changed = 0;
  w->classified[0] = 0;
  update_masks(w);
  for (long i = 0; i < count; i++) {
    const Op *o = ops + i;
    int64_t *log = kept && kept[i] >= 0 ? w->log + kept[i] * (1 + lanes(w) * w->n) : 0;
    if (log) log[0] = 0;
    switch (o->handler) {
    case HANDLER_VECTOR: compute(w, o); break;
    case HANDLER_SCALAR: compute_scalar(w, o); break;
    case HANDLER_WMMA_F16:
    case HANDLER_WMMA_BF16:
    case HANDLER_WMMA_HALF:
      if (wmma(w, o)) return i;
      break;
    case HANDLER_WMMA_IU8:
      if (wmma_iu8(w, o)) return i;
      break;
    case HANDLER_PERMLANE16:
    case HANDLER_PERMLANEX16:
      if (!w->full) return i;
      permlane(w, o, o->handler == HANDLER_PERMLANEX16 ? 16 : 0);
      break;
    case HANDLER_PERMLANE64: swap_halves(w, o); break;
    case HANDLER_READLANE:
    case HANDLER_READFIRSTLANE:
    case HANDLER_WRITELANE: between_files(w, o); break;
    case HANDLER_SAVEEXEC: save_exec(w, o); break;
    case HANDLER_LOAD:
      if (load(w, o, log)) return i;
      break;
    case HANDLER_STORE:
      if (store(w, o, log)) return i;
      break;
    case HANDLER_GUARD:
      if (!all_follow(w, o)) return i;
      break;
    case HANDLER_ATOMIC:
      if (atomic(w, o, log)) return i;
      break;
    case HANDLER_LOAD_SCALAR:
      if (load_scalar(w, o)) return i;
      break;
    case HANDLER_BPERMUTE:
    case HANDLER_PERMUTE:
    case HANDLER_SWIZZLE: exchange(w, o); break;
    default: break;
    }
  }
  return count;
}

const Named *strix_operations(void) { return operations; }
const char *strix_digest(void) { return DIGEST; }
