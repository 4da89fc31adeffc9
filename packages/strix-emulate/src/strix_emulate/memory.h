// SPDX-License-Identifier: BSD-3-Clause
// Loads and stores with the race shadow: memory.py and addressing.py, where they find nothing.
// Tags: order.py. Whether an access tagged old and a later one tagged new may change places.
static inline int unordered(int64_t old, int64_t new)
{
  if (!old) return 0;
  return old >> 40 != new >> 40 || (old >> 22 >= new >> 22 && ((old ^ new) & 0xff));
}

static inline int64_t cells(const Memory *m, int size)
{
  const int64_t count = size >> m->shift;
  return count ? count : 1;
}

static inline int wrote(const Memory *m, int64_t cell, int64_t mark)
{
  return m->written[cell] >> 40 == mark >> 40 && m->writers[cell] >> (mark & 31) & 1;
}

// 1 if numpy is to look at it. private: of one workgroup, where it must have been written before.
static inline int note_load(Memory *m, int64_t at, int size, int64_t mark, int ordered, int private)
{
  const int64_t first = at >> m->shift, last = first + cells(m, size);
  for (int64_t c = first; c < last; c++) {
    const int64_t before = m->written[c];
    if ((private && !before) || (unordered(before, mark) && !wrote(m, c, mark))) return 1;
    const int64_t seen = m->read[c];
    if (seen == mark) continue;
    if (!unordered(seen, mark)) m->read[c] = mark;
    else if (ordered) return 1;
    else if (seen >> 40 != mark >> 40) m->read[c] = 1ll << 62;
    else m->read[c] = (seen > mark ? seen : mark) | 0xff;
  }
  return 0;
}

// Waves of a workgroup may store the same value to one place. same: whether it stands there.
static inline int may_store(const Memory *m, int64_t at, int size, int64_t mark, int same)
{
  const int64_t first = at >> m->shift, last = first + cells(m, size);
  for (int64_t c = first; c < last; c++) {
    const int64_t before = m->written[c];
    if (unordered(m->read[c], mark)) return 0;
    if (unordered(before, mark) && !(same && before >> 40 == mark >> 40)) return 0;
  }
  return 1;
}

static inline void note_store(Memory *m, int64_t at, int size, int64_t mark)
{
  const int64_t first = at >> m->shift, last = first + cells(m, size);
  for (int64_t c = first; c < last; c++) {
    const uint32_t others = unordered(m->written[c], mark) ? m->writers[c] : 0;
    m->writers[c] = others | 1u << (mark & 31);
    m->written[c] = mark;
  }
}

// Offset of a global address, or -1; changing: whether races are possible there.
static inline int64_t find(Memory *m, uint64_t address, int size, int write, int *changing)
{
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

// Offsets of all lanes in the memory, -1 for inactive ones; nonzero: numpy is to look at it.
static int locate(State *w, const Op *o, int64_t *at, int write, int *changing)
{
  Memory *m = &w->memory[o->memory];
  const long n = 32 * w->n;
  const uint64_t *base = fetch(w, &o->source[0], w->spare[2], 32);
  const uint32_t *narrow = (const uint32_t *)base;
  const uint32_t *second = o->sources > 1 ? fetch(w, &o->source[1], w->spare[3], 32) : 0;
  for (long l = 0; l < n; l++) {
    at[l] = -1;
    if (!w->full && !w->masks[l]) continue;
    if (o->memory == GLOBAL) {
      const uint64_t address = base[l] + (second ? second[l] : 0) + (int64_t)o->offset;
      at[l] = find(m, address, o->size, write, changing);
      if (at[l] < 0) return 1;
      continue;
    }
    const uint32_t index = narrow[l] + (second ? second[l] : 0);
    const int64_t inside = (o->memory == LDS ? (int64_t)narrow[l] : (int64_t)index) + o->offset;
    if (inside < 0 || inside + o->size > m->size) return 1;
    at[l] = inside + (o->memory == LDS ? m->slots[l / 32] * m->stride
                                       : (m->slots[l / 32] * 32 + l % 32) * m->stride);
    *changing = 1;
  }
  return 0;
}

static void keep(State *w, const int64_t *at, int64_t *log, int changing)
{
  long count = 0;
  if (changing)
    for (long l = 0; l < 32 * w->n; l++)
      if (at[l] >= 0) log[1 + 2 * count] = at[l], log[2 + 2 * count++] = w->tags[l / 32];
  log[0] = count;
}

static int load(State *w, const Op *o, int64_t *log)
{
  Memory *m = &w->memory[o->memory];
  const long n = 32 * w->n;
  int64_t *at = (int64_t *)w->spare[0];
  int changing = 0;
  if (locate(w, o, at, 0, &changing)) return 1;
  if (m->written && changing) {
    for (long l = 0; l < n; l++)
      if (at[l] >= 0 && note_load(m, at[l], o->size, w->tags[l / 32], (int)w->ordered,
                                  o->memory != GLOBAL && m->strict))
        return 1;
  }
  uint32_t *row = w->v + o->target.index * n;
  const uint32_t kept = o->half == 2 ? 0xffff : o->half == 1 ? 0xffff0000 : 0;
  for (long l = 0; l < n; l++) {
    if (at[l] < 0) continue;
    const uint8_t *from = m->bytes + at[l];
    if (o->size >= 4) {
      for (int i = 0; i < o->words; i++) memcpy(row + i * n + l, from + 4 * i, 4);
      continue;
    }
    uint32_t x = o->size == 2 ? (uint32_t)(from[0] | from[1] << 8) : from[0];
    if (o->extended) x = o->size == 2 ? (uint32_t)(int16_t)x : (uint32_t)(int8_t)x;
    if (kept) x = (row[l] & kept) | (o->half == 2 ? x << 16 : x & 0xffff);
    row[l] = x;
  }
  if (log) keep(w, at, log, changing);
  return 0;
}

// The bytes that a lane stores.
static inline void data_of(const Op *o, const uint32_t *row, long n, long lane, uint32_t *data)
{
  for (int i = 0; i < o->words; i++)
    data[i] = row[i * n + lane] >> (o->half == 2 ? 16 : 0);
}

static int store(State *w, const Op *o, int64_t *log)
{
  Memory *m = &w->memory[o->memory];
  const long n = 32 * w->n;
  const uint32_t *row = w->v + o->target.index * n;
  int64_t *at = (int64_t *)w->spare[0];
  uint32_t data[4];
  int changing = 0;
  if (locate(w, o, at, 1, &changing)) return 1;
  if (m->written) {
    if (m->copies) return 1;
    for (long l = 0; l < n; l++) {
      if (at[l] < 0 || may_store(m, at[l], o->size, w->tags[l / 32], 0)) continue;
      data_of(o, row, n, l, data);
      if (memcmp(m->bytes + at[l], data, o->size)
          || !may_store(m, at[l], o->size, w->tags[l / 32], 1))
        return 1;
    }
  }
  for (long l = 0; l < n; l++)
    if (at[l] >= 0) {
      data_of(o, row, n, l, data);
      memcpy(m->bytes + at[l], data, o->size);
    }
  if (!m->written) return 0;
  for (long l = 0; l < n; l++)
    if (at[l] >= 0) note_store(m, at[l], o->size, w->tags[l / 32]);
  // several waves in one instruction: of other workgroups, or other values, numpy's
  for (long l = 0; l < n; l++) {
    if (at[l] < 0) continue;
    const int64_t first = at[l] >> m->shift, last = first + cells(m, o->size);
    for (int64_t c = first; c < last; c++) {
      if (m->written[c] == w->tags[l / 32]) continue;
      data_of(o, row, n, l, data);
      if (m->written[c] >> 40 != w->tags[l / 32] >> 40
          || memcmp(m->bytes + at[l], data, o->size))
        return 1;
    }
  }
  if (log) keep(w, at, log, changing);
  return 0;
}
