// SPDX-License-Identifier: BSD-3-Clause
// Updates the race shadow as track and track_store of memory/shadow.py do if they find no race.

// Layout of a tag: see memory/tags.py.
enum { WORKGROUP = 40, BARRIER = 22, SEVERAL = 0xff };
#define EVERYONE (1ll << 62)
#define BELOW_BARRIER ((1ll << BARRIER) - 1)

// Returns a number that is not 0 if an access with the old tag and a later one with the new tag are
// of different waves, and no barrier orders them. There is no access if the old tag is 0. The
// function has no branches, so that loops can be vectorized.
static inline int64_t unordered(int64_t old, int64_t new) {
  const int64_t differ = old ^ new;
  const int64_t other_wave = old >> BARRIER >= new >> BARRIER ? differ & 0xff : 0;
  return old ? differ >> WORKGROUP | other_wave : 0;
}

// Returns the tag that a plain store leaves in a cell: see store_tags of memory/tags.py.
static inline int64_t store_tag(int64_t tag, int global) {
  const int64_t releases = BELOW_BARRIER & ~0xff;
  return global && (tag & releases) != releases ? tag + 0x100 : tag;
}

static inline int same_workgroup(int64_t a, int64_t b) { return a >> WORKGROUP == b >> WORKGROUP; }

// Returns which waves read a cell, from the tag of the reads: a bit for each wave number modulo 8.
// Tags of reads have these bits in place of the release field.
static inline int64_t reader_bits(int64_t tag) {
  return (tag & 0xff) == SEVERAL ? tag & 0x3fff00 : 0x100ll << (tag & 7);
}

// Returns the tag of a cell that two waves of one workgroup read.
static inline int64_t merge_readers(int64_t a, int64_t b) {
  return ((a > b ? a : b) & ~BELOW_BARRIER) | reader_bits(a) | reader_bits(b) | SEVERAL;
}

enum { ORDERED, RACE, ASK_NUMPY };

// Returns whether two accesses may race in spite of barriers and atomics. The result is ASK_NUMPY
// in two cases: a cache may hide the earlier access, or several waves access the same cells. In the
// second case, the tags that the cells keep depend on which of these accesses an atomic orders.
static int may_race(State *w, int64_t old, int64_t new) {
  if (!unordered(old, new)) return ORDERED;
  if (!w->atomics_order) return RACE;
  if (w->classified[0] != old || w->classified[1] != new) {
    w->classification = w->classify(old, new);
    w->classified[0] = old;
    w->classified[1] = new;
  }
  if (!w->classification) return RACE;
  return w->classification == 2 || w->shares_cells ? ASK_NUMPY : ORDERED;
}

// Returns whether several waves may access the same cell. They do not if all cells of each wave
// have higher numbers than the cells of the previous wave.
static inline int may_share_cells(const Memory *m, const State *w, const int64_t *at, int size) {
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

// Returns the number of cells of an access.
static inline int64_t cells(const Memory *m, int size) {
  const int64_t count = size >> m->shift;
  return count ? count : 1;
}

// Returns the smallest tag after the last barrier. In memory of one workgroup, that barrier orders
// all accesses with smaller tags.
static inline int64_t last_barrier(int64_t tag) { return tag & ~BELOW_BARRIER; }

// Returns whether the tag's wave wrote the current value of a cell.
static inline int wrote_value(const Memory *m, int64_t cell, int64_t tag) {
  return same_workgroup(m->written[cell], tag) && m->writers[cell] >> (tag & 31) & 1;
}

// Returns the tag that a load gives to a cell as its last read, or 0 if numpy has to execute the
// load. own: whether the wave itself wrote the value. private: whether the memory belongs to one
// workgroup, and loads of cells that nothing wrote are reported.
static inline int64_t read_tag(State *w, int64_t written, int64_t read, int64_t tag, int own,
                               int private) {
  if (private && !written) return 0;
  const int after_write = may_race(w, written, tag), after_read = may_race(w, read, tag);
  if (after_write == ASK_NUMPY || (after_write && !own) || after_read == ASK_NUMPY) return 0;
  if (!after_read) return tag;
  if (!same_workgroup(read, tag)) return EVERYONE;
  return merge_readers(read, tag);
}

// Returns whether all cells have the same tags as the first cell, which is the usual case.
static inline int have_same_tags(const int64_t *written, const int64_t *read, int64_t count) {
  int64_t differ = 0;
  for (int64_t c = 1; c < count; c++) differ |= (written[c] ^ written[0]) | (read[c] ^ read[0]);
  return !differ;
}

// Records a load of count cells. Returns 1 if numpy has to execute the load.
static inline __attribute__((always_inline)) int note_load(Memory *m, int64_t first, int64_t count,
                                                           State *w, int64_t tag, int private) {
  int64_t *written = m->written + first, *read = m->read + first;
  if (have_same_tags(written, read, count) && !unordered(written[0], tag)) {
    if (read[0] == tag && (written[0] || !private)) return 0;
    const int64_t merged = read_tag(w, written[0], read[0], tag, 0, private);
    for (int64_t c = 0; c < count; c++) read[c] = merged ? merged : read[c];
    return !merged;
  }
  for (int64_t c = 0; c < count; c++) {
    const int own = wrote_value(m, first + c, tag);
    const int64_t merged = read_tag(w, written[c], read[c], tag, own, private);
    if (!merged) return 1;
    read[c] = merged;
  }
  return 0;
}

// Returns whether a store has no finding, and numpy need not execute it. Waves of a workgroup may
// store the same value to a cell. same: whether the cell already has the value of this store.
static inline __attribute__((always_inline)) int
may_store(const Memory *m, int64_t first, int64_t count, State *w, int64_t tag, int same) {
  const int64_t *written = m->written + first, *read = m->read + first;
  if (have_same_tags(written, read, count)) count = 1;
  for (int64_t c = 0; c < count; c++) {
    const int after_write = may_race(w, written[c], tag);
    if (may_race(w, read[c], tag) || after_write == ASK_NUMPY) return 0;
    if (after_write && !(same && same_workgroup(written[c], tag))) return 0;
  }
  return 1;
}

// Forgets the writers of cells whose last store is ordered before a store. A store does this for
// all lanes before note_store changes tags, because several lanes may store to the same cell.
static inline __attribute__((always_inline)) int
forget_writers(Memory *m, int64_t first, int64_t count, State *w, int64_t tag) {
  for (int64_t c = first; c < first + count; c++)
    if (!may_race(w, m->written[c], tag)) m->writers[c] = 0;
  return 0;
}

static inline __attribute__((always_inline)) int note_store(Memory *m, int64_t first, int64_t count,
                                                            int64_t tag) {
  for (int64_t c = first; c < first + count; c++) {
    m->writers[c] |= 1u << (tag & 31);
    m->written[c] = tag;
  }
  return 0;
}

// Calls F with a number of cells. The usual numbers are constants, so that the compiler can
// optimise.
#define BY_COUNT(F, ...)                      \
  (count == 1   ? F(m, first, 1, __VA_ARGS__) \
   : count == 2 ? F(m, first, 2, __VA_ARGS__) \
   : count == 4 ? F(m, first, 4, __VA_ARGS__) \
   : count == 8 ? F(m, first, 8, __VA_ARGS__) \
                : F(m, first, count, __VA_ARGS__))

#define INLINE static inline __attribute__((always_inline))

// Returns whether sixteen lanes are active, and their offsets are size bytes apart or all the same.
static inline int in_a_row(const int64_t *at, int64_t size) {
  // The factor has 32 bits, because a product of 64-bit factors takes three vector instructions.
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

// Executes statements for each cell c of a wave's lanes. Each active lane has count cells, and the
// offset of an inactive lane is negative. The loop over consecutive cells can be vectorized.
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

// Returns whether the tags show that no lane of an access conflicts with an earlier access.
INLINE int has_no_conflict(const Memory *m, int64_t unused, int64_t count, State *w,
                           const int64_t *at, int write, int private) {
  const int64_t *written = m->written, *read = m->read;
  int64_t conflicts = 0, other_readers = 0;
  for (long i = 0; private && i < w->n; i++) {
    const int64_t *mine = at + i * lanes(w);
    const uint64_t barrier = last_barrier(w->tags[i]);
    // A cell conflicts if it was never written, or was written after the last barrier.
    EACH_CELL(conflicts |= (uint64_t)written[c] - 1 >= barrier - 1;)
  }
  if (private) return !conflicts;
  for (long i = 0; i < w->n; i++) {
    const int64_t tag = w->tags[i], *mine = at + i * lanes(w);
    if (write) EACH_CELL(conflicts |= unordered(written[c], tag) | unordered(read[c], tag);)
    else
      EACH_CELL(conflicts |= unordered(written[c], tag); other_readers |= unordered(read[c], tag);)
  }
  w->has_readers = other_readers != 0;
  return !conflicts;
}

// Returns whether a lane loads a cell of scratch that nothing wrote. The shadow of scratch has one
// byte for each cell, which is 1 if the cell was written.
INLINE int has_unwritten(const Memory *m, int64_t unused, int64_t count, long n,
                         const int64_t *at) {
  const uint8_t *written = (const uint8_t *)m->written;
  int64_t is_unwritten = 0;
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; at[l] >= 0 && c < first + count; c++) is_unwritten |= !written[c];
  }
  return is_unwritten != 0;
}

INLINE int note_scratch_store(const Memory *m, int64_t unused, int64_t count, long n,
                              const int64_t *at) {
  uint8_t *written = (uint8_t *)m->written;
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; at[l] >= 0 && c < first + count; c++) written[c] = 1;
  }
  return 0;
}

// How note_loads records several readers of a cell. NAMED: it records which waves read the cell,
// because doubts.py needs this for global memory. UNNAMED: it records only that several waves read
// the cell. ALONE: it assumes that each cell has one reader.
enum { NAMED, UNNAMED, ALONE };

// Records that all lanes loaded their cells. In mode NAMED, the cells get the same tags as from
// read_tag. Callers must make sure that no access has been ordered by an atomic so far. A second
// call for the same waves changes nothing. In mode ALONE, returns whether several waves loaded the
// same cell.
INLINE int note_loads(Memory *m, int64_t unused, int64_t count, const State *w, const int64_t *at,
                      int mode) {
  int64_t *read = m->read;
  for (long i = 0; i < w->n; i++) {
    const int64_t tag = w->tags[i], *mine = at + i * lanes(w);
    if (mode == ALONE) {
      EACH_CELL(read[c] = tag;)
      continue;
    }
    if (mode == UNNAMED) {
      const int64_t barrier = last_barrier(tag);
      EACH_CELL(const int64_t old = read[c], later = old > tag ? old : tag;
                read[c] = old < barrier || !((old ^ tag) & 0xff) ? tag : later | SEVERAL;)
      continue;
    }
    EACH_CELL(const int64_t old = read[c];
              const int64_t both = same_workgroup(old, tag) ? merge_readers(old, tag) : EVERYONE;
              read[c] = unordered(old, tag) ? both : tag;)
  }
  int64_t shared = 0;
  for (long i = 0; mode == ALONE && w->n > 1 && i < w->n; i++) {
    const int64_t tag = w->tags[i], *mine = at + i * lanes(w);
    EACH_CELL(shared |= read[c] ^ tag;)
  }
  return shared != 0;
}

// Records a store of all lanes that has no conflict with earlier accesses. Returns whether several
// waves stored to one cell.
INLINE int note_stores(Memory *m, int64_t unused, int64_t count, const State *w, const int64_t *at,
                       int global) {
  int64_t *written = m->written, shared = 0;
  uint32_t *writers = m->writers;
  for (long i = 0; i < w->n; i++) {
    const int64_t tag = store_tag(w->tags[i], global), *mine = at + i * lanes(w);
    EACH_CELL(writers[c] = 1u << (tag & 31); written[c] = tag;)
  }
  for (long i = 0; w->n > 1 && i < w->n; i++) {
    const int64_t tag = store_tag(w->tags[i], global), *mine = at + i * lanes(w);
    EACH_CELL(shared |= written[c] ^ tag;)
  }
  for (long i = 0; shared && i < w->n; i++) {
    const int64_t tag = store_tag(w->tags[i], global), *mine = at + i * lanes(w);
    EACH_CELL(writers[c] |= 1u << (tag & 31);)
  }
  return shared != 0;
}
