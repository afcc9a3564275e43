/* Antialiased resampling of a crop to height x width RGB, directly from the decoded Y, Cb, Cr
 * planes.
 *
 * The filters are those of Pillow and torchvision: triangle or cubic, widened by the scale when
 * shrinking; no pixel outside the crop's whole pixels is read. Interpolating half-resolution chroma
 * and resampling are both linear, so they are one filter here: chroma is never upsampled to full
 * resolution, and color is converted once per output pixel. Numbers are int16 with 6 fraction bits,
 * products are rounded to nearest: the mean difference from Pillow is below 0.6 gray levels. Single
 * pixels differ by up to 29, because colors beyond 0 to 255 are clipped after the resampling, not
 * before it: a prototype that converts first took 1.31 times as long for a crop. */
#include "native.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(X86)
#include <immintrin.h>
#endif

#define ONE 32767 /* weights have 15 fraction bits; 1.0 itself would need a 16th */
/* At an image's edge a cubic's largest weight is 1.09 of the sum: halve weights, double sums. */
#define ONE_CUBIC 16384
#define LANES 32 /* loops run over whole groups of 32 numbers, so there is no scalar remainder */
#define MARGIN 3 /* zeros on both sides of the weights, for interpolated chroma in set_taps */
/* Bytes: vectors of 512 bits that cross cache lines take twice as long, and sum_bytes needs it. */
#define ALIGNED 64
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

/* Taps of one axis: output i is the sum over k < count[i] of weight[k * step + i] * input[start[i] +
 * k]. start[i] and start[i] + count[i] are monotonic in i. Inputs `low` to `high` - 1 are used.
 * `most` is the largest count; the weights behind an output's own, up to that, are 0. */
typedef struct {
    int *start, *count;
    int16_t *weight;
    size_t step;
    int room, low, high, most;
} Axis;

/* a * b / 2^15 to nearest, in the form that compiles to one instruction (pmulhrsw, sqrdmulh). */
INLINE int16_t multiply(int16_t a, int16_t b) { return (int16_t)(((a * b >> 14) + 1) >> 1); }

/* Weight of a filter at x units from its center. The cubic is Keys' with a = -1/2, as in Pillow. */
INLINE float filter_weight(int filter, float x) {
    x = fabsf(x);
    if (filter == BILINEAR) return x < 1 ? 1 - x : 0;
    return x < 1 ? (1.5f * x - 2.5f) * x * x + 1 : x < 2 ? ((-0.5f * x + 2.5f) * x - 4) * x + 2 : 0;
}

/* What the taps of one axis of one plane are computed from: the outputs, and the box `from` .. `from
 * + size * scale` in pixels of the whole image, of which only those in [low, high) may be used.
 * `smooth`: the plane is at half resolution, and libjpeg would first interpolate it with weights 3/4
 * and 1/4. */
typedef struct {
    int size, filter, mirror, low, high, ratio, smooth, extent;
    double from, scale, support;
    float inverse;
} Span;

/* Compute the taps of several outputs from `i` on as set_taps does, bit for bit. `room` is for
 * MOST_OUTPUTS floats per tap. Returns 0, and has changed nothing, if an output needs set_taps:
 * chroma at the edge of the plane, and boxes too thin for float32 weights. */
typedef int SetTaps(const Span *span, Axis *axis, float *room, int i);
#define MOST_OUTPUTS 16

#define OUTPUTS 8
#define INLINED(type, name) INLINE type name##_any
#define DEFINE(type, name) static type name##_any
#define CALL(name) name##_any
#include "taps.h"

#if defined(X86)
#define OUTPUTS 8
#define INLINED(type, name) AVX2 INLINE type name##_avx2
#define DEFINE(type, name) AVX2 static type name##_avx2
#define CALL(name) name##_avx2
#include "taps.h"

#define OUTPUTS 16
#define INLINED(type, name) AVX512 INLINE type name##_avx512
#define DEFINE(type, name) AVX512 static type name##_avx512
#define CALL(name) name##_avx512
#include "taps.h"
#endif

/* Those of 8 outputs, and of 16 where the processor can. */
static SetTaps *set_eight = set_taps_any, *set_sixteen;

/* Compute the taps of 16 or 8 outputs from `i` on. Returns how many, 0 if they need set_taps. */
static int set_several(const Span *span, Axis *axis, float *room, int i) {
    if (i % 8 || (span->ratio > 1 && !span->smooth)) return 0;
    if (set_sixteen && i + 16 <= span->size && set_sixteen(span, axis, room, i)) return 16;
    return i + 8 <= span->size && set_eight(span, axis, room, i) ? 8 : 0;
}

/* Find the inputs, `low` to `high` - 1, of outputs `first` to `end` - 1. */
INLINE void find_inputs(const Axis *axis, int first, int end, int *low, int *high) {
    int a = axis->start[first], b = axis->start[end - 1];
    *low = min(a, b), *high = max(a + axis->count[first], b + axis->count[end - 1]);
}

/* Compute the taps of one axis of one plane. */
static void set_taps(Axis *axis, float *room, Span span) {
    double unit_length = span.scale > 1 ? span.scale : 1;
    span.support = span.filter == BICUBIC ? 2 * unit_length : unit_length;
    span.inverse = (float)(1 / unit_length);
    int size = span.size, ratio = span.ratio, filter = span.filter, smooth = span.smooth;
    float *whole = room + MARGIN, *half = whole + axis->room * ratio + 2 * MARGIN;
    memset(axis->weight, 0, axis->room * axis->step * sizeof *axis->weight);
    for (int i = 0, several; i < size; i++) {
        /* By 16 in a fifth of the time of one by one, by 8 in a third. */
        if ((several = set_several(&span, axis, room, i))) {
            i += several - 1;
            continue;
        }
        double center = span.from + ((span.mirror ? size - 1 - i : i) + 0.5) * span.scale;
        int end = min((int)(center + span.support + 0.5), span.high);
        int start = min(max((int)(center - span.support + 0.5), span.low), end - 1);
        float total = 0, *weight = whole, offset = (float)(start + 0.5 - center);
        int count = end - start;
        for (int k = 0; k < count; k++) {
            whole[k] = filter_weight(filter, (offset + k) * span.inverse);
            total += whole[k];
        }
        /* The box may be too thin for float32 weights. */
        if (total == 0) whole[0] = total = 1;
        if (smooth) {
            for (int k = 0; k < MARGIN; k++) whole[-1 - k] = whole[count + k] = 0;
            int base = (start - 1) >> 1, first = base, last = end >> 1;
            for (int j = first; j <= last; j++) {
                const float *w = whole + 2 * j - start;
                half[j - first] = 0.75f * (w[0] + w[1]) + 0.25f * (w[-1] + w[2]);
            }
            weight = half;
            /* Outside the plane its first and last pixel are repeated. */
            if (first < 0) half[1] += half[0], weight++, first++;
            for (; last > span.extent - 1; last--) half[last - 1 - base] += half[last - base];
            start = first, count = last - first + 1;
        } else if (ratio > 1) {
            int first = start / ratio;
            for (int k = 0; k <= (end - 1) / ratio - first; k++) half[k] = 0;
            for (int k = 0; k < count; k++) half[(start + k) / ratio - first] += whole[k];
            count = (end - 1) / ratio - first + 1, start = first, weight = half;
        }
        int16_t *to = axis->weight + i, *largest = to;
        int sum = 0, one = filter == BICUBIC ? ONE_CUBIC : ONE;
        float unit = one / total;
        for (int k = 0; k < count; k++, to += axis->step) {
            float w = weight[k] * unit;
            *to = (int16_t)(w < 0 ? w - 0.5f : w + 0.5f);
            sum += *to;
            if (*to > *largest) largest = to;
        }
        /* The weights must sum to `one`, so that a uniform image stays uniform. */
        *largest += (int16_t)(one - sum);
        axis->start[i] = start, axis->count[i] = count;
    }
    find_inputs(axis, 0, size, &axis->low, &axis->high);
    axis->most = 0;
    for (int i = 0; i < size; i++) axis->most = max(axis->most, axis->count[i]);
}

/* to[i] = sum over k of weight[k * step] * input[k][i]; `taps` is a compile-time constant. */
#define WEIGH(taps) \
    for (int i = 0; i < groups * LANES; i++) { \
        int16_t sum = 0; \
        for (int k = 0; k < taps; k++) sum += multiply(input[k][i], weight[k * step]); \
        to[i] = sum; \
    }

INLINE void weigh_upto8(const int16_t *const input[8], const int16_t *weight, size_t step,
    int count, int groups, int16_t *restrict to) {
    switch (count) {
    case 1: WEIGH(1) break;    case 2: WEIGH(2) break;
    case 3: WEIGH(3) break;    case 4: WEIGH(4) break;
    case 5: WEIGH(5) break;    case 6: WEIGH(6) break;
    case 7: WEIGH(7) break;    default: WEIGH(8) break;
    }
}

/* Weighted sum of output i: `count` vectors of groups * LANES numbers, vector x at data + x * step.
 * A cubic's sum is doubled, see ONE_CUBIC. */
INLINE void weigh(const int16_t *data, size_t step, const Axis *axis, int i, int filter, int groups,
    int16_t *restrict to, int16_t *restrict more) {
    const int16_t *weight = axis->weight + i;
    int count = axis->count[i];
    const int16_t *input[8];
    for (int k = 0; k < 8; k++) input[k] = data + (k < count ? k : 0) * step;
    weigh_upto8(input, weight, axis->step, min(count, 8), groups, to);
    /* Only crops of more than 4 times the output's size have more than 8 taps. */
    for (int done = 8; done < count; done += 8) {
        for (int k = 0; k < 8; k++) input[k] = data + (done + k < count ? done + k : 0) * step;
        weigh_upto8(input, weight + done * axis->step, axis->step, min(count - done, 8), groups,
            more);
        for (int i = 0; i < groups * LANES; i++) to[i] += more[i];
    }
    if (filter == BICUBIC)
        for (int i = 0; i < groups * LANES; i++) to[i] = (int16_t)(2 * to[i]);
}

/* Transpose `rows` x `columns` int16, rounded up to multiples of 8; both buffers have the room. */
static void transpose(
    const int16_t *from, size_t from_step, int16_t *to, size_t to_step, int rows, int columns) {
    for (int x = 0; x < columns; x += 8, from += 8, to += 8 * to_step)
        for (int y = 0; y < rows; y += 8) {
            Half m[8];
            for (int n = 0; n < 8; n++) memcpy(&m[n], from + (y + n) * from_step, 16);
            transpose8(m);
            for (int n = 0; n < 8; n++) memcpy(to + n * to_step + y, &m[n], 16);
        }
}

/* Round a number with 6 fraction bits to a gray level. */
INLINE uint8_t level(int16_t number) {
    /* Truncated to 16 bits before the shift, so that vectors stay narrow. */
    int16_t value = (int16_t)(number + 32) >> 6;
    value = value < 0 ? 0 : value;
    return (uint8_t)(value > 255 ? 255 : value);
}

/* Here and in to_rgb the inner loop has a constant length: GCC would otherwise fill vectors with
 * bytes, twice as many numbers, and need a loop for the remainder. */
INLINE void levels(const int16_t *restrict from, int groups, uint8_t *restrict to) {
    for (; groups > 0; groups--, from += LANES, to += LANES)
        for (int x = 0; x < LANES; x++) to[x] = level(from[x]);
}

/* Limits of a cubic's overshoot at edges: luma and both chromas together would not fit 16 bits after
 * the color matrix. 18,000 is level 281, and 18,000 + 1.772 * 8,192 < 32,768. */
enum { LEAST_LUMA = -2048, MOST_LUMA = 18000, MOST_CHROMA = 16384 };

INLINE void clamp(int16_t *restrict values, int16_t low, int16_t high, int groups) {
    for (int x = 0; x < groups * LANES; x++)
        values[x] = values[x] < low ? low : values[x] > high ? high : values[x];
}

/* Coefficients of the JFIF matrix: 0.402, 0.228, 0.344136 and 0.714136. Their integer parts are
 * added unscaled, because `multiply` takes factors below 1: 1.402, and 1.772 = 2 - 0.228. */
enum { RED = 13173, BLUE = 7471, GREEN_BLUE = 11277, GREEN_RED = 23401 };

typedef struct { int16_t red, blue, green_blue, green_red; } Matrix;

/* The empty asm hides the values: GCC would widen a product with a known factor to 32 bits instead
 * of using `multiply`'s instruction, 3 % of the resampling time. */
INLINE Matrix jfif_matrix(void) {
    Matrix m = {RED, BLUE, GREEN_BLUE, GREEN_RED};
    __asm__("" : "+r"(m.red), "+r"(m.blue), "+r"(m.green_blue), "+r"(m.green_red));
    return m;
}

/* Convert LANES numbers of Y, Cb, Cr to levels of R, G, B. */
INLINE void to_rgb(const int16_t *restrict y, const int16_t *restrict cb,
    const int16_t *restrict cr, uint8_t *restrict red, uint8_t *restrict green,
    uint8_t *restrict blue) {
    const Matrix m = jfif_matrix();
    for (int x = 0; x < LANES; x++) {
        int16_t b = cb[x] - (128 << 6), r = cr[x] - (128 << 6);
        red[x] = level((int16_t)(y[x] + r + multiply(r, m.red)));
        int16_t both = multiply(b, m.green_blue) + multiply(r, m.green_red);
        green[x] = level((int16_t)(y[x] - both));
        blue[x] = level((int16_t)(y[x] + 2 * b - multiply(b, m.blue)));
    }
}

/* Interleave three planes to RGBRGB... Compilers do not find these shuffles. */
INLINE void interleave(const uint8_t *restrict r, const uint8_t *restrict g,
    const uint8_t *restrict b, int count, uint8_t *restrict to) {
#define MIX(a, b, ...) mixed = SHUFFLE(Bytes, a, b, __VA_ARGS__)
    int x = 0;
    for (; x + 16 <= count; x += 16, to += 48) {
        Bytes red, green, blue, mixed;
        memcpy(&red, r + x, 16), memcpy(&green, g + x, 16), memcpy(&blue, b + x, 16);
        MIX(red, green, 0, 16, 0, 1, 17, 0, 2, 18, 0, 3, 19, 0, 4, 20, 0, 5);
        MIX(mixed, blue, 0, 1, 16, 3, 4, 17, 6, 7, 18, 9, 10, 19, 12, 13, 20, 15);
        memcpy(to, &mixed, 16);
        MIX(green, red, 5, 0, 22, 6, 0, 23, 7, 0, 24, 8, 0, 25, 9, 0, 26, 10);
        MIX(mixed, blue, 0, 21, 2, 3, 22, 5, 6, 23, 8, 9, 24, 11, 12, 25, 14, 15);
        memcpy(to + 16, &mixed, 16);
        MIX(red, green, 0, 11, 27, 0, 12, 28, 0, 13, 29, 0, 14, 30, 0, 15, 31, 0);
        MIX(mixed, blue, 26, 1, 2, 27, 4, 5, 28, 7, 8, 29, 10, 11, 30, 13, 14, 31);
        memcpy(to + 32, &mixed, 16);
    }
    for (; x < count; x++, to += 3) to[0] = r[x], to[1] = g[x], to[2] = b[x];
}

/* Convert a row of Y, Cb and Cr to `width` pixels, RGBRGB... The inputs have whole groups. */
INLINE void write_row(const int16_t *const part[3], int width, uint8_t *pixels) {
    for (int x = 0; x < width; x += LANES, pixels += 3 * LANES) {
        uint8_t rgb[3][LANES];
        to_rgb(part[0] + x, part[1] + x, part[2] + x, rgb[0], rgb[1], rgb[2]);
        interleave(rgb[0], rgb[1], rgb[2], min(width - x, LANES), pixels);
    }
}

/* Outputs whose columns are resampled and transposed together. Their inputs and results stay in the
 * first-level cache, and each cache line of `middle` is written at once. */
#define STRIP 32

/* Taps of the functions below. Only crops of more than 3.5 times the output's size have more, with
 * a cubic of more than 1.75 times. */
#define MOST_TAPS 8

/* Resample `rows` of the columns `input` to `outputs` outputs from `first` on, row-major. Inputs are
 * read up to the axis' largest count, where they are multiplied by zero. */
typedef void ShrinkStrip(const int16_t *const input[STRIP], size_t tall, const Axis *axis,
    int first, int outputs, int filter, int rows, int16_t *to, size_t across);

/* Resample row i of pixels from rows `from` of Y, Cb and Cr, and convert its colors. */
typedef void ShrinkRow(const int16_t *const from[3], size_t across, const Axis axis[3], int i,
    int filter, int width, uint8_t *pixels);

/* How the horizontal half finds the bytes of row-major planes. Group g of LANES outputs reads at
 * most `reach` bytes of a row from `base[g]` on. `table` is [groups][taps][2][LANES]: the place of
 * each output's byte among those, in the upper half of a number, and its weight. */
typedef struct {
    int16_t *table;
    int *base;
    int groups, taps, reach;
} Gather;

/* Rows that are resampled together, for each load of a table. */
#define TOGETHER 4

/* Resample rows of bytes, which start where `base` counts from, to rows of numbers. */
typedef void ShrinkBytes(const uint8_t *const from[TOGETHER], int16_t *to, size_t across,
    const Gather *gather, int filter);

#if defined(X86)
/* Define the constants of the colors, and to_rgb in registers of type V up to rounded numbers that
 * are not limited to 0 .. 255 yet: the instruction that packs them to bytes does that. Constants
 * come from jfif_matrix, which hides their values: GCC would make some of them again for each
 * vector, 7 % of the vertical half. */
#define COLORS(set, target, V, mm) \
    typedef struct { V half, center, red, green_blue, green_red, blue; } Colors_##set; \
    target INLINE Colors_##set load_colors_##set(void) { \
        const Matrix m = jfif_matrix(); \
        return (Colors_##set){mm##_set1_epi16(32), mm##_set1_epi16(128 << 6), \
            mm##_set1_epi16(m.red), mm##_set1_epi16(m.green_blue), mm##_set1_epi16(m.green_red), \
            mm##_set1_epi16(m.blue)}; \
    } \
    target INLINE void to_colors_##set(const Colors_##set *c, const V ycc[3], V rgb[3]) { \
        V y = mm##_add_epi16(ycc[0], c->half); \
        V b = mm##_sub_epi16(ycc[1], c->center), r = mm##_sub_epi16(ycc[2], c->center); \
        V red = mm##_add_epi16(r, mm##_mulhrs_epi16(r, c->red)); \
        V green = mm##_add_epi16( \
            mm##_mulhrs_epi16(b, c->green_blue), mm##_mulhrs_epi16(r, c->green_red)); \
        V blue = mm##_sub_epi16(mm##_add_epi16(b, b), mm##_mulhrs_epi16(b, c->blue)); \
        rgb[0] = mm##_srai_epi16(mm##_add_epi16(y, red), 6); \
        rgb[1] = mm##_srai_epi16(mm##_sub_epi16(y, green), 6); \
        rgb[2] = mm##_srai_epi16(mm##_add_epi16(y, blue), 6); \
    }
COLORS(avx2, AVX2, __m256i_u, _mm256)
COLORS(avx512, AVX512, __m512i_u, _mm512)

/* Store the 16 bytes of each row, `step` numbers apart. */
AVX2 INLINE void store_rows_avx2(__m256i_u rows, int16_t *to, size_t step) {
    _mm256_storeu2_m128i((__m128i *)(to + step), (__m128i *)to, rows);
}

AVX512 INLINE void store_rows_avx512(__m512i_u rows, int16_t *to, size_t step) {
    _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(rows));
    _mm_storeu_si128((__m128i *)(to + step), _mm512_extracti32x4_epi32(rows, 1));
    _mm_storeu_si128((__m128i *)(to + 2 * step), _mm512_extracti32x4_epi32(rows, 2));
    _mm_storeu_si128((__m128i *)(to + 3 * step), _mm512_extracti32x4_epi32(rows, 3));
}

/* Store `count` of 32 pixels. One shuffle moves the 16 bytes of a color to their places in all three
 * vectors of 16 pixels. */
AVX2 INLINE void store_pixels_avx2(const __m256i_u colors[2][3], int count, uint8_t *pixels) {
#define IN_HALVES(...) _mm256_broadcastsi128_si256(_mm_setr_epi8(__VA_ARGS__))
    const __m256i order[3] = {
        IN_HALVES(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5),
        IN_HALVES(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10),
        IN_HALVES(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15),
    };
    const __m256i second = IN_HALVES(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0);
    const __m256i third = IN_HALVES(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0);
    __m256i rgb[3];
    for (int n = 0; n < 3; n++) {
        __m256i packed = _mm256_packus_epi16(colors[0][n], colors[1][n]);
        rgb[n] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(packed, 0xD8), order[n]);
    }
    uint8_t last[96], *to = count < 32 ? last : pixels;
    for (int n = 0; n < 3; n++) {
        /* 16 * n bytes come before vector n, so it begins with color n. */
        __m256i mixed = _mm256_blendv_epi8(rgb[n], rgb[(n + 1) % 3], second);
        mixed = _mm256_blendv_epi8(mixed, rgb[(n + 2) % 3], third);
        _mm256_storeu2_m128i((__m128i *)(to + 48 + 16 * n), (__m128i *)(to + 16 * n), mixed);
    }
    if (to == last) memcpy(pixels, last, 3 * (size_t)count);
}

/* Where store_pixels_avx512 finds byte k of 32 pixels, color k % 3 of pixel k / 3: packing leaves 8
 * pixels of red, then of green in each 16 bytes, and of blue in the other vector, whose bytes count
 * from 64. */
static uint8_t packed_at[128];

AVX512 INLINE void store_pixels_avx512(
    const __m512i_u colors[1][3], int count, uint8_t *pixels) {
    __m512i two = _mm512_packus_epi16(colors[0][0], colors[0][1]);
    __m512i one = _mm512_packus_epi16(colors[0][2], colors[0][2]);
    __m512i first = _mm512_permutex2var_epi8(two, _mm512_loadu_si512(packed_at), one);
    __m512i rest = _mm512_permutex2var_epi8(two, _mm512_loadu_si512(packed_at + 64), one);
    if (count == 32) {
        _mm512_storeu_si512(pixels, first);
        _mm256_storeu_si256((__m256i *)(pixels + 64), _mm512_castsi512_si256(rest));
        return;
    }
    int bytes = 3 * count;
    _mm512_mask_storeu_epi8(pixels, ~0ull >> (64 - min(bytes, 64)), first);
    if (bytes > 64) _mm512_mask_storeu_epi8(pixels + 64, ~0ull >> (128 - bytes), rest);
}

#define VECTOR __m256i_u
#define COUNT 16
#define INLINED(type, name) AVX2 INLINE type name##_avx2
#define DEFINE(type, name) AVX2 static type name##_avx2
#define CALL(name) name##_avx2
#define MM(operation) _mm256_##operation
#include "resample8.h"

/* One shuffle picks a tap's bytes for 32 outputs from 64 bytes of a row, from 128 if `wide`. They
 * land in the upper halves of numbers, which multiplies them by 256; a shift by 2 leaves 6 fraction
 * bits. */
AVX512 INLINE void sum_bytes(const uint8_t *const from[TOGETHER], int16_t *to, size_t across,
    const Gather *gather, int filter, int taps, int wide) {
    const __mmask64 upper = 0xAAAAAAAAAAAAAAAA;
    const __m512i *table = (const __m512i *)gather->table;
    for (int group = 0; group < gather->groups; group++, table += 2 * taps) {
        __m512i near[TOGETHER], far[TOGETHER], sum[TOGETHER];
        for (int n = 0; n < TOGETHER; n++) {
            near[n] = _mm512_loadu_si512(from[n] + gather->base[group]);
            far[n] = wide ? _mm512_loadu_si512(from[n] + gather->base[group] + 64) : near[n];
            sum[n] = _mm512_setzero_si512();
        }
        for (int k = 0; k < taps; k++)
            for (int n = 0; n < TOGETHER; n++) {
                __m512i byte = wide
                    ? _mm512_maskz_permutex2var_epi8(upper, near[n], table[2 * k], far[n])
                    : _mm512_maskz_permutexvar_epi8(upper, table[2 * k], near[n]);
                __m512i product = _mm512_mulhrs_epi16(_mm512_srli_epi16(byte, 2), table[2 * k + 1]);
                sum[n] = _mm512_add_epi16(sum[n], product);
            }
        for (int n = 0; n < TOGETHER; n++) {
            if (filter == BICUBIC) sum[n] = _mm512_add_epi16(sum[n], sum[n]);
            _mm512_store_si512(to + n * across + group * LANES, sum[n]);
        }
    }
}

AVX512 static void shrink_bytes_avx512(const uint8_t *const from[TOGETHER], int16_t *to,
    size_t across, const Gather *gather, int filter) {
#define SUM(taps, wide) sum_bytes(from, to, across, gather, filter, taps, wide)
    if (gather->reach > 64) SUM(gather->taps, 1);
    else switch (gather->taps) {
    case 2: SUM(2, 0); break;    case 3: SUM(3, 0); break;
    case 4: SUM(4, 0); break;    default: SUM(gather->taps, 0);
    }
#undef SUM
}

#define VECTOR __m512i_u
#define COUNT 32
#define INLINED(type, name) AVX512 INLINE type name##_avx512
#define DEFINE(type, name) AVX512 static type name##_avx512
#define CALL(name) name##_avx512
#define MM(operation) _mm512_##operation
#include "resample8.h"
#endif

static ShrinkStrip *shrink_strip;
static ShrinkRow *shrink_row;
static ShrinkBytes *shrink_bytes;

__attribute__((constructor)) static void choose_shrink(void) {
#if defined(X86)
    __builtin_cpu_init();
    if (HAS_AVX2) set_eight = set_taps_avx2;
    if (HAS_AVX512) set_sixteen = set_taps_avx512;
    if (HAS_AVX2) shrink_strip = shrink_strip_avx2, shrink_row = shrink_row_avx2;
    if (HAS_AVX512) shrink_strip = shrink_strip_avx512, shrink_row = shrink_row_avx512;
    if (HAS_AVX512) shrink_bytes = shrink_bytes_avx512;
    for (int k = 0; k < 96; k++)
        packed_at[k] = k / 24 * 16 + k / 3 % 8 + (k % 3 == 1 ? 8 : k % 3 == 2 ? 64 : 0);
#endif
}

/* The horizontal half: resample rows `top` .. `top + rows` of the plane into `middle`, row-major
 * [rows][across]. `wide` has room for all columns of the plane as int16, `strip` for STRIP + 1. If
 * `turned` is not NULL, the plane is row-major, and `turned` has room for its columns. */
FOR_EVERY_CPU static void shrink_columns(const Plane *plane, const Axis *axis, int size, int filter,
    int top, int rows, uint8_t *turned, int16_t *wide, int16_t *strip, int16_t *middle,
    size_t across) {
    int groups = (rows + LANES - 1) / LANES;
    size_t tall = (size_t)groups * LANES, step = turned ? tall : (size_t)plane->step;
    for (int first = 0; first < size; first += STRIP) {
        int outputs = min(size - first, STRIP), low, high;
        find_inputs(axis, first, first + outputs, &low, &high);
        const uint8_t *data = turned;
        if (turned)
            transpose_bytes(
                plane->data + (size_t)(top - plane->top) * plane->step + (low - plane->left),
                plane->step, turned, (int)step, rows, high - low);
        else data = plane->data + (low - plane->left) * step + (top - plane->top);
        for (int x = low; x < high; x++) {
            const uint8_t *restrict from = data + (x - low) * step;
            int16_t *restrict to = wide + (x - low) * tall;
            for (int y = 0; y < groups * LANES; y++) to[y] = (int16_t)(from[y] << 6);
        }
        if (shrink_strip && axis->most <= MOST_TAPS) {
            const int16_t *input[STRIP];
            for (int n = 0; n < STRIP; n++)
                input[n] = wide + (axis->start[first + min(n, outputs - 1)] - low) * tall;
            shrink_strip(input, tall, axis, first, outputs, filter, rows, middle + first, across);
            continue;
        }
        for (int n = 0; n < outputs; n++)
            weigh(wide + (axis->start[first + n] - low) * tall, tall, axis, first + n, filter,
                groups, strip + n * tall, strip + STRIP * tall);
        transpose(strip, tall, middle + first, across, outputs, rows);
    }
}

/* The vertical half and the colors of all output rows. `row` has room for 6 * across numbers. */
FOR_EVERY_CPU static void shrink_rows(int16_t *const middle[3], const Axis axis[3],
    int planes, int ycc, int filter, int height, int width, size_t across, int16_t *row,
    uint8_t *pixels) {
    int16_t *const part[3] = {row, row + across, row + 2 * across}, *more = row + 3 * across;
    int groups = (int)(across / LANES), colors = ycc && planes == 3;
    int few = colors && max(axis[0].most, max(axis[1].most, axis[2].most)) <= MOST_TAPS;
    uint8_t *red = (uint8_t *)(row + 4 * across), *green = red + across, *blue = green + across;
    for (int i = 0; i < height; i++, pixels += 3 * (size_t)width) {
        const int16_t *from[3];
        for (int n = 0; n < planes; n++)
            from[n] = middle[n] + (axis[n].start[i] - axis[n].low) * across;
        if (few && shrink_row) {
            shrink_row(from, across, axis, i, filter, width, pixels);
            continue;
        }
        for (int n = 0; n < planes; n++)
            weigh(from[n], across, &axis[n], i, filter, groups, part[n], more);
        if (colors && filter == BICUBIC) {
            clamp(part[0], LEAST_LUMA, MOST_LUMA, groups);
            clamp(part[1], 0, MOST_CHROMA, groups), clamp(part[2], 0, MOST_CHROMA, groups);
        }
        if (colors) {
            write_row((const int16_t *const *)part, width, pixels);
            continue;
        }
        for (int n = 0; n < planes; n++) levels(part[n], groups, red + n * across);
        interleave(red, planes == 3 ? green : red, planes == 3 ? blue : red, width, pixels);
    }
}

/* Compute the taps of all planes: axis[0] across, axis[1] down. */
static int set_axes(Sample *sample, Scratch *scratch, const Picture *picture, int height, int width,
    Axis axis[2][3]) {
    int filter = sample->filter;
    double top = sample->top / picture->scale, left = sample->left / picture->scale;
    double tall = sample->box_height / picture->scale, wide = sample->box_width / picture->scale;
    int high_x = min((int)ceil(left + wide - 1e-9), picture->width);
    int high_y = min((int)ceil(top + tall - 1e-9), picture->height);
    int low_x = min((int)left, high_x - 1), low_y = min((int)top, high_y - 1);

    /* Room for the taps: an output has at most 2 * scale + 3 inputs, or twice as many if cubic. The
     * floats hold `whole` and `half` of set_taps, or those of SetTaps. */
    int reach = filter == BICUBIC ? 4 : 2;
    int room = (int)(reach * fmax(wide / width, tall / height)) + reach + 4;
    int longest = max(height, width);
    size_t float_bytes = ROUND_UP((MOST_OUTPUTS * (size_t)room + 6 * MARGIN) * sizeof(float), 64);
    size_t axis_bytes = ROUND_UP(longest * (2 * sizeof(int) + room * sizeof(int16_t)), 64);
    if (!GROW(scratch, weights, float_bytes + 6 * axis_bytes)) return NO_MEMORY;
    float *dense = scratch->weights;
    for (int n = 0; n < picture->planes; n++) {
        const Plane *plane = &picture->plane[n];
        Axis *right = &axis[0][n], *down = &axis[1][n];
        for (int d = 0; d < 2; d++) {
            int *start = (int *)((uint8_t *)dense + float_bytes + (3 * d + n) * axis_bytes);
            int16_t *weight = (int16_t *)(start + 2 * longest);
            axis[d][n] = (Axis){start, start + longest, weight, .step = longest, .room = room};
        }
        int ratio_x = plane->ratio_x, ratio_y = plane->ratio_y;
        /* As libjpeg, which repeats samples where halved chroma is at most 2 wide. */
        int is_wide = ratio_x == 1 || plane->extent_x > 2;
        int smooth_y = ratio_y == 2 && ratio_x <= 2 && is_wide;
        int smooth_x = ratio_x == 2 && ratio_y <= 2 && is_wide;
        if (n && ratio_x == plane[-1].ratio_x && ratio_y == plane[-1].ratio_y) {
            *right = right[-1], *down = down[-1];
        } else {
            set_taps(right, dense, (Span){
                .size = width, .filter = filter, .mirror = sample->flip, .low = low_x,
                .high = high_x, .ratio = ratio_x, .smooth = smooth_x, .extent = plane->extent_x,
                .from = left, .scale = wide / width,
            });
            set_taps(down, dense, (Span){
                .size = height, .filter = filter, .low = low_y, .high = high_y, .ratio = ratio_y,
                .smooth = smooth_y, .extent = plane->extent_y, .from = top, .scale = tall / height,
            });
        }
        if (right->low < plane->left || right->high > plane->left + plane->width
            || down->low < plane->top || down->high > plane->top + plane->height)
            return fail(sample->message, DAMAGED, "its planes do not cover the crop");
    }
    return OK;
}

/* Resample any planes, by columns. */
static int resample_columns(const Batch *batch, int filter, Scratch *scratch,
    const Picture *picture, const Axis axis[2][3], uint8_t *pixels) {
    int most = 0, columns = 0, width = batch->width;
    size_t across = ROUND_UP(width, LANES), middle_room = 0;
    for (int n = 0; n < picture->planes; n++) {
        int rows = ROUND_UP(axis[1][n].high - axis[1][n].low, LANES);
        most = max(most, rows), columns = max(columns, picture->plane[n].width);
        middle_room += rows * across;
    }
    size_t strip_room = (STRIP + 1) * (size_t)most, column_room = columns * (size_t)most;
    size_t turned_room = picture->row_major ? column_room / 2 : 0;
    /* Behind the last plane too there are rows and columns to multiply by zero. */
    size_t zeros = MOST_TAPS * across, tap_columns = MOST_TAPS * (size_t)most;
    size_t total = turned_room + strip_room + 6 * across + column_room + tap_columns + middle_room
        + zeros;
    if (!GROW(scratch, middle, total * sizeof(int16_t) + ALIGNED)) return NO_MEMORY;
    int16_t *first = (int16_t *)ROUND_UP((uintptr_t)scratch->middle, ALIGNED), *middle[3];
    uint8_t *turned = picture->row_major ? (uint8_t *)first : NULL;
    int16_t *strip = first + turned_room, *row = strip + strip_room, *column = row + 6 * across;
    int16_t *next = column + column_room + tap_columns;
    for (int n = 0; n < picture->planes; n++) {
        const Axis *down = &axis[1][n];
        int rows = down->high - down->low;
        middle[n] = next;
        next += ROUND_UP(rows, LANES) * across;
        shrink_columns(&picture->plane[n], &axis[0][n], width, filter, down->low, rows, turned,
            column, strip, middle[n], across);
    }
    shrink_rows(middle, axis[1], picture->planes, picture->ycc, filter, batch->height, width,
        across, row, pixels);
    return OK;
}

/* Plan how shrink_bytes finds the bytes of all planes, but for their tables. Returns 0 if it
 * cannot: it needs row-major planes, and the inputs of a group close to each other. */
static int plan_gather(const Picture *picture, const Axis axis[3], int width, Gather gather[3]) {
    if (!picture->row_major || !shrink_bytes) return 0;
    for (int n = 0; n < picture->planes; n++) {
        int reach = 0;
        for (int first = 0, low, high; first < width; first += LANES) {
            find_inputs(&axis[n], first, min(first + LANES, width), &low, &high);
            reach = max(reach, high - low);
        }
        if (axis[n].most > MOST_TAPS || reach > AHEAD) return 0;
        gather[n] = (Gather){.groups = (width + LANES - 1) / LANES, .taps = axis[n].most,
            .reach = reach};
    }
    return 1;
}

/* Fill the tables for planes whose first column is `left`. */
FOR_EVERY_CPU static void set_gather(Gather *gather, const Axis *axis, int width, int left) {
    int16_t *to = gather->table;
    for (int group = 0; group < gather->groups; group++) {
        int first = group * LANES, outputs = min(width - first, LANES), low, high;
        find_inputs(axis, first, first + outputs, &low, &high);
        gather->base[group] = low - left;
        int16_t place[LANES] = {0};
        for (int x = 0; x < outputs; x++) place[x] = (int16_t)(axis->start[first + x] - low);
        for (int k = 0; k < gather->taps; k++, to += 2 * LANES) {
            /* Behind an output's own inputs they may wrap: weights are 0 there. */
            for (int x = 0; x < LANES; x++) to[x] = (int16_t)((place[x] + k) << 8);
            memset(to + LANES, 0, LANES * sizeof *to);
            memcpy(to + LANES, axis->weight + k * axis->step + first, outputs * sizeof *to);
        }
    }
}

/* Resample row-major planes after plan_gather. The horizontal half of all rows comes first:
 * alternating with the vertical half every 2, 4, 8 or 16 output rows took 36, 31, 28 or 27 us where
 * this took 25. */
static int resample_rows(const Batch *batch, int filter, Scratch *scratch, const Picture *picture,
    const Axis axis[2][3], Gather gather[3], uint8_t *pixels) {
    size_t across = ROUND_UP(batch->width, LANES), total = 6 * across;
    int shared[3]; /* whether a plane has the tables of the one before */
    for (int n = 0; n < picture->planes; n++) {
        const Axis *right = &axis[0][n], *down = &axis[1][n];
        shared[n] = n && right->start == right[-1].start;
        total += ROUND_UP(down->high - down->low, TOGETHER) * across;
        if (!shared[n]) total += 2 * gather[n].taps * across + across;
    }
    if (!GROW(scratch, middle, total * sizeof(int16_t) + ALIGNED)) return NO_MEMORY;
    int16_t *row = (int16_t *)ROUND_UP((uintptr_t)scratch->middle, ALIGNED), *middle[3];
    int16_t *next = row + 6 * across;
    for (int n = 0; n < picture->planes; n++) {
        const Plane *plane = &picture->plane[n];
        const Axis *down = &axis[1][n];
        if (shared[n]) {
            gather[n] = gather[n - 1];
        } else {
            gather[n].table = next, next += 2 * gather[n].taps * across;
            gather[n].base = (int *)next, next += across;
            set_gather(&gather[n], &axis[0][n], batch->width, plane->left);
        }
        middle[n] = next;
        for (int y = down->low; y < down->high; y += TOGETHER, next += TOGETHER * across) {
            const uint8_t *from[TOGETHER];
            for (int k = 0; k < TOGETHER; k++) {
                int at = min(y + k, down->high - 1) - plane->top;
                from[k] = plane->data + (size_t)at * plane->step;
            }
            shrink_bytes(from, next, across, &gather[n], filter);
        }
    }
    shrink_rows(middle, axis[1], picture->planes, picture->ycc, filter, batch->height,
        batch->width, across, row, pixels);
    return OK;
}

/* Resample the crop of sample `index` from its decoded picture, to height x width x 3 bytes. */
int resample(const Batch *batch, int index, Scratch *scratch, const Picture *picture) {
    Sample *sample = &batch->samples[index];
    uint8_t *pixels = batch->pixels + (size_t)index * batch->height * batch->width * 3;
    Axis axis[2][3];
    Gather gather[3];
    TRY(set_axes(sample, scratch, picture, batch->height, batch->width, axis));
    if (plan_gather(picture, axis[0], batch->width, gather))
        return resample_rows(batch, sample->filter, scratch, picture, axis, gather, pixels);
    return resample_columns(batch, sample->filter, scratch, picture, axis, pixels);
}

/* Transpose rows of bytes: to[x * to_step + y] = from[y * from_step + x]. */
FOR_EVERY_CPU void transpose_bytes(
    const uint8_t *from, int from_step, uint8_t *to, int to_step, int rows, int columns) {
    int x = 0;
    for (; x + 16 <= columns; x += 16) {
        int y = 0;
        for (; y + 8 <= rows; y += 8) {
            Bytes m[8], a[8];
            for (int n = 0; n < 8; n++)
                memcpy(&m[n], from + (size_t)(y + n) * from_step + x, 16);
#define ZIP(to, from) \
    for (int n = 0; n < 4; n++) { \
        to[2 * n] = SHUFFLE(Bytes, from[n], from[n + 4], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, \
            6, 22, 7, 23); \
        to[2 * n + 1] = SHUFFLE(Bytes, from[n], from[n + 4], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, \
            13, 29, 14, 30, 15, 31); \
    }
            ZIP(a, m) ZIP(m, a) ZIP(a, m)
            for (int n = 0; n < 16; n++)
                memcpy(to + (size_t)(x + n) * to_step + y, (uint8_t *)a + 8 * n, 8);
        }
        for (; y < rows; y++)
            for (int n = 0; n < 16; n++)
                to[(size_t)(x + n) * to_step + y] = from[(size_t)y * from_step + x + n];
    }
    for (; x < columns; x++)
        for (int y = 0; y < rows; y++)
            to[(size_t)x * to_step + y] = from[(size_t)y * from_step + x];
}
