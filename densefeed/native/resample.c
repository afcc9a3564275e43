/* The antialiased resampling of a crop to size x size RGB, from Y, Cb, Cr planes as they come out of the JPEG.
 *
 * The filters are Pillow's and torchvision's (triangle or cubic, widened by the scale when shrinking; no pixel outside the crop's
 * whole pixels is read). Interpolating half-resolution chroma and then resampling are both linear, so they are one filter here:
 * chroma is never brought to full resolution, and color is converted once per output pixel. Numbers are int16 with 6
 * fraction bits, products rounded to the nearest: the mean difference to Pillow is below 0.6 gray levels (tests).
 */
#include "native.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ONE 32767 /* weights have 15 fraction bits; 1.0 itself would need a sixteenth */
#define ONE_CUBIC 16384 /* at an image's edge a cubic's largest weight is 1.09 of their sum: these are halved, and sums doubled */
#define LANES 32 /* loops run over whole groups of so many, so that no remainder is done one by one */
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

/* The taps of one axis: output i is the sum of weight[i * room + k] * input[start[i] + k]. Inputs low to high - 1 are used. */
typedef struct { int *start, *count; int16_t *weight; int room, low, high; } Axis;

/* a * b / 2^15 to the nearest, written as compilers know it: one instruction (pmulhrsw, sqrdmulh) for a whole vector. */
INLINE int16_t scaled(int16_t a, int16_t b) { return (int16_t)(((a * b >> 14) + 1) >> 1); }

#define MARGIN 3 /* zeros on both sides of the weights, for the fold below */

/* A filter's weight at a distance of x times its unit. The cubic is Keys' with a = -1/2, Pillow's bicubic. */
INLINE float filter_weight(int filter, float x)
{
    x = fabsf(x);
    if (filter == BILINEAR) return x < 1 ? 1 - x : 0;
    return x < 1 ? (1.5f * x - 2.5f) * x * x + 1 : x < 2 ? ((-0.5f * x + 2.5f) * x - 4) * x + 2 : 0;
}

/* Taps of one axis of one plane: box `from` .. `from + length` in pixels of the whole image, of which those in [low, high) may be
 * used. `smooth`: the plane is at half resolution and libjpeg would interpolate it, 3/4 to 1/4, before anything else. */
static void set_taps(
    Axis *axis, float *room, int size, int filter, double from, double length, int low, int high, int mirror, int ratio, int smooth, int extent)
{
    double scale = length / size, unit_length = scale > 1 ? scale : 1, support = filter == BICUBIC ? 2 * unit_length : unit_length;
    float inverse = (float)(1 / unit_length), *whole = room + MARGIN, *half = whole + axis->room * ratio + 2 * MARGIN;
    axis->low = extent, axis->high = 0;
    for (int i = 0; i < size; i++) {
        double center = from + ((mirror ? size - 1 - i : i) + 0.5) * scale;
        int start = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        if (start < low) start = low;
        if (end > high) end = high;
        if (start >= end) start = end - 1;
        float total = 0, *weight = whole, offset = (float)(start + 0.5 - center);
        int count = end - start;
        for (int k = 0; k < count; k++) {
            whole[k] = filter_weight(filter, (offset + k) * inverse);
            total += whole[k];
        }
        if (total == 0) whole[0] = total = 1; /* a box thinner than a float can weigh */
        if (smooth) {
            for (int k = 0; k < MARGIN; k++) whole[-1 - k] = whole[count + k] = 0;
            int first = (start - 1) >> 1, last = end >> 1;
            for (int j = first; j <= last; j++) {
                const float *w = whole + 2 * j - start;
                half[j - first] = 0.75f * (w[0] + w[1]) + 0.25f * (w[-1] + w[2]);
            }
            weight = half;
            if (first < 0) half[1] += half[0], weight++, first++; /* the plane's first and last pixel are repeated outside it */
            for (; last > extent - 1; last--) half[last - 1 - ((start - 1) >> 1)] += half[last - ((start - 1) >> 1)];
            start = first, count = last - first + 1;
        } else if (ratio > 1) {
            int first = start / ratio;
            for (int k = 0; k <= (end - 1) / ratio - first; k++) half[k] = 0;
            for (int k = 0; k < count; k++) half[(start + k) / ratio - first] += whole[k];
            count = (end - 1) / ratio - first + 1, start = first, weight = half;
        }
        int16_t *to = axis->weight + (size_t)i * axis->room;
        int sum = 0, largest = 0, one = filter == BICUBIC ? ONE_CUBIC : ONE;
        float unit = one / total;
        for (int k = 0; k < count; k++) {
            float w = weight[k] * unit;
            to[k] = (int16_t)(w < 0 ? w - 0.5f : w + 0.5f);
            sum += to[k];
            if (to[k] > to[largest]) largest = k;
        }
        to[largest] += (int16_t)(one - sum); /* so that a flat image stays flat */
        axis->start[i] = start, axis->count[i] = count;
        if (start < axis->low) axis->low = start;
        if (start + count > axis->high) axis->high = start + count;
    }
}

/* to[i] = sum over k of weight[k] * input[k][i], `taps` known to the compiler. */
#define WEIGH(taps) \
    for (int i = 0; i < groups * LANES; i++) { \
        int16_t sum = 0; \
        for (int k = 0; k < taps; k++) sum += scaled(input[k][i], weight[k]); \
        to[i] = sum; \
    }

INLINE void weigh_upto8(const int16_t *const input[8], const int16_t *weight, int count, int groups, int16_t *restrict to)
{
    switch (count) {
    case 1: WEIGH(1) break;
    case 2: WEIGH(2) break;
    case 3: WEIGH(3) break;
    case 4: WEIGH(4) break;
    case 5: WEIGH(5) break;
    case 6: WEIGH(6) break;
    case 7: WEIGH(7) break;
    default: WEIGH(8) break;
    }
}

/* A weighted sum of `count` vectors of groups * LANES numbers, the first at `data`, the others `step` further each. */
INLINE void weigh(const int16_t *data, size_t step, const int16_t *weight, int count, int groups, int16_t *restrict to, int16_t *restrict more)
{
    const int16_t *input[8];
    for (int k = 0; k < 8; k++) input[k] = data + (k < count ? k : 0) * step;
    weigh_upto8(input, weight, count < 8 ? count : 8, groups, to);
    for (int done = 8; done < count; done += 8) { /* a crop of more than 4 times the output's size */
        for (int k = 0; k < 8; k++) input[k] = data + (done + k < count ? done + k : 0) * step;
        weigh_upto8(input, weight + done, count - done < 8 ? count - done : 8, groups, more);
        for (int i = 0; i < groups * LANES; i++) to[i] += more[i];
    }
}

INLINE void twice(int16_t *restrict values, int groups)
{
    for (int i = 0; i < groups * LANES; i++) values[i] = (int16_t)(2 * values[i]);
}

/* 8 rows of `columns` int16 become `columns` rows of 8. `columns` is rounded up to 8: both sides have the room. */
INLINE void transpose_half(const int16_t *from, size_t from_step, int16_t *to, size_t to_step, int columns)
{
    for (int x = 0; x < columns; x += 8) {
        Half m[8];
        for (int n = 0; n < 8; n++) memcpy(&m[n], from + n * from_step + x, 16);
        transpose8(m);
        for (int n = 0; n < 8; n++) memcpy(to + (x + n) * to_step, &m[n], 16);
    }
}

/* The horizontal half: rows `top` .. `top + rows` of the plane to `middle`, row-major [rows][across]. `wide` has room for all
 * columns of the plane as int16, `strip` for 9. */
FOR_EVERY_CPU static void shrink_columns(
    const Plane *plane, const Axis *axis, int size, int filter, int top, int rows, int16_t *wide, int16_t *strip, int16_t *middle, size_t across)
{
    int groups = (rows + LANES - 1) / LANES;
    size_t tall = (size_t)groups * LANES;
    for (int x = axis->low; x < axis->high; x++) {
        const uint8_t *restrict from = plane->data + (size_t)(x - plane->left) * plane->step + (top - plane->top);
        int16_t *restrict to = wide + (x - axis->low) * tall;
        for (int y = 0; y < groups * LANES; y++) to[y] = (int16_t)(from[y] << 6);
    }
    for (int i = 0; i < size; i += 8) {
        for (int n = 0; n < 8 && i + n < size; n++) {
            weigh(wide + (axis->start[i + n] - axis->low) * tall, tall, axis->weight + (size_t)(i + n) * axis->room, axis->count[i + n],
                groups, strip + n * tall, strip + 8 * tall);
            if (filter == BICUBIC) twice(strip + n * tall, groups);
        }
        transpose_half(strip, tall, middle + i, across, rows);
    }
}

INLINE uint8_t level(int16_t value)
{
    value = (int16_t)(value + 32) >> 6; /* cut to 16 bits before the shift, so that vectors stay narrow */
    value = value < 0 ? 0 : value;
    return (uint8_t)(value > 255 ? 255 : value);
}

INLINE void levels(const int16_t *restrict from, int groups, uint8_t *restrict to)
{
    for (int x = 0; x < groups * LANES; x++) to[x] = level(from[x]);
}

/* A cubic overshoots at edges, and luma and both chromas at once would not fit 16 bits after the color matrix: 18,000 is level 281,
 * and 18,000 + 1.772 * 8,192 < 32,768. */
INLINE void bound(int16_t *restrict values, int16_t low, int16_t high, int groups)
{
    for (int x = 0; x < groups * LANES; x++) values[x] = values[x] < low ? low : values[x] > high ? high : values[x];
}

/* Y, Cb, Cr to R, G, B in place, by JFIF's matrix; the parts of its numbers above 1 are added whole. */
INLINE void to_rgb(int16_t *restrict y, int16_t *restrict cb, int16_t *restrict cr, int groups)
{
    for (int x = 0; x < groups * LANES; x++) {
        int16_t blue = cb[x] - (128 << 6), red = cr[x] - (128 << 6), luma = y[x];
        y[x] = luma + red + scaled(red, 13173); /* 0.402 */
        cb[x] = luma - scaled(blue, 11277) - scaled(red, 23401); /* 0.344136, 0.714136 */
        cr[x] = luma + 2 * blue - scaled(blue, 7471); /* 1.772 = 2 - 0.228 */
    }
}

/* Three runs of bytes become RGBRGB... Compilers do not find these shuffles by themselves. */
INLINE void interleave(const uint8_t *restrict r, const uint8_t *restrict g, const uint8_t *restrict b, int count, uint8_t *restrict to)
{
    int x = 0;
    for (; x + 16 <= count; x += 16, to += 48) {
        Bytes red, green, blue, mixed;
        memcpy(&red, r + x, 16), memcpy(&green, g + x, 16), memcpy(&blue, b + x, 16);
        mixed = SHUFFLE(Bytes, red, green, 0, 16, 0, 1, 17, 0, 2, 18, 0, 3, 19, 0, 4, 20, 0, 5);
        mixed = SHUFFLE(Bytes, mixed, blue, 0, 1, 16, 3, 4, 17, 6, 7, 18, 9, 10, 19, 12, 13, 20, 15);
        memcpy(to, &mixed, 16);
        mixed = SHUFFLE(Bytes, green, red, 5, 0, 22, 6, 0, 23, 7, 0, 24, 8, 0, 25, 9, 0, 26, 10);
        mixed = SHUFFLE(Bytes, mixed, blue, 0, 21, 2, 3, 22, 5, 6, 23, 8, 9, 24, 11, 12, 25, 14, 15);
        memcpy(to + 16, &mixed, 16);
        mixed = SHUFFLE(Bytes, red, green, 0, 11, 27, 0, 12, 28, 0, 13, 29, 0, 14, 30, 0, 15, 31, 0);
        mixed = SHUFFLE(Bytes, mixed, blue, 26, 1, 2, 27, 4, 5, 28, 7, 8, 29, 10, 11, 30, 13, 14, 31);
        memcpy(to + 32, &mixed, 16);
    }
    for (; x < count; x++, to += 3) to[0] = r[x], to[1] = g[x], to[2] = b[x];
}

/* The vertical half and the colors of all output rows. `row` has room for 6 rows of `across`. */
FOR_EVERY_CPU static void shrink_rows(
    int16_t *const middle[3], const Axis axis[3], const int first[3], int planes, int ycc, int filter, int size, size_t across, int16_t *row,
    uint8_t *pixels)
{
    int16_t *const part[3] = {row, row + across, row + 2 * across}, *more = row + 3 * across;
    int groups = (int)(across / LANES);
    uint8_t *red = (uint8_t *)(row + 4 * across), *green = red + across, *blue = green + across;
    for (int i = 0; i < size; i++, pixels += 3 * (size_t)size) {
        for (int n = 0; n < planes; n++)
            weigh(middle[n] + (size_t)(axis[n].start[i] - first[n]) * across, across, axis[n].weight + (size_t)i * axis[n].room,
                axis[n].count[i], groups, part[n], more);
        for (int n = 0; n < planes && filter == BICUBIC; n++) twice(part[n], groups);
        if (ycc && planes == 3 && filter == BICUBIC) {
            bound(part[0], -2048, 18000, groups);
            bound(part[1], 0, 16384, groups), bound(part[2], 0, 16384, groups);
        }
        if (ycc && planes == 3) to_rgb(part[0], part[1], part[2], groups);
        levels(part[0], groups, red);
        if (planes == 3) levels(part[1], groups, green), levels(part[2], groups, blue);
        interleave(red, planes == 3 ? green : red, planes == 3 ? blue : red, size, pixels);
    }
}

/* The crop of `sample` from its decoded picture, size x size x 3. */
int resample(Scratch *scratch, const Picture *picture, Sample *sample, int size, int filter, uint8_t *pixels)
{
    double top = sample->top / picture->scale, left = sample->left / picture->scale;
    double tall = sample->box_height / picture->scale, wide = sample->box_width / picture->scale;
    int low_x = (int)left, high_x = (int)ceil(left + wide - 1e-9), low_y = (int)top, high_y = (int)ceil(top + tall - 1e-9);
    if (high_x > picture->width) high_x = picture->width;
    if (high_y > picture->height) high_y = picture->height;
    if (low_x >= high_x) low_x = high_x - 1;
    if (low_y >= high_y) low_y = high_y - 1;

    /* Room for the taps: an output sees at most 2 * scale + 3 inputs, of a cubic twice as many. */
    int reach = filter == BICUBIC ? 4 : 2;
    int room[2] = {(int)(reach * wide / size) + reach + 4, (int)(reach * tall / size) + reach + 4};
    size_t axis_bytes = 0;
    for (int d = 0; d < 2; d++) axis_bytes += 3 * (size * (2 * sizeof(int) + room[d] * sizeof(int16_t)) + 64);
    size_t float_room = 6 * (size_t)(room[0] > room[1] ? room[0] : room[1]) + 6 * MARGIN; /* whole and half, see set_taps */
    if (!grow(&scratch->weights, &scratch->weights_room, axis_bytes + ROUND_UP(float_room * sizeof(float), 64))) return NO_MEMORY;
    uint8_t *memory = scratch->weights;
    float *dense = (float *)memory;
    memory += ROUND_UP(float_room * sizeof(float), 64);
    Axis axis[2][3];
    int first[3] = {0}, rows[3] = {0};
    size_t across = ROUND_UP(size, LANES), middle_room = 0;
    for (int n = 0; n < picture->planes; n++) {
        const Plane *plane = &picture->plane[n];
        for (int d = 0; d < 2; d++) {
            axis[d][n] = (Axis){.start = (int *)memory, .count = (int *)memory + size, .room = room[d]};
            axis[d][n].weight = (int16_t *)(memory + 2 * size * sizeof(int));
            memory += size * (2 * sizeof(int) + room[d] * sizeof(int16_t)) + 7;
            memory -= (uintptr_t)memory % 8;
        }
        int smooth = plane->ratio_x <= 2 && plane->ratio_y <= 2;
        if (n && plane->ratio_x == plane[-1].ratio_x && plane->ratio_y == plane[-1].ratio_y) {
            axis[0][n] = axis[0][n - 1], axis[1][n] = axis[1][n - 1];
        } else {
            set_taps(&axis[0][n], dense, size, filter, left, wide, low_x, high_x, sample->flip, plane->ratio_x,
                smooth && plane->ratio_x == 2 && plane->extent_x > 2, plane->extent_x);
            set_taps(&axis[1][n], dense, size, filter, top, tall, low_y, high_y, 0, plane->ratio_y,
                smooth && plane->ratio_y == 2, plane->extent_y);
        }
        const Axis *right = &axis[0][n], *down = &axis[1][n];
        if (right->low < plane->left || right->high > plane->left + plane->width || down->low < plane->top
            || down->high > plane->top + plane->height)
            return fail(sample->message, DAMAGED, "its planes do not cover the crop");
        first[n] = down->low, rows[n] = down->high - down->low;
        middle_room += ROUND_UP(rows[n], LANES) * across;
    }
    int most = rows[0];
    for (int n = 1; n < picture->planes; n++) most = rows[n] > most ? rows[n] : most;
    int columns = 0;
    for (int n = 0; n < picture->planes; n++) columns = picture->plane[n].width > columns ? picture->plane[n].width : columns;
    size_t group_rows = ROUND_UP(most, LANES), strip_room = 9 * group_rows, column_room = columns * group_rows;
    size_t total = (middle_room + strip_room + column_room + 6 * across) * sizeof(int16_t);
    if (!grow((void **)&scratch->middle, &scratch->middle_room, total)) return NO_MEMORY;
    int16_t *strip = scratch->middle, *row = strip + strip_room, *column = row + 6 * across, *middle[3], *next = column + column_room;
    for (int n = 0; n < picture->planes; n++) {
        middle[n] = next;
        next += ROUND_UP(rows[n], LANES) * across;
        shrink_columns(&picture->plane[n], &axis[0][n], size, filter, first[n], rows[n], column, strip, middle[n], across);
    }
    shrink_rows(middle, axis[1], first, picture->planes, picture->ycc, filter, size, across, row, pixels);
    return OK;
}

/* Rows of bytes to columns of bytes: to[x * to_step + y] = from[y * from_step + x]. */
FOR_EVERY_CPU void transpose_bytes(const uint8_t *from, int from_step, uint8_t *to, int to_step, int rows, int columns)
{
    int x = 0;
    for (; x + 16 <= columns; x += 16) {
        int y = 0;
        for (; y + 8 <= rows; y += 8) {
            Bytes m[8], a[8];
            for (int n = 0; n < 8; n++) memcpy(&m[n], from + (size_t)(y + n) * from_step + x, 16);
#define LOW(a, b) SHUFFLE(Bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(Bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
            for (int n = 0; n < 4; n++) a[2 * n] = LOW(m[n], m[n + 4]), a[2 * n + 1] = HIGH(m[n], m[n + 4]);
            for (int n = 0; n < 4; n++) m[2 * n] = LOW(a[n], a[n + 4]), m[2 * n + 1] = HIGH(a[n], a[n + 4]);
            for (int n = 0; n < 4; n++) a[2 * n] = LOW(m[n], m[n + 4]), a[2 * n + 1] = HIGH(m[n], m[n + 4]);
            for (int n = 0; n < 8; n++) {
                memcpy(to + (size_t)(x + 2 * n) * to_step + y, &a[n], 8);
                memcpy(to + (size_t)(x + 2 * n + 1) * to_step + y, (uint8_t *)&a[n] + 8, 8);
            }
        }
        for (; y < rows; y++)
            for (int n = 0; n < 16; n++) to[(size_t)(x + n) * to_step + y] = from[(size_t)y * from_step + x + n];
    }
    for (; x < columns; x++)
        for (int y = 0; y < rows; y++) to[(size_t)x * to_step + y] = from[(size_t)y * from_step + x];
}
