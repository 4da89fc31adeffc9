// SPDX-License-Identifier: BSD-3-Clause
// The race shadow: what track and track_store of memory/shadow.py do where there is no fault.
// Tags: happens_before.py. Whether an access tagged old and a later one tagged new may swap.
// Not 0 if so; without branches, so that loops become vector code.
static inline int64_t unordered(int64_t old, int64_t new) {
  const int64_t differ = old ^ new, other = old >> 22 >= new >> 22 ? differ & 0xff : 0;
  return old ? differ >> 40 | other : 0;
}

// The tag of several waves that read a cell: see happens_before.py.
static inline int64_t readers(int64_t tag) {
  return (tag & 0xff) == 0xff ? tag & 0x3fff00 : 0x100ll << (tag & 7);
}
static inline int64_t several(int64_t a, int64_t b) {
  return ((a > b ? a : b) & ~0x3fffffll) | readers(a) | readers(b) | 0xff;
}

// Whether they may, for all that atomics ordered. 2: numpy is to look at it, as what they ordered
// for some of several waves at one cell decides which tags are left, or as a cache may hide what is
// ordered.
static int may_swap(State *w, int64_t old, int64_t new) {
  if (!unordered(old, new)) return 0;
  if (!w->ordered) return 1;
  if (w->asked[0] != old || w->asked[1] != new) {
    w->answer = w->order(old, new);
    w->asked[0] = old, w->asked[1] = new;
  }
  return !w->answer ? 1 : w->answer == 2 || w->shared ? 2 : 0;
}

// Whether waves may have a cell in common: all but where each lies behind the one before it.
static inline int meet(const Memory *m, const State *w, const int64_t *at, int size) {
  int64_t end = -1;
  for (long i = 0; i < w->n; i++) {
    const int64_t *mine = at + i * lanes(w);
    int64_t first = INT64_MAX, last = -1;
    for (long l = 0; l < lanes(w); l++) {
      if (mine[l] < 0) continue;
      first = mine[l] < first ? mine[l] : first;
      last = mine[l] > last ? mine[l] : last;
    }
    if (last < 0) continue;
    if (first >> m->shift <= end) return w->n > 1;
    end = (last + size - 1) >> m->shift;
  }
  return 0;
}

static inline int64_t cells(const Memory *m, int size) {
  const int64_t count = size >> m->shift;
  return count ? count : 1;
}

// In memory of one workgroup: a tag below this one is of an access in front of the last barrier.
static inline int64_t before_barrier(int64_t tag) { return tag & ~0x3fffffll; }

static inline int wrote(const Memory *m, int64_t cell, int64_t mark) {
  return m->written[cell] >> 40 == mark >> 40 && m->writers[cell] >> (mark & 31) & 1;
}

// The tag of cells after a read by mark; 0 if numpy is to look at it. private: of one workgroup,
// where it must have been written before.
static inline int64_t tag_read(State *w, int64_t written, int64_t seen, int64_t mark, int mine,
                               int private) {
  if (private && !written) return 0;
  const int after_write = may_swap(w, written, mark), after_read = may_swap(w, seen, mark);
  if (after_write == 2 || (after_write && !mine) || after_read == 2) return 0;
  if (!after_read) return mark;
  if (seen >> 40 != mark >> 40) return 1ll << 62;
  return several(seen, mark);
}

// Whether all cells from the first on have the first one's tags: most often so.
static inline int alike(const int64_t *written, const int64_t *read, int64_t count) {
  int64_t differ = 0;
  for (int64_t c = 1; c < count; c++) differ |= (written[c] ^ written[0]) | (read[c] ^ read[0]);
  return !differ;
}

// Notes a load of count cells. 1 if numpy is to look at it.
static inline __attribute__((always_inline)) int note_load(Memory *m, int64_t first, int64_t count,
                                                           State *w, int64_t mark, int private) {
  int64_t *written = m->written + first, *read = m->read + first;
  if (alike(written, read, count) && !unordered(written[0], mark)) {
    if (read[0] == mark && (written[0] || !private)) return 0;
    const int64_t tag = tag_read(w, written[0], read[0], mark, 0, private);
    for (int64_t c = 0; c < count; c++) read[c] = tag ? tag : read[c];
    return !tag;
  }
  for (int64_t c = 0; c < count; c++) {
    const int mine = wrote(m, first + c, mark);
    const int64_t tag = tag_read(w, written[c], read[c], mark, mine, private);
    if (!tag) return 1;
    read[c] = tag;
  }
  return 0;
}

// Waves of a workgroup may store the same value to one place. same: whether it stands there.
static inline __attribute__((always_inline)) int
may_store(const Memory *m, int64_t first, int64_t count, State *w, int64_t mark, int same) {
  const int64_t *written = m->written + first, *read = m->read + first;
  if (alike(written, read, count)) count = 1;
  for (int64_t c = 0; c < count; c++) {
    const int after_write = may_swap(w, written[c], mark);
    if (may_swap(w, read[c], mark) || after_write == 2) return 0;
    if (after_write && !(same && written[c] >> 40 == mark >> 40)) return 0;
  }
  return 1;
}

static inline __attribute__((always_inline)) int note_store(Memory *m, int64_t first, int64_t count,
                                                            State *w, int64_t mark) {
  for (int64_t c = first; c < first + count; c++) {
    const uint32_t others = may_swap(w, m->written[c], mark) ? m->writers[c] : 0;
    m->writers[c] = others | 1u << (mark & 31);
    m->written[c] = mark;
  }
  return 0;
}

// With a count that the compiler knows.
#define BY_COUNT(F, ...)                      \
  (count == 1   ? F(m, first, 1, __VA_ARGS__) \
   : count == 2 ? F(m, first, 2, __VA_ARGS__) \
   : count == 4 ? F(m, first, 4, __VA_ARGS__) \
   : count == 8 ? F(m, first, 8, __VA_ARGS__) \
                : F(m, first, count, __VA_ARGS__))

#define INLINE static inline __attribute__((always_inline))

// Whether sixteen lanes lie one behind the other, size bytes apart, or all at one place.
static inline int in_a_row(const int64_t *at, int64_t size) {
  // of 32 bits: a product of 64 takes three instructions of vector code
  const uint32_t step = at[1] == at[0] ? 0 : size;
#ifdef __AVX512F__
  const __m512i number = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low =
      _mm512_add_epi64(_mm512_set1_epi64(at[0]), _mm512_mul_epu32(number, _mm512_set1_epi64(step)));
  const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(8ll * step));
  return at[0] >= 0 && !(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(at), low) |
                         _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(at + 8), high));
#else
  int64_t differ = at[0] < 0;
  for (uint32_t l = 0; l < 16; l++) differ |= at[l] - at[0] - (int64_t)((uint64_t)l * step);
  return !differ;
#endif
}

// Executes what follows for each cell, of count by active lane, of a wave's lanes: long rows of
// cells are vector code. Inactive lanes lie below 0.
#define EACH_CELL(...)                                                                       \
  for (long g = 0; g < lanes(w); g += 16)                                                    \
    if (in_a_row(mine + g, count << m->shift)) {                                             \
      const int64_t first = mine[g] >> m->shift;                                             \
      const int64_t end = first + (mine[g + 1] == mine[g] ? count : 16 * count);             \
      _Pragma("GCC ivdep") for (int64_t c = first; c < end; c++) { __VA_ARGS__ }             \
    } else if (count == 1) {                                                                 \
      _Pragma("GCC ivdep") for (long l = g; l < g + 16; l++) {                               \
        const int64_t c = mine[l] >> m->shift;                                               \
        if (c >= 0) {                                                                        \
          __VA_ARGS__                                                                        \
        }                                                                                    \
      }                                                                                      \
    } else                                                                                   \
      for (long l = g; l < g + 16; l++) {                                                    \
        const int64_t first = mine[l] >> m->shift, end = first + count;                      \
        if (first < 0) continue;                                                             \
        _Pragma("GCC ivdep") _Pragma("GCC unroll 1") for (int64_t c = first; c < end; c++) { \
          __VA_ARGS__                                                                        \
        }                                                                                    \
      }

// For all lanes of one access: whether their tags alone say that nothing can swap with it.
INLINE int quiet(const Memory *m, int64_t unused, int64_t count, State *w, const int64_t *at,
                 int write, int private) {
  const int64_t *written = m->written, *read = m->read;
  int64_t found = 0, others = 0;
  for (long i = 0; private && i < w->n; i++) {
    const int64_t *mine = at + i * lanes(w);
    const uint64_t before = before_barrier(w->tags[i]);
    EACH_CELL(found |= (uint64_t)written[c] - 1 >= before - 1;)
  }
  if (private && !found) return 1;
  for (long i = 0; i < w->n; i++) {
    const int64_t mark = w->tags[i], *mine = at + i * lanes(w);
    if (write) EACH_CELL(found |= unordered(written[c], mark) | unordered(read[c], mark);)
    else if (private) EACH_CELL(found |= unordered(written[c], mark) | !written[c];)
    else EACH_CELL(found |= unordered(written[c], mark); others |= unordered(read[c], mark);)
  }
  w->readers = others != 0;
  return !found;
}

// Scratch is a lane's own, so nothing races there: its shadow has a byte for each cell that was
// written. Whether a lane loads what nothing wrote.
INLINE int unwritten(const Memory *m, int64_t unused, int64_t count, long n, const int64_t *at) {
  const uint8_t *written = (const uint8_t *)m->written;
  int64_t found = 0;
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; at[l] >= 0 && c < first + count; c++) found |= !written[c];
  }
  return found != 0;
}

INLINE int note_own(const Memory *m, int64_t unused, int64_t count, long n, const int64_t *at) {
  uint8_t *written = (uint8_t *)m->written;
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; at[l] >= 0 && c < first + count; c++) written[c] = 1;
  }
  return 0;
}

// What is noted of several readers: which they are, as doubts.py asks of global memory, or that
// there are some; or there are none.
enum { NAMED, UNNAMED, ALONE };

// Notes such a load: tag_read for all lanes, where atomics ordered nothing. A second time for the
// same wave changes nothing. Gives whether waves that were noted as alone have a cell in common.
INLINE int note_loads(Memory *m, int64_t unused, int64_t count, const State *w, const int64_t *at,
                      int how) {
  int64_t *read = m->read;
  for (long i = 0; i < w->n; i++) {
    const int64_t mark = w->tags[i], *mine = at + i * lanes(w);
    if (how == ALONE) {
      EACH_CELL(read[c] = mark;)
      continue;
    }
    if (how == UNNAMED) {
      const int64_t before = before_barrier(mark);
      EACH_CELL(const int64_t seen = read[c], later = seen > mark ? seen : mark;
                read[c] = seen < before || !((seen ^ mark) & 0xff) ? mark : later | 0xff;)
      continue;
    }
    EACH_CELL(const int64_t seen = read[c];
              const int64_t both = seen >> 40 == mark >> 40 ? several(seen, mark) : 1ll << 62;
              read[c] = unordered(seen, mark) ? both : mark;)
  }
  int64_t shared = 0;
  for (long i = 0; how == ALONE && w->n > 1 && i < w->n; i++) {
    const int64_t mark = w->tags[i], *mine = at + i * lanes(w);
    EACH_CELL(shared |= read[c] ^ mark;)
  }
  return shared != 0;
}

// Notes such a store; gives whether several waves stored to one cell.
INLINE int note_stores(Memory *m, int64_t unused, int64_t count, const State *w,
                       const int64_t *at) {
  int64_t *written = m->written, shared = 0;
  uint32_t *writers = m->writers;
  for (long i = 0; i < w->n; i++) {
    const int64_t mark = w->tags[i], *mine = at + i * lanes(w);
    const uint32_t writer = 1u << (mark & 31);
    EACH_CELL(writers[c] = writer | (unordered(written[c], mark) ? writers[c] : 0);
              written[c] = mark;)
  }
  for (long i = 0; w->n > 1 && i < w->n; i++) {
    const int64_t mark = w->tags[i], *mine = at + i * lanes(w);
    EACH_CELL(shared |= written[c] ^ mark;)
  }
  return shared != 0;
}
