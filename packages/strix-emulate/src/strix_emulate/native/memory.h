// SPDX-License-Identifier: BSD-3-Clause
// Loads, stores and atomics. If a check may have a finding, C leaves the access to numpy. Otherwise
// C has the same effect as addressing.py, vmem.py and atomics.py. Unless a comment says otherwise,
// functions return 1 if numpy has to execute the access.
#include "shadow.h"

// Returns the offset of a global address, or -1 if numpy has to execute the access. Sets `changing`
// if the memory is writable, so that races are possible.
static inline int64_t find_offset(Memory *m, uint64_t address, int size, int write, int *changing) {
  const Range *r = m->ranges + m->last_range;
  if (address < r->start || address - r->start >= r->size) {
    int64_t low = 0, high = m->range_count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (address < m->ranges[middle].start) high = middle;
      else low = middle;
    }
    r = m->ranges + (m->last_range = low);
  }
  if (address < r->start || address - r->start + (uint64_t)size > r->size) return -1;
  m->accessed_ranges |= 1ull << ((r - m->ranges) & 63);
  const int64_t offset = (int64_t)(address - r->start) + r->offset;
  if (r->mode == READ_ONLY && write) return -1;
  if (r->mode == UNWRITTEN && !write && m->strict && m->written && !m->written[offset >> m->shift])
    return -1;
  *changing |= r->mode != READ_ONLY;
  return offset;
}

// Reads base address, number of records and bytes of a record from a buffer resource. For a raw
// resource, `records` is the number of bytes, and `stride` is 0. Returns 1 if the resource does not
// fit the access, or if only numpy can compute its range.
static inline int read_resource(const State *w, const Op *o, long wave, uint64_t *base,
                                int64_t *records, int64_t *stride) {
  const uint32_t *s = w->s + (o->resource - 1) * w->n + wave;
  const uint32_t high = s[w->n], kind = s[3 * w->n];
  *base = s[0] | (uint64_t)(high & 0xffff) << 32;
  *records = s[2 * w->n];
  *stride = high >> 16 & 0x3fff;
  if (o->indexed) return high >> 30 || (kind >> 23 & 1) || kind >> 28 != 1 || !(kind & 0x7f000);
  return *stride || kind >> 28 != 3;
}

// Offsets of inactive lanes, and of lanes outside of a buffer's range.
enum { IDLE = -1, OUT = -2 };

// Does the same as locate in vector code. Returns 0 if that is impossible, for example if the
// access has a buffer resource, or if an address is outside of LDS, of scratch or of the range of
// the last access.
static int locate_fast(const State *w, const Op *o, int64_t *at, const void *first,
                       const uint32_t *second, int write, int *changing) {
  const Memory *m = &w->memory[o->memory];
  const Range *r = m->ranges + m->last_range;
  const long width = lanes(w), n = width * w->n;
  const uint64_t *wide = first;
  const uint32_t *narrow = first;
  if (o->resource) return 0;
  const int64_t room = (o->memory == GLOBAL ? (int64_t)r->size : m->size) - o->size;
  if (room < 0) return 0;
  if (o->memory == LDS) {
    const uint32_t offset = (uint32_t)o->offset;
    if (second) LANES at[l] = (uint32_t)(narrow[l] + second[l] + offset);
    else LANES at[l] = (uint32_t)(narrow[l] + offset);
  } else if (o->memory == SCRATCH) {
    if (second) LANES at[l] = (int64_t)(narrow[l] + second[l]) + o->offset;
    else LANES at[l] = (int64_t)narrow[l] + o->offset;
  } else {
    const uint64_t offset = (uint64_t)o->offset - r->start;
    if (r->mode == UNWRITTEN || (r->mode == READ_ONLY && write)) return 0;
    if (second) LANES at[l] = (int64_t)(wide[l] + second[l] + offset);
    else LANES at[l] = (int64_t)(wide[l] + offset);
  }
  uint64_t outside = 0;
  if (w->full) LANES outside |= (uint64_t)at[l] > (uint64_t)room;
  else LANES outside |= ((uint64_t)at[l] > (uint64_t)room) & w->masks[l];
  if (outside) return 0;
  const uint32_t step = o->memory == SCRATCH ? m->stride : 0;  // distance between two lanes
  for (long i = 0; i < w->n; i++) {
    const int64_t row = o->memory == GLOBAL ? 0 : m->stride * m->slots[i];
    const int64_t base = o->memory == GLOBAL ? r->offset : step ? row * width : row;
    int64_t *mine = at + i * width;
    if (!step)
      for (uint32_t l = 0; l < width; l++) mine[l] += base;
    else
      for (uint32_t l = 0; l < width; l++) mine[l] += base + (int64_t)((uint64_t)step * l);
  }
  if (!w->full) LANES at[l] = w->masks[l] ? at[l] : IDLE;
  *changing |= o->memory != GLOBAL || r->mode != READ_ONLY;
  return 1;
}

// Computes the offsets of all lanes in the memory. They are IDLE for inactive lanes, and OUT for
// lanes outside of a buffer's range.
static int locate(State *w, const Op *o, int64_t *at, int write, int *changing) {
  Memory *m = &w->memory[o->memory];
  const long width = lanes(w), n = width * w->n;
  const uint64_t *wide = fetch(w, &o->source[0], w->spare[2], lanes(w));
  const uint32_t *narrow = (const uint32_t *)wide;
  const uint32_t *second = o->sources > 1 ? fetch(w, &o->source[1], w->spare[3], lanes(w)) : 0;
  uint64_t base = 0;
  int64_t records = 0, stride = 0;
  int unused = 0;
  for (int tries = 0; tries < 2; tries++) {
    if (locate_fast(w, o, at, wide, second, write, changing)) {
      m->accessed_ranges |= 1ull << (m->last_range & 63);
      return 0;
    }
    if (o->memory != GLOBAL || o->resource) break;
    // The access may lie in another range than the last access. find_offset updates last_range for
    // the second try.
    long l = 0;
    while (!w->full && l < n - 1 && !w->masks[l]) l++;
    find_offset(m, wide[l] + (second ? second[l] : 0) + (int64_t)o->offset, o->size, write,
                &unused);
  }
  for (long l = 0; l < n; l++) {
    at[l] = IDLE;
    if (!w->full && !w->masks[l]) continue;
    if (o->memory == GLOBAL) {
      uint64_t address =
          (o->resource ? 0 : wide[l]) + (second ? second[l] : 0) + (int64_t)o->offset;
      if (o->resource) {
        if (read_resource(w, o, wave_of(w, l), &base, &records, &stride)) return 1;
        const int64_t within = (o->indexed ? narrow[l] * stride : narrow[l]) + o->offset;
        // The range check of a raw buffer includes the scalar offset. If the range ends inside of
        // the access, each word is checked separately.
        const int64_t end = records - (int64_t)second[l];
        if (!o->indexed && within + 4 <= end && within + o->size > end) return 1;
        if (o->indexed ? narrow[l] >= records : within + o->size > end) {
          at[l] = OUT;
          continue;
        }
        address = base + second[l] + within;
      }
      at[l] = find_offset(m, address, o->size, write, changing);
      if (at[l] < 0) return 1;
      continue;
    }
    const int64_t row = m->slots[wave_of(w, l)];
    const uint32_t index = narrow[l] + (second ? second[l] : 0);
    // Addresses in LDS have 32 bits.
    const int64_t inside =
        o->memory == LDS ? index + (uint32_t)o->offset : (int64_t)index + o->offset;
    if (inside < 0 || inside + o->size > m->size) return 1;
    at[l] = inside + m->stride * (o->memory == LDS ? row : row * width + (l & (width - 1)));
    *changing = 1;
  }
  return 0;
}

// Logs an access: its memory, whether races are possible there, and if so the offsets of all lanes.
static void log_access(const State *w, const Op *o, const int64_t *at, int64_t *log, int changing) {
  log[0] = 2 * o->memory + changing;
  if (changing) memcpy(log + 1, at, 8 * lanes(w) * w->n);
}

// Records the offsets of a poll for polls.py.
static void note_poll(State *w, const Op *o, const int64_t *at) {
  if (!o->polls || !w->polled) return;
  memcpy(w->polled, at, 8 * lanes(w) * w->n);
  w->polled_memory = o->memory;
}

static int load_by_lane(Memory *m, State *w, const int64_t *at, int64_t count, int private) {
  for (long l = 0; l < lanes(w) * w->n; l++) {
    const int64_t first = at[l] >> m->shift;
    if (at[l] >= 0 && BY_COUNT(note_load, w, w->tags[wave_of(w, l)], private)) return 1;
  }
  return 0;
}

static void note_all_loads(Memory *m, State *w, const int64_t *at, int64_t count, int global) {
  const int64_t first = 0;
  if (!global) BY_COUNT(note_loads, w, at, UNNAMED);
  else if (w->has_readers) BY_COUNT(note_loads, w, at, NAMED);
  else if (BY_COUNT(note_loads, w, at, ALONE)) BY_COUNT(note_loads, w, at, NAMED);
}

typedef uint32_t Word __attribute__((aligned(1), may_alias));

INLINE int load_small_lanes(uint32_t *row, const uint8_t *bytes, const int64_t *at, long n,
                            int size, int extended, int half) {
  LANES {
    if (at[l] < 0) continue;
    // This may read past the last byte of the memory, into spare bytes that follow it.
    const uint32_t raw = *(const Word *)(bytes + at[l]);
    const uint32_t plain = size == 2 ? (uint16_t)raw : (uint8_t)raw;
    const uint32_t x = !extended ? plain : size == 2 ? (int16_t)raw : (int8_t)raw;
    row[l] = half == 2   ? (row[l] & 0xffff) | x << 16
             : half == 1 ? (row[l] & 0xffff0000) | (x & 0xffff)
                         : x;
  }
  return 1;
}

// Loads one or two bytes for each lane, in vector code. Returns 0 if it does not support this kind
// of load, which is rare.
static int load_small(const Op *o, uint32_t *row, const uint8_t *bytes, const int64_t *at, long n) {
  switch (o->size << 8 | o->extended << 4 | o->half) {
  case 0x100: return load_small_lanes(row, bytes, at, n, 1, 0, 0);
  case 0x110: return load_small_lanes(row, bytes, at, n, 1, 1, 0);
  case 0x200: return load_small_lanes(row, bytes, at, n, 2, 0, 0);
  case 0x201: return load_small_lanes(row, bytes, at, n, 2, 0, 1);
  case 0x202: return load_small_lanes(row, bytes, at, n, 2, 0, 2);
  case 0x210: return load_small_lanes(row, bytes, at, n, 2, 1, 0);
  default: return 0;
  }
}

// Returns a flat access as an access to the memory that all its active lanes use, and any other
// access as it is. Returns 0 if an active lane uses LDS, or if the active lanes use several
// memories. numpy then executes the access.
static const Op *resolve_flat(State *w, const Op *o, Op *copy) {
  if (o->memory != FLAT) return o;
  const long n = lanes(w) * w->n;
  const uint64_t *at = fetch(w, &o->source[0], w->spare[2], lanes(w));
  int lds = 0, scratch = 0, global = 0;
  LANES {
    const uint64_t high = (at[l] + (int64_t)o->offset) >> 32, active = w->full || w->masks[l];
    lds |= active & (high == o->apertures[0]);
    scratch |= active & (high == o->apertures[1]);
    global |= active & (high != o->apertures[0]) & (high != o->apertures[1]);
  }
  if (lds || (scratch && global)) return 0;
  *copy = *o;
  copy->memory = scratch ? SCRATCH : GLOBAL;
  if (scratch) copy->source[0].bits = 32;
  return copy;
}

static int load(State *w, const Op *o, int64_t *log) {
  Op copy;
  if (!(o = resolve_flat(w, o, &copy))) return 1;
  Memory *m = &w->memory[o->memory];
  const long width = lanes(w), n = width * w->n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  m->accessed_ranges = 0;
  if (locate(w, o, at, 0, &changing)) return 1;
  if (w->loaded_ranges && o->memory == GLOBAL) w->loaded_ranges[o->number] |= m->accessed_ranges;
  if (m->written && o->memory == SCRATCH) {
    const int64_t count = cells(m, o->size), first = 0;
    if (m->strict && BY_COUNT(has_unwritten, n, at)) return 1;
  } else if (m->written && changing && !o->acquires) {
    const int private = o->memory != GLOBAL && m->strict;
    const int64_t count = cells(m, o->size), first = 0;
    if (!w->atomics_order && BY_COUNT(has_no_conflict, w, at, 0, private))
      note_all_loads(m, w, at, count, o->memory == GLOBAL);
    else {
      w->shares_cells = w->atomics_order && may_share_cells(m, w, at, o->size);
      if (load_by_lane(m, w, at, count, private)) return 1;
    }
  }
  note_poll(w, o, at);
  uint32_t *row = w->v + o->target.index * n;
  const uint32_t kept = o->half == 2 ? 0xffff : o->half == 1 ? 0xffff0000 : 0;
  static const uint8_t zeros[16];
  for (int i = 0; o->size >= 4 && i < o->words; i++) {
    uint32_t *to = row + i * n;
    const uint8_t *from = m->bytes + 4 * i;
    if (w->full && !o->resource)
      for (long g = 0; g < n; g += 16)
        if (o->words == 1 && at[g] != at[g + 1] && in_a_row(at + g, 4))
          memcpy(to + g, from + at[g], 64);
        else _Pragma("GCC ivdep") for (long l = g; l < g + 16; l++) memcpy(to + l, from + at[l], 4);
    else
      for (long l = 0; l < n; l++)
        if (at[l] != IDLE) memcpy(to + l, at[l] == OUT ? zeros : from + at[l], 4);
  }
  if (o->size < 4 && !o->resource && load_small(o, row, m->bytes, at, n)) {
  } else
    for (long l = 0; o->size < 4 && l < n; l++) {
      if (at[l] == IDLE) continue;
      const uint8_t *from = at[l] == OUT ? zeros : m->bytes + at[l];
      uint32_t x = o->size == 2 ? (uint32_t)(from[0] | from[1] << 8) : from[0];
      if (o->extended) x = o->size == 2 ? (uint32_t)(int16_t)x : (uint32_t)(int8_t)x;
      if (kept) x = (row[l] & kept) | (o->half == 2 ? x << 16 : x & 0xffff);
      row[l] = x;
    }
  if (log) log_access(w, o, at, log, changing);
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
  m->accessed_ranges = 0;
  for (long i = 0; i < n; i++) {
    at[i] = find_offset(m, (base[i] + more[i] + (int64_t)o->offset) & ~3ull, o->size, 0, &changing);
    if (at[i] < 0) return 1;
  }
  if (w->loaded_ranges) w->loaded_ranges[o->number] |= m->accessed_ranges;
  w->shares_cells = n > 1;
  if (m->written && changing)
    for (long i = 0; i < n; i++)
      if (note_load(m, at[i] >> m->shift, cells(m, o->size), w, w->tags[i], 0)) return 1;
  for (int k = 0; k < o->words; k++)
    for (long i = 0; i < n; i++) memcpy(row + k * n + i, m->bytes + at[i] + 4 * k, 4);
  if (o->write_exec) update_masks(w), w->exec_changed = 1;
  return 0;
}

// Copies into `data` the bytes that a lane stores.
static inline void lane_data(const Op *o, const uint32_t *row, long n, long lane, uint32_t *data) {
  for (int i = 0; i < o->words; i++) data[i] = row[i * n + lane] >> (o->half == 2 ? 16 : 0);
}

INLINE int store_lanes(uint8_t *bytes, const int64_t *at, const uint32_t *row, long n, int size,
                       int shift) {
  for (long l = 0; l < n; l++)
    if (size == 4 && !(l & 15) && at[l] != at[l + 1] && in_a_row(at + l, 4)) {
      memcpy(bytes + at[l], row + l, 64);
      l += 15;
    } else
      for (int i = 0; at[l] >= 0 && i < (size + 3) / 4; i++) {
        const uint32_t x = row[i * n + l] >> shift;
        memcpy(bytes + at[l] + 4 * i, &x, size < 4 ? size : 4);
      }
  return 0;
}

static void store_data(const Op *o, uint8_t *bytes, const int64_t *at, const uint32_t *row,
                       long n) {
  const int shift = o->half == 2 ? 16 : 0;
  switch (o->size) {
  case 1: store_lanes(bytes, at, row, n, 1, shift); break;
  case 2: store_lanes(bytes, at, row, n, 2, shift); break;
  case 4: store_lanes(bytes, at, row, n, 4, shift); break;
  case 8: store_lanes(bytes, at, row, n, 8, shift); break;
  case 12: store_lanes(bytes, at, row, n, 12, shift); break;
  default: store_lanes(bytes, at, row, n, 16, shift);
  }
}

// Checks the lanes of a store one by one.
static int may_store_by_lane(const Memory *m, State *w, const Op *o, const int64_t *at,
                             const uint32_t *row, int64_t count) {
  const long n = lanes(w) * w->n;
  uint32_t data[4];
  for (long l = 0; l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    if (at[l] < 0 || BY_COUNT(may_store, w, w->tags[wave_of(w, l)], 0)) continue;
    lane_data(o, row, n, l, data);
    if (memcmp(m->bytes + at[l], data, o->size) ||
        !may_store(m, first, count, w, w->tags[wave_of(w, l)], 1))
      return 1;
  }
  return 0;
}

// Notes which waves store with an active lane. doubts.py reads this.
static void note_stored(State *w, const Op *o, const int64_t *at) {
  for (long i = 0; w->stored && i < w->n; i++) {
    int64_t active = -(w->full && !o->resource);
    for (long l = i * lanes(w); !active && l < (i + 1) * lanes(w); l++) active = ~at[l] >> 63;
    w->stored[i] |= (uint64_t)(active < 0) << o->number;
  }
}

static int store(State *w, const Op *o, int64_t *log) {
  Op copy;
  if (!(o = resolve_flat(w, o, &copy))) return 1;
  Memory *m = &w->memory[o->memory];
  const long n = lanes(w) * w->n;
  const uint32_t *row = w->v + o->target.index * n;
  int64_t *at = (int64_t *)w->spare[0];
  const int64_t count = m->written ? cells(m, o->size) : 0, first = 0;
  uint32_t data[4];
  int changing = 0, alone = 0;
  if (locate(w, o, at, 1, &changing)) return 1;
  if (m->written && o->memory != SCRATCH) {
    if (m->co_writers) return 1;
    w->shares_cells = w->atomics_order && may_share_cells(m, w, at, o->size);
    alone = !w->atomics_order && BY_COUNT(has_no_conflict, w, at, 1, 0);
    if (!alone && may_store_by_lane(m, w, o, at, row, count)) return 1;
  }
  note_stored(w, o, at);
  store_data(o, m->bytes, at, row, n);
  if (!m->written) return 0;
  if (o->memory == SCRATCH) {
    BY_COUNT(note_scratch_store, n, at);
    if (log) log_access(w, o, at, log, changing);
    return 0;
  }
  for (long l = 0; m->store_addresses && l < n; l++)
    for (int64_t c = 0; at[l] >= 0 && c < count; c++)
      m->store_addresses[(at[l] >> m->shift) + c] = o->place;
  const int global = o->memory == GLOBAL;
  if (alone) {
    alone = !BY_COUNT(note_stores, w, at, global);
  } else {
    for (long l = 0; l < n; l++) {
      const int64_t first = at[l] >> m->shift;
      if (at[l] >= 0) BY_COUNT(forget_writers, w, store_tag(w->tags[wave_of(w, l)], global));
    }
    for (long l = 0; l < n; l++) {
      const int64_t first = at[l] >> m->shift;
      if (at[l] >= 0) BY_COUNT(note_store, store_tag(w->tags[wave_of(w, l)], global));
    }
  }
  // If several waves stored to one cell by this instruction, they must be of one workgroup and the
  // values must be the same. Otherwise numpy executes the store again.
  for (long l = 0; !alone && l < n; l++) {
    const int64_t first = at[l] >> m->shift;
    for (int64_t c = first; at[l] >= 0 && c < first + count; c++) {
      if (m->written[c] == store_tag(w->tags[wave_of(w, l)], global)) continue;
      lane_data(o, row, n, l, data);
      if (m->written[c] >> 40 != w->tags[wave_of(w, l)] >> 40 ||
          memcmp(m->bytes + at[l], data, o->size))
        return 1;
    }
  }
  if (log) log_access(w, o, at, log, changing);
  return 0;
}

// Executes the lanes of an atomic one after the other. An atomic is the last operation of a run, so
// that Python can then record which accesses it orders.
static int atomic(State *w, const Op *o, int64_t *log) {
  const Memory *m = &w->memory[o->memory];
  const long n = lanes(w) * w->n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  if (locate(w, o, at, 1, &changing)) return 1;
  for (long l = 0; l < n; l++)
    if (at[l] >= 0 && at[l] % o->size) return 1;
  note_stored(w, o, at);
  note_poll(w, o, at);
  const uint32_t *data[2] = {0, (const uint32_t *)w->spare[3]};
  for (int i = 2; i < o->sources; i++)
    data[i - 2] = fetch(w, &o->source[i], w->spare[2 + i], lanes(w));
  uint32_t *row = o->target.file ? w->v + o->target.index * n : 0;
  for (long l = 0; l < n; l++) {
    if (at[l] == IDLE) continue;
    uint32_t old[2] = {0, 0}, new[2];
    if (at[l] != OUT) {
      uint8_t *cell = m->bytes + at[l];
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
  if (log) log_access(w, o, at, log, 1);
  return 0;
}
