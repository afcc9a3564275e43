/* Unpack score maps: rows of a lossless or compact store (densefeed/storage/FORMAT.md) become the
 * logits, classes and logsumexps of a batch. Check the values of maps of any form. */
#include "native.h"
#include <math.h>
#include <string.h>

#define EDGE 1e-6f /* that of storage/geometry.py */
#define INFINITE 0x7C00 /* bits of an infinite float16; those of NaN are above */

/* Convert float32 to float16, rounding to nearest even like numpy. All cases are computed and one
 * is selected, so that the loop can be vectorized. */
INLINE uint16_t to_half(float value) {
    uint32_t bits, small_bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    /* Below 2^-14 the spacing is 2^-24, like that of float32 in [0.5, 1). */
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&small_bits, &small, 4);
    uint32_t half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    half = bits < 0x38800000 ? small_bits - 0x3f000000 : half;
    /* 65,536 and above; smaller values that round up to it already carried to infinity. */
    half = bits >= 0x47800000 ? 0x7c00 : half;
    half = bits > 0x7f800000 ? 0x7e00 : half;
    return sign | half;
}

/* Compute the logit of each code of a compact row. */
FOR_EVERY_CPU static void scale_levels(
    float low, float step, const float *levels, uint16_t *to) {
    for (int n = 0; n < 256; n++) to[n] = to_half(low + step * levels[n]);
}

/* spread[n]: the bits of byte n, as the lowest bits of eight bytes. */
static uint64_t spread[256];

__attribute__((constructor)) static void make_spread(void) {
    for (int n = 0; n < 256; n++) {
        uint8_t bits[8];
        for (int k = 0; k < 8; k++) bits[k] = n >> k & 1;
        memcpy(&spread[n], bits, 8);
    }
}

/* Unpack `planes` bit planes into palette places, eight at a time: to[entry] of `bytes` * 8. */
static void unpack_places(const uint8_t *plane, int planes, size_t bytes, uint8_t *to) {
    for (size_t n = 0; n < bytes; n++) {
        uint64_t eight = 0;
        for (int k = 0; k < planes; k++) eight |= spread[plane[k * bytes + n]] << k;
        memcpy(to + 8 * n, &eight, 8);
    }
}

/* to[n] = table[place[n]], entries of two bytes. Four per store: a store costs more than shifts. */
INLINE void look_up(const uint8_t *place, const uint8_t *table, size_t count, uint8_t *to) {
    size_t n = 0;
    for (; n + 4 <= count; n += 4) {
        uint16_t four[4];
        for (int k = 0; k < 4; k++) memcpy(&four[k], table + 2 * place[n + k], 2);
        uint64_t whole = four[0] | (uint64_t)four[1] << 16;
        whole |= (uint64_t)four[2] << 32 | (uint64_t)four[3] << 48;
        memcpy(to + 2 * n, &whole, 8);
    }
    for (; n < count; n++) memcpy(to + 2 * n, table + 2 * place[n], 2);
}

/* Return the bits per place in a palette: 0 for 1 class, 5 for 17 to 32 classes. */
static int map_planes(int palette) {
    int planes = 0;
    while (palette > 1 << planes) planes++;
    return planes;
}

/* Return the length in bytes of a packed row whose palette has `palette` classes. */
int64_t map_bytes(const Packed *packed, int palette) {
    int64_t entries = (int64_t)packed->cells * packed->top_k;
    int64_t values = packed->levels ? 8 + entries : 2 * entries + 2 * packed->cells;
    return values + 2 * palette + map_planes(palette) * ((entries + 7) / 8);
}

/* Unpack a row into the arrays of a batch. `row` has map_bytes() bytes, `room` 2 per entry + 16. */
int map_unpack(const Packed *packed, int palette, const uint8_t *row, uint8_t *room,
    uint8_t *logit, uint8_t *class, uint8_t *lse, char *message) {
    size_t entries = (size_t)packed->cells * packed->top_k, bytes = (entries + 7) / 8;
    int planes = map_planes(palette);
    const uint8_t *names = row + (packed->levels ? 8 : 0), *plane = names + 2 * palette;
    const uint8_t *values = plane + planes * bytes;
    uint8_t *low = room, *high = room + 8 * bytes; /* the two bytes of a place */
    unpack_places(plane, planes < 8 ? planes : 8, bytes, low);
    if (planes > 8) unpack_places(plane + 8 * bytes, planes - 8, bytes, high);
    int most = 0;
    /* A separate loop, so that the compiler vectorizes it. */
    for (size_t n = 0; n < entries; n++) {
        int place = planes > 8 ? low[n] | high[n] << 8 : low[n];
        most = place > most ? place : most;
    }
    if (most >= palette)
        return fail(message, DAMAGED, "its score map refers to a class outside its palette");
    if (planes > 8)
        for (size_t n = 0; n < entries; n++)
            memcpy(class + 2 * n, names + 2 * (low[n] | high[n] << 8), 2);
    else
        look_up(low, names, entries, class);
    if (!packed->levels) {
        memcpy(logit, values, 2 * entries), memcpy(lse, values + 2 * entries, 2 * packed->cells);
        return OK;
    }
    float scale[2];
    uint16_t level[256];
    memcpy(scale, row, 8);
    scale_levels(scale[0], scale[1], packed->levels, level);
    look_up(values, (const uint8_t *)level, entries, logit);
    memset(lse, 0, 2 * packed->cells);
    return OK;
}

/* Return the largest of `count` numbers of 16 bits, of which `mask` is compared. */
FOR_EVERY_CPU static int largest(const uint8_t *values, size_t count, uint16_t mask) {
    uint16_t most = 0;
    for (size_t n = 0; n < count; n++) {
        uint16_t value;
        memcpy(&value, values + 2 * n, 2);
        value &= mask;
        most = value > most ? value : most;
    }
    return most;
}

/* Whether an axis of a Window is a part of the image, or centered and longer (storage/geometry.py).
 * All comparisons with NaN are false. */
static int is_window(float low, float high) {
    int within = low >= -EDGE && high <= 1 + EDGE;
    int around = low <= 0 && high >= 1 && fabsf(low + high - 1) < EDGE * (high - low);
    return low < high && (within || around);
}

/* Check that a score map holds only values that a teacher can produce, as find_faults in
 * storage/score_maps.py: the step uses them as indices and multiplies them. `seen` has room for a
 * number per class. */
int map_check(const Limits *limits, int32_t *seen, const uint8_t *logit, const uint8_t *class,
    const uint8_t *lse, const uint8_t *window, char *message) {
    size_t cells = limits->cells, entries = cells * limits->top_k;
    int most = largest(class, entries, 0xFFFF), distinct = 0, twice = 0;
    float side[4];
    memcpy(side, window, sizeof side);
    if (most >= limits->classes)
        return fail(message, DAMAGED, "its score map names class %d of %d", most, limits->classes);
    if (largest(logit, entries, 0x7FFF) >= INFINITE || largest(lse, cells, 0x7FFF) >= INFINITE)
        return fail(message, DAMAGED, "its score map holds a number that is not finite");
    if (!is_window(side[0], side[2]) || !is_window(side[1], side[3]))
        return fail(message, DAMAGED, "its score map's Window is no part of the image");
    /* For each class the last cell that names it, from 1. */
    memset(seen, 0, limits->classes * sizeof *seen);
    for (size_t cell = 1; cell <= cells; cell++)
        for (int k = 0; k < limits->top_k; k++, class += 2) {
            uint16_t name;
            memcpy(&name, class, 2);
            distinct += !seen[name], twice |= seen[name] == (int32_t)cell;
            seen[name] = (int32_t)cell;
        }
    if (twice) return fail(message, DAMAGED, "its score map names a class twice in one cell");
    if (distinct > limits->palette)
        return fail(message, DAMAGED, "its score map names %d classes, more than the palette of %d",
            distinct, limits->palette);
    return OK;
}
