// SPDX-License-Identifier: BSD-3-Clause
// Loads and stores with the race shadow: arena.py and addressing.py, where they find nothing.
// Tags: happens_before.py. Whether an access tagged old and a later one tagged new may swap.
static inline int unordered(int64_t old, int64_t new) {
  if (!old) return 0;
  return old >> 40 != new >> 40 || (old >> 22 >= new >> 22 && ((old ^ new) & 0xff));
}

// Whether they may, for all that atomics ordered. 2: numpy is to look at it, as what they ordered
// for some of several waves decides which tags are left.
static int may_swap(State *w, int64_t old, int64_t new) {
  if (!unordered(old, new)) return 0;
  if (!w->ordered) return 1;
  if (w->asked[0] != old || w->asked[1] != new) {
    w->answer = w->order(old, new);
    w->asked[0] = old, w->asked[1] = new;
  }
  return !w->answer ? 1 : w->n > 1 ? 2 : 0;
}

static inline int64_t cells(const Memory *m, int size) {
  const int64_t count = size >> m->shift;
  return count ? count : 1;
}

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
  return (seen > mark ? seen : mark) | 0xff;
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

// Offset of a global address, or -1; changing: whether races are possible there.
static inline int64_t find(Memory *m, uint64_t address, int size, int write, int *changing) {
  const Range *r = m->ranges + m->last;
  if (address < r->start || address - r->start >= r->size) {
    int64_t low = 0, high = m->range_count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (address < m->ranges[middle].start) high = middle;
      else low = middle;
    }
    r = m->ranges + (m->last = low);
  }
  if (address < r->start || address - r->start + (uint64_t)size > r->size) return -1;
  const int64_t offset = (int64_t)(address - r->start) + r->offset;
  if (r->mode == 1 && write) return -1;
  if (r->mode == 3 && !write && m->strict && m->written && !m->written[offset >> m->shift])
    return -1;
  *changing |= r->mode != 1;
  return offset;
}

// Of a buffer resource: its base address, and how many bytes it has; 1 if it is not raw.
static inline int resource(const State *w, const Op *o, long wave, uint64_t *base, int64_t *size) {
  const uint32_t *s = w->s + (o->resource - 1) * w->n + wave;
  *base = s[0] | (uint64_t)(s[w->n] & 0xffff) << 32;
  *size = s[2 * w->n];
  return (s[w->n] >> 16 & 0x3fff) || s[3 * w->n] >> 28 != 3;
}

enum { IDLE = -1, OUT = -2 };

// The same in vector code, if all lanes lie in the range of the last access, or in LDS; else 0.
static int locate_near(const State *w, const Op *o, int64_t *at, const void *first,
                       const uint32_t *second, int write, int *changing) {
  const Memory *m = &w->memory[o->memory];
  const Range *r = m->ranges + m->last;
  const long width = lanes(w), n = width * w->n;
  const uint64_t *wide = first;
  const uint32_t *narrow = first;
  if (o->resource || o->memory == SCRATCH) return 0;
  const int64_t room = (o->memory == LDS ? m->size : (int64_t)r->size) - o->size;
  if (room < 0) return 0;
  if (o->memory == LDS) {
    const uint32_t offset = (uint32_t)o->offset;
    if (second) LANES at[l] = (uint32_t)(narrow[l] + second[l] + offset);
    else LANES at[l] = (uint32_t)(narrow[l] + offset);
  } else {
    const uint64_t offset = (uint64_t)o->offset - r->start;
    if (r->mode == 3 || (r->mode == 1 && write)) return 0;
    if (second) LANES at[l] = (int64_t)(wide[l] + second[l] + offset);
    else LANES at[l] = (int64_t)(wide[l] + offset);
  }
  uint64_t outside = 0;
  if (w->full) LANES outside |= (uint64_t)at[l] > (uint64_t)room;
  else LANES outside |= ((uint64_t)at[l] > (uint64_t)room) & w->masks[l];
  if (outside) return 0;
  for (long i = 0; i < w->n; i++) {
    const int64_t base = o->memory == LDS ? m->stride * m->slots[i] : r->offset;
    for (long l = i * width; l < (i + 1) * width; l++) at[l] += base;
  }
  if (!w->full) LANES at[l] = w->masks[l] ? at[l] : IDLE;
  *changing |= o->memory == LDS || r->mode != 1;
  return 1;
}

// Offsets of all lanes in the memory, IDLE for inactive ones, OUT for those that are out of a
// buffer's range; 1: numpy is to look at it.
static int locate(State *w, const Op *o, int64_t *at, int write, int *changing) {
  Memory *m = &w->memory[o->memory];
  const long width = lanes(w), n = width * w->n;
  const uint64_t *wide = fetch(w, &o->source[0], w->spare[2], lanes(w));
  const uint32_t *narrow = (const uint32_t *)wide;
  const uint32_t *second = o->sources > 1 ? fetch(w, &o->source[1], w->spare[3], lanes(w)) : 0;
  uint64_t base = 0;
  int64_t size = 0;
  if (locate_near(w, o, at, wide, second, write, changing)) return 0;
  for (long l = 0; l < n; l++) {
    at[l] = IDLE;
    if (!w->full && !w->masks[l]) continue;
    if (o->memory == GLOBAL) {
      uint64_t address =
          (o->resource ? 0 : wide[l]) + (second ? second[l] : 0) + (int64_t)o->offset;
      if (o->resource) {
        if (resource(w, o, wave_of(w, l), &base, &size)) return 1;
        const int64_t within = (int64_t)narrow[l] + o->offset;
        // the scalar offset lessens what is left of the buffer
        if (within + o->size > size - (int64_t)second[l]) {
          at[l] = OUT;
          continue;
        }
        address = base + second[l] + within;
      }
      at[l] = find(m, address, o->size, write, changing);
      if (at[l] < 0) return 1;
      continue;
    }
    const int64_t row = m->slots[wave_of(w, l)];
    const uint32_t index = narrow[l] + (second ? second[l] : 0);
    // addresses in LDS are of 32 bits
    const int64_t inside =
        o->memory == LDS ? index + (uint32_t)o->offset : (int64_t)index + o->offset;
    if (inside < 0 || inside + o->size > m->size) return 1;
    at[l] = inside + m->stride * (o->memory == LDS ? row : row * width + (l & (width - 1)));
    *changing = 1;
  }
  return 0;
}

// Whether races are possible there, and the offsets of all lanes.
static void keep(const State *w, const int64_t *at, int64_t *log, int changing) {
  log[0] = changing;
  if (changing) memcpy(log + 1, at, 8 * lanes(w) * w->n);
}

static int load(State *w, const Op *o, int64_t *log) {
  Memory *m = &w->memory[o->memory];
  const long width = lanes(w), n = width * w->n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  if (locate(w, o, at, 0, &changing)) return 1;
  if (m->written && changing && !o->acquires) {
    const int private = o->memory != GLOBAL && m->strict;
    const int64_t count = cells(m, o->size);
    for (long l = 0; l < n; l++) {
      const int64_t first = at[l] >> m->shift;
      if (at[l] >= 0 && BY_COUNT(note_load, w, w->tags[wave_of(w, l)], private)) return 1;
    }
  }
  uint32_t *row = w->v + o->target.index * n;
  const uint32_t kept = o->half == 2 ? 0xffff : o->half == 1 ? 0xffff0000 : 0;
  static const uint8_t zeros[16];
  for (int i = 0; o->size >= 4 && i < o->words; i++) {
    uint32_t *to = row + i * n;
    const uint8_t *from = m->bytes + 4 * i;
    if (w->full && !o->resource) LANES memcpy(to + l, from + at[l], 4);
    else
      for (long l = 0; l < n; l++)
        if (at[l] != IDLE) memcpy(to + l, at[l] == OUT ? zeros : from + at[l], 4);
  }
  for (long l = 0; o->size < 4 && l < n; l++) {
    if (at[l] == IDLE) continue;
    const uint8_t *from = at[l] == OUT ? zeros : m->bytes + at[l];
    uint32_t x = o->size == 2 ? (uint32_t)(from[0] | from[1] << 8) : from[0];
    if (o->extended) x = o->size == 2 ? (uint32_t)(int16_t)x : (uint32_t)(int8_t)x;
    if (kept) x = (row[l] & kept) | (o->half == 2 ? x << 16 : x & 0xffff);
    row[l] = x;
  }
  if (log) keep(w, at, log, changing);
  return 0;
}

static int load_scalar(State *w, const Op *o) {
  Memory *m = &w->memory[GLOBAL];
  const long n = w->n;
  const uint64_t *base = fetch(w, &o->source[0], w->spare[2], 1);
  const uint32_t *more = fetch(w, &o->source[1], w->spare[3], 1);
  uint32_t *row = w->s + o->target.index * n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  for (long i = 0; i < n; i++) {
    at[i] = find(m, (base[i] + more[i] + (int64_t)o->offset) & ~3ull, o->size, 0, &changing);
    if (at[i] < 0) return 1;
  }
  if (m->written && changing)
    for (long i = 0; i < n; i++)
      if (note_load(m, at[i] >> m->shift, cells(m, o->size), w, w->tags[i], 0)) return 1;
  for (int k = 0; k < o->words; k++)
    for (long i = 0; i < n; i++) memcpy(row + k * n + i, m->bytes + at[i] + 4 * k, 4);
  if (o->write_exec) refresh(w), w->exec_changed = 1;
  return 0;
}

// The bytes that a lane stores.
static inline void data_of(const Op *o, const uint32_t *row, long n, long lane, uint32_t *data) {
  for (int i = 0; i < o->words; i++) data[i] = row[i * n + lane] >> (o->half == 2 ? 16 : 0);
}

static int store(State *w, const Op *o, int64_t *log) {
  Memory *m = &w->memory[o->memory];
  const long width = lanes(w), n = width * w->n;
  const uint32_t *row = w->v + o->target.index * n;
  int64_t *at = (int64_t *)w->spare[0];
  const int64_t count = m->written ? cells(m, o->size) : 0;
  uint32_t data[4];
  int changing = 0;
  if (locate(w, o, at, 1, &changing)) return 1;
  if (m->written) {
    if (m->copies) return 1;
    for (long l = 0; l < n; l++) {
      const int64_t first = at[l] >> m->shift;
      if (at[l] < 0 || BY_COUNT(may_store, w, w->tags[wave_of(w, l)], 0)) continue;
      data_of(o, row, n, l, data);
      if (memcmp(m->bytes + at[l], data, o->size) ||
          !may_store(m, first, count, w, w->tags[wave_of(w, l)], 1))
        return 1;
    }
  }
  for (long l = 0; l < n; l++)
    if (at[l] >= 0) {
      data_of(o, row, n, l, data);
      memcpy(m->bytes + at[l], data, o->size);
    }
  if (!m->written) return 0;
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    if (at[l] >= 0) BY_COUNT(note_store, w, w->tags[wave_of(w, l)]);
  }
  // several waves in one instruction: of other workgroups, or other values, numpy's
  for (long l = 0; l < n; l++) {
    if (at[l] < 0) continue;
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; c < first + count; c++) {
      if (m->written[c] == w->tags[wave_of(w, l)]) continue;
      data_of(o, row, n, l, data);
      if (m->written[c] >> 40 != w->tags[wave_of(w, l)] >> 40 ||
          memcmp(m->bytes + at[l], data, o->size))
        return 1;
    }
  }
  if (log) keep(w, at, log, changing);
  return 0;
}

// Lanes one after the other. What it orders is noted in Python, which stops the run behind it.
static int atomic(State *w, const Op *o, int64_t *log) {
  const Memory *m = &w->memory[o->memory];
  const long n = lanes(w) * w->n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  if (locate(w, o, at, 1, &changing)) return 1;
  const uint32_t *data[2] = {0, (const uint32_t *)w->spare[3]};
  for (int i = 2; i < o->sources; i++)
    data[i - 2] = fetch(w, &o->source[i], w->spare[2 + i], lanes(w));
  uint32_t *row = o->target.file ? w->v + o->target.index * n : 0;
  for (long l = 0; l < n; l++) {
    if (at[l] == IDLE) continue;
    uint32_t old[2] = {0, 0}, new[2];
    if (at[l] != OUT) {
      uint8_t *cell = m->bytes + at[l] / o->size * o->size;
      memcpy(old, cell, o->size);
      memcpy(new, data[0] + l * o->words, o->size);
      if (o->function) {
        uint32_t copy[2] = {new[0], new[1]};
        o->function((void *[]){new, old, copy, (void *)(data[1] + l * o->words)}, 1);
      }
      memcpy(cell, new, o->size);
    }
    for (int i = 0; row && i < o->words; i++) row[i * n + l] = old[i];
  }
  if (log) keep(w, at, log, 1);
  return 0;
}
