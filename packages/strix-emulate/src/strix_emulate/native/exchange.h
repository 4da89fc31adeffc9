// SPDX-License-Identifier: BSD-3-Clause
// Moves of values between lanes, and between vector and scalar registers. See crosslane.py, and
// vmem.py for LDS instructions.

// Executes V_PERMLANE16 if across is 0, or V_PERMLANEX16 if across is 16.
static void permlane(State *w, const Op *o, int across) {
  const uint32_t *x = fetch(w, &o->source[0], w->spare[2], lanes(w));
  const uint32_t *low = fetch(w, &o->source[1], w->spare[3], 1);
  const uint32_t *high = fetch(w, &o->source[2], w->spare[4], 1);
  uint32_t *y = (uint32_t *)w->spare[0];
  for (long i = 0; i < w->n * w->halves; i++) {
    const uint64_t table = low[wave_of(w, 32 * i)] | (uint64_t)high[wave_of(w, 32 * i)] << 32;
    for (int l = 0; l < 32; l++)
      y[32 * i + l] = x[32 * i + ((l & 16) ^ across) + (table >> 4 * (l & 15) & 15)];
  }
  store_vector(w, &o->target, y, 0);
}

// Exchanges the halves of a wave64. Inactive lanes are read too.
static void swap_halves(State *w, const Op *o) {
  const uint32_t *x = fetch(w, &o->source[0], w->spare[2], lanes(w));
  uint32_t *y = (uint32_t *)w->spare[0];
  if (w->halves == 1) return;
  for (long h = 0; h < 2 * w->n; h++) memcpy(y + 32 * h, x + 32 * (h ^ 1), 128);
  store_vector(w, &o->target, y, w->full ? 0 : w->masks);
}

// Executes V_READLANE, V_READFIRSTLANE and V_WRITELANE.
static void between_files(State *w, const Op *o) {
  const uint32_t *exec = w->s + EXEC * w->n;
  const long all = lanes(w), width = o->handler == HANDLER_WRITELANE ? 1 : all;
  const uint32_t *x = fetch(w, &o->source[0], w->spare[2], width);
  const uint32_t *picked =
      o->handler == HANDLER_READFIRSTLANE ? 0 : fetch(w, &o->source[1], w->spare[3], 1);
  for (long i = 0; i < w->n; i++) {
    const uint64_t active = exec[i] | (w->halves > 1 ? (uint64_t)exec[i + w->n] << 32 : 0);
    const long lane = picked ? picked[i] & (all - 1) : active ? __builtin_ctzll(active) : 0;
    if (width == 1) w->v[(o->target.index * w->n + i) * all + lane] = x[i];
    else if (o->target.index != NIL) w->s[o->target.index * w->n + i] = x[all * i + lane];
  }
  if (o->write_exec) update_masks(w), w->exec_changed = 1;
}

// Executes the LDS instructions that move values between lanes without accessing memory. An active
// lane that gets no value from an active lane gets 0.
static void exchange(State *w, const Op *o) {
  const long halves = w->n * w->halves;
  const uint32_t *x = fetch(w, &o->source[0], w->spare[2], lanes(w));
  const uint32_t *index = o->sources > 1 ? fetch(w, &o->source[1], w->spare[3], lanes(w)) : 0;
  uint32_t *y = (uint32_t *)w->spare[0];
  memset(y, 0, 128 * halves);
  for (long i = 0; i < halves; i++)
    for (int l = 0; l < 32; l++) {
      const long here = 32 * i + l;
      const int other = index ? (index[here] + (uint64_t)o->offset) >> 2 & 31 : o->lanes[l];
      const int from = o->handler == HANDLER_PERMUTE ? l : other,
                to = o->handler == HANDLER_PERMUTE ? other : l;
      if (w->full || w->masks[32 * i + from]) y[32 * i + to] = x[32 * i + from];
    }
  store_vector(w, &o->target, y, w->full ? 0 : w->masks);
}
