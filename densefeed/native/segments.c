/* Decode a crop of a segment-indexed JPEG (densefeed/storage/FORMAT.md): read only its rows, decode
 * only its segments.
 *
 * The format is deliberately narrow (baseline, 8 bits, one scan, a restart marker before each
 * segment), so this decoder is short, and faster than libjpeg-turbo: that one decodes the last MCU
 * of a segment twice (its fast path stops at a marker) and cannot skip the columns beside the crop.
 * Pixels equal those of libjpeg's `islow` transform bit for bit. */
#include "native.h"
#include <string.h>
#if defined(X86)
#include <immintrin.h>
#endif

#define INDEX_MARK "DFSEG\1"
#define INDEX_AT 6 /* offset of the mark: SOI, APP9 and its length come first */
#define INDEX_FIXED 16 /* bytes of mark, header length, header CRC, number of rows */
#define LONGEST 16 /* bits of a code */
/* Bits that one look-up decodes. AC: code and value; 10 and 12 bits are 3 % slower (more long codes,
 * more cache misses). DC: the code alone, since values are too long to be looked up with it. */
#define FAST_AC 11
#define FAST_DC 8

typedef struct {
    uint32_t limit[LONGEST + 2]; /* first longer code, left-aligned to 16 bits */
    int first[LONGEST + 1]; /* symbol number of the first code of this length, minus that code */
    uint8_t symbol[256];
    int defined;
} Codes;

typedef struct {
    Codes codes;
    uint16_t fast[1 << FAST_DC]; /* bits of the value << 8 | bits to drop with it; 0: longer code */
} DcTable;

typedef struct {
    Codes codes;
    uint32_t fast[1 << FAST_AC]; /* value << 16 | zeros before it << 8 | MORE | bits to drop */
} AcTable;
#define MORE 0x40 /* the value is not in the look-up: its field holds its size in bits or LONGER */
#define LONGER 0xFF /* the code itself is longer than FAST_AC bits */
#define END_OF_BLOCK 128 /* zeros: past the block's end, distinct from a run that is too long */

typedef struct { int id, h, v, quant, dc, ac; } Component;
typedef struct { int from, to; } Span; /* of MCUs, both inclusive */

typedef struct {
    DcTable dc[2];
    AcTable ac[2];
    /* In zigzag order: quantization factor, and position in the row-major block. */
    struct Place { uint16_t quant, at; } place[4][64];
    int quant_defined[4];
    Component component[3];
    int components, height, width, interval, ycc;
    int mcu_width, mcu_height, mcus_across, mcus_down; /* pixels, MCUs */
    const uint8_t *rows; /* the index: length and CRC of each row of MCUs */
    size_t length; /* of the header, bytes */
    size_t longest; /* row of MCUs of `down`, bytes */
    Span across, down; /* of the MCUs that the crops need */
    const uint8_t *data; /* the remaining rows of MCUs of `down` */
} Header;

static uint32_t u32(const uint8_t *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

static const uint8_t ZIGZAG[64] = {
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22,
    15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
};

/* ------------------------------------------------------------------------- Header */
/* Return the length of the header if the file begins with our index, else 0. */
int segments_header(const uint8_t *bytes, size_t length) {
    if (length < INDEX_AT + INDEX_FIXED || memcmp(bytes, "\xFF\xD8\xFF\xE9", 4)) return 0;
    if (memcmp(bytes + INDEX_AT, INDEX_MARK, 6)) return 0;
    uint32_t header = u32(bytes + INDEX_AT + 6);
    return header < 1 << 20 ? (int)header : 0;
}

/* Assign the codes to their symbols. Returns 0 if it is not a prefix code or contains a symbol that
 * baseline JPEG does not have. */
static int assign_codes(Codes *codes, const uint8_t *counts, const uint8_t *symbols, int is_dc) {
    uint32_t code = 0;
    int total = 0;
    for (int length = 1; length <= LONGEST; length++) {
        codes->first[length] = total - (int)code;
        for (int n = 0; n < counts[length - 1]; n++, code++) {
            uint8_t symbol = codes->symbol[total] = symbols[total];
            int zeros = is_dc ? 0 : symbol >> 4, size = is_dc ? symbol : symbol & 15;
            if (code >> length || size > (is_dc ? 11 : 10)) return 0;
            if (!is_dc && !size && zeros && zeros != 15) return 0;
            total++;
        }
        codes->limit[length] = code << (LONGEST - length);
        code <<= 1;
    }
    codes->limit[LONGEST + 1] = ~0u;
    return codes->defined = 1;
}

/* Fill the look-up for codes of first coefficients. */
static void fill_dc(DcTable *table, const uint8_t *counts) {
    uint16_t *entry = table->fast;
    const uint8_t *size = table->codes.symbol;
    memset(table->fast, 0, sizeof table->fast);
    for (int length = 1; length <= FAST_DC; length++)
        for (int n = 0; n < counts[length - 1]; n++, size++)
            for (int k = 0; k < 1 << (FAST_DC - length); k++)
                *entry++ = (uint16_t)(*size << 8 | (length + *size));
}

/* Fill the look-up for codes of the other coefficients. */
static void fill_ac(AcTable *table, const uint8_t *counts) {
    uint32_t *entry = table->fast;
    const uint8_t *symbol = table->codes.symbol;
    for (int length = 1; length <= FAST_AC; length++)
        for (int n = 0; n < counts[length - 1]; n++, symbol++) {
            int size = *symbol & 15, zeros = *symbol ? *symbol >> 4 : END_OF_BLOCK;
            /* If it fits, the look-up decodes the value's own bits too. */
            int fits = length + size <= FAST_AC, bits = fits ? size : 0;
            uint32_t low = zeros << 8 | (fits ? length + size : MORE | length);
            for (int k = 0; k < 1 << bits; k++) {
                int value = !fits ? size : size && k < 1 << (size - 1) ? k - (1 << size) + 1 : k;
                for (int n = 0; n < 1 << (FAST_AC - length - bits); n++)
                    *entry++ = (uint32_t)value << 16 | low;
            }
        }
    while (entry < table->fast + (1 << FAST_AC)) *entry++ = LONGER << 16 | MORE;
}

/* Parse the markers up to the scan. Returns 0 if our packer does not write such markers. */
static int parse(Header *header, const uint8_t *bytes, size_t length) {
    memset(header->quant_defined, 0, sizeof header->quant_defined);
    for (int n = 0; n < 2; n++) header->dc[n].codes.defined = header->ac[n].codes.defined = 0;
    header->components = header->interval = 0;
    int jfif = 0, adobe = -1;
    for (size_t at = 2; at + 4 <= length;) {
        int marker = bytes[at + 1], size = be16(bytes + at + 2);
        const uint8_t *body = bytes + at + 4, *end = bytes + at + 2 + size;
        if (bytes[at] != 0xFF || size < 2 || at + 2 + size > length) return 0;
        at += 2 + size;
        if (marker == 0xDB) {
            for (; body + 65 <= end; body += 65) {
                if (*body > 3) return 0; /* 8-bit tables 0 to 3 */
                for (int k = 0; k < 64; k++)
                    header->place[*body][k] = (struct Place){body[1 + k], ZIGZAG[k]};
                header->quant_defined[*body] = 1;
            }
            if (body != end) return 0;
        } else if (marker == 0xC4) {
            while (body + 17 <= end) {
                int total = 0, is_dc = !(*body >> 4), which = *body & 15;
                for (int n = 1; n <= LONGEST; n++) total += body[n];
                if (*body >> 4 > 1 || which > 1 || total > 256 || body + 17 + total > end) return 0;
                Codes *codes = is_dc ? &header->dc[which].codes : &header->ac[which].codes;
                if (!assign_codes(codes, body + 1, body + 17, is_dc)) return 0;
                if (is_dc) fill_dc(&header->dc[which], body + 1);
                else fill_ac(&header->ac[which], body + 1);
                body += 17 + total;
            }
            if (body != end) return 0;
        } else if (marker == 0xC0) {
            if (size < 8 || body[0] != 8) return 0;
            int count = header->components = body[5];
            header->height = be16(body + 1), header->width = be16(body + 3);
            if ((count != 1 && count != 3) || size != 8 + 3 * count) return 0;
            for (int n = 0; n < count; n++) {
                const uint8_t *c = body + 6 + 3 * n;
                header->component[n] = (Component){c[0], c[1] >> 4, c[1] & 15, c[2], 0, 0};
                if (c[2] > 3) return 0;
            }
        } else if (marker == 0xDD) {
            if (size != 4) return 0;
            header->interval = be16(body);
        } else if (marker == 0xDA) {
            int count = header->components;
            if (size != 6 + 2 * count || body[0] != count || at != length) return 0;
            for (int n = 0; n < count; n++) {
                Component *c = &header->component[n];
                c->dc = body[2 + 2 * n] >> 4, c->ac = body[2 + 2 * n] & 15;
                if (body[1 + 2 * n] != c->id || c->dc > 1 || c->ac > 1) return 0;
                if (!header->dc[c->dc].codes.defined || !header->ac[c->ac].codes.defined) return 0;
                if (!header->quant_defined[c->quant]) return 0;
            }
            /* Guess like libjpeg whether the planes are R, G, B or Y, Cb, Cr. */
            const Component *c = header->component;
            int rgb = adobe < 0 ? c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B' : adobe == 0;
            header->ycc = jfif || !rgb;
            header->length = length;
            return count > 0;
        } else if (marker >= 0xE0 && marker <= 0xEF) {
            if (marker == 0xEE && size >= 14 && !memcmp(body, "Adobe", 5)) adobe = body[11];
            if (marker == 0xE0 && size >= 16 && !memcmp(body, "JFIF", 5)) jfif = 1;
        } else {
            return 0;
        }
    }
    return 0;
}

/* Parse and verify the header and index of an image that begins with our index. */
static int open_header(Header *header, const uint8_t *bytes, size_t length, char *message) {
    const uint8_t *index = bytes + INDEX_AT;
    if (length < INDEX_AT + INDEX_FIXED) return fail(message, DAMAGED, "its header is too short");
    uint32_t crc = densefeed_crc32(bytes, INDEX_AT + 10, 0);
    crc = densefeed_crc32(bytes + INDEX_AT + 14, length - INDEX_AT - 14, crc);
    if (crc != u32(index + 10))
        return fail(message, DAMAGED, "its header does not match its checksum");
    if (!parse(header, bytes, length))
        return fail(message, DAMAGED, "its header was not written by DenseFeed");
    Component *c = header->component;
    /* A single component is not interleaved: its MCU is one block. */
    if (header->components == 1) c[0].h = c[0].v = c[1].h = c[1].v = c[2].h = c[2].v = 1;
    int chroma = c[1].h == 1 && c[1].v == 1 && c[2].h == 1 && c[2].v == 1;
    if (!chroma || c[0].h < 1 || c[0].h > 2 || c[0].v < 1 || c[0].v > 2
        || !header->height || !header->width)
        return fail(message, DAMAGED, "DenseFeed does not write its size or chroma subsampling");
    header->mcu_width = 8 * c[0].h, header->mcu_height = 8 * c[0].v;
    header->mcus_across = (header->width + header->mcu_width - 1) / header->mcu_width;
    header->mcus_down = (header->height + header->mcu_height - 1) / header->mcu_height;
    header->rows = index + INDEX_FIXED;
    int rows = index[14] | index[15] << 8;
    if (rows != header->mcus_down || be16(bytes + 4) != 2 + INDEX_FIXED + 8 * rows
        || header->interval < 1 || header->mcus_across % header->interval)
        return fail(message, DAMAGED, "its segment index does not match its size");
    /* A cut leaves ours out, and would then begin with another one. */
    const uint8_t *next = bytes + 4 + be16(bytes + 4);
    if (next + 10 <= bytes + length && next[1] == 0xE9 && !memcmp(next + 4, INDEX_MARK, 6))
        return fail(message, DAMAGED, "it has two segment indexes");
    return OK;
}

/* ------------------------------------------------------------------------- Entropy decoding */
typedef struct {
    const uint8_t *at; /* in a segment without stuffed zeros, or at most SLACK bytes past its end */
    uint64_t bits; /* left-aligned; behind the valid bits some of the next ones */
    int count; /* valid bits */
} Bits;

/* Bytes of zeros behind a segment. A damaged block may read them before its end is checked: at most
 * 27 + 63 * 26 bits, which are 209 bytes, and 16 more that are read ahead. */
#define SLACK 256

/* Fill up to at least 56 bits. */
INLINE void refill(Bits *b) {
    uint64_t next;
    memcpy(&next, b->at, 8);
    b->bits |= __builtin_bswap64(next) >> b->count;
    b->at += (63 - b->count) >> 3;
    b->count |= 56;
}

INLINE void drop(Bits *b, int count) { b->bits <<= count, b->count -= count; }

/* Return the signed value that the lowest `size` bits of `bits` encode in JPEG. */
INLINE int extend(uint64_t bits, int size) {
    int value = (int)(bits & ((1u << size) - 1));
    return value < (1 << size) >> 1 ? value - (1 << size) + 1 : value;
}

/* Read the value of the next `size` bits. */
INLINE int take(Bits *b, int size) {
    if (!size) return 0;
    uint64_t value = b->bits >> (64 - size);
    drop(b, size);
    return extend(value, size);
}

/* Decode a symbol whose code is longer than `known` bits. Returns -1 if there is no such code. */
static int long_symbol(const Codes *codes, int known, Bits *b) {
    uint32_t code = (uint32_t)(b->bits >> (64 - LONGEST));
    int length = known + 1;
    while (length <= LONGEST && code >= codes->limit[length]) length++;
    if (length > LONGEST) return -1;
    drop(b, length);
    return codes->symbol[(codes->first[length] + (int)(code >> (LONGEST - length))) & 255];
}

/* Decode and dequantize the first coefficient of a block, from at most 27 bits. 0: damaged. */
INLINE int decode_first(Bits *b, const DcTable *dc, int quant, int *prediction, int16_t *block) {
    uint32_t entry = dc->fast[b->bits >> (64 - FAST_DC)];
    if (__builtin_expect(entry != 0, 1)) {
        *prediction += extend(b->bits >> (64 - (entry & 63)), entry >> 8);
        drop(b, entry & 63);
    } else {
        int size = long_symbol(&dc->codes, FAST_DC, b);
        if (size < 0) return 0;
        *prediction += take(b, size);
    }
    block[0] = (int16_t)(*prediction * quant);
    return 1;
}

/* Decode the coefficient at or after *k, from at most 26 bits; move *k past it, or on by
 * END_OF_BLOCK. 0: damaged. */
INLINE int decode_next(
    Bits *b, const AcTable *ac, const struct Place place[64], int *k, int16_t *block) {
    uint32_t entry = ac->fast[b->bits >> (64 - FAST_AC)];
    int value = (int32_t)entry >> 16;
    if (__builtin_expect(!(entry & MORE), 1)) {
        drop(b, entry & 63);
        *k += entry >> 8 & 255;
    } else if (value != LONGER) {
        drop(b, entry & 31);
        *k += entry >> 8 & 255;
        value = take(b, value);
    } else {
        int symbol = long_symbol(&ac->codes, FAST_AC, b);
        if (symbol < 0) return 0;
        *k += symbol ? symbol >> 4 : END_OF_BLOCK;
        value = take(b, symbol & 15);
    }
    if (*k > 63) return *k >= END_OF_BLOCK;
    struct Place p = place[(*k)++];
    block[p.at] = (int16_t)(value * p.quant);
    return 1;
}

/* ------------------------------------------------------------------------- Inverse DCT */
#define FIX(x) ((int)((x) * 8192 + 0.5)) /* 13 fraction bits */

/* Loeffler, Ligtenberg and Moschytz, ICASSP 1989. The constants are rounded to 13 bits like in
 * libjpeg, so every pixel equals its `islow`. Columns come first, keeping 2 fraction bits, then
 * rows. Pixels are written column-major, with AVX-512 row-major.
 *
 * idct8 does 8 transforms side by side, of 8 numbers each; `offset` is added to each result. */
INLINE void idct8(int32_t in[8][8], int offset, int shift, int32_t out[8][8]) {
    for (int lane = 0; lane < 8; lane++) {
        int32_t a0 = in[0][lane], a1 = in[1][lane], a2 = in[2][lane], a3 = in[3][lane];
        int32_t a4 = in[4][lane], a5 = in[5][lane], a6 = in[6][lane], a7 = in[7][lane];
        int32_t z = (a2 + a6) * FIX(0.541196100), flat = (a0 << 13) + offset;
        int32_t even2 = z - a6 * FIX(1.847759065), even3 = z + a2 * FIX(0.765366865);
        int32_t even0 = flat + (a4 << 13), even1 = flat - (a4 << 13);
        int32_t z1 = (a7 + a1) * -FIX(0.899976223), z2 = (a5 + a3) * -FIX(2.562915447);
        /* Truncated to 16 bits like in the AVX2 version. Only damaged files exceed them, and their
         * pixels must not depend on the processor. */
        int32_t z3 = (int16_t)(a7 + a3), z4 = (int16_t)(a5 + a1), z5 = (z3 + z4) * FIX(1.175875602);
        z3 = z5 - z3 * FIX(1.961570560), z4 = z5 - z4 * FIX(0.390180644);
        int32_t odd0 = a1 * FIX(1.501321110) + z1 + z4, odd1 = a3 * FIX(3.072711026) + z2 + z3;
        int32_t odd2 = a5 * FIX(2.053119869) + z2 + z4, odd3 = a7 * FIX(0.298631336) + z1 + z3;
        int32_t sum0 = even0 + even3, sum1 = even1 + even2;
        int32_t sum2 = even1 - even2, sum3 = even0 - even3;
        out[0][lane] = (sum0 + odd0) >> shift, out[7][lane] = (sum0 - odd0) >> shift;
        out[1][lane] = (sum1 + odd1) >> shift, out[6][lane] = (sum1 - odd1) >> shift;
        out[2][lane] = (sum2 + odd2) >> shift, out[5][lane] = (sum2 - odd2) >> shift;
        out[3][lane] = (sum3 + odd3) >> shift, out[4][lane] = (sum3 - odd3) >> shift;
    }
}

static int clip(int value, int low, int high) { return min(max(value, low), high); }

static void idct(const int16_t block[64], uint8_t *to, size_t step) {
    int32_t in[8][8], middle[8][8];
    for (int n = 0; n < 64; n++) in[n / 8][n % 8] = block[n];
    idct8(in, 1 << 10, 11, middle);
    for (int n = 0; n < 64; n++)
        in[n % 8][n / 8] = clip(middle[n / 8][n % 8], INT16_MIN, INT16_MAX);
    idct8(in, (1 << 17) + (128 << 18), 18, middle);
    for (int x = 0; x < 8; x++)
        for (int y = 0; y < 8; y++) to[x * step + y] = clip(middle[x][y], 0, 255);
}

/* Write a block whose only nonzero coefficient is the first: a third of all at quality 90. */
INLINE void flat_block(int first, uint8_t *to, size_t step) {
    uint8_t line[8];
    memset(line, clip(((first + 4) >> 3) + 128, 0, 255), 8);
    for (int n = 0; n < 8; n++) memcpy(to + n * step, line, 8);
}

/* Compute the pixels of all blocks of an MCU. `step`: bytes between the columns of their planes, in
 * transform_avx512 between rows. */
typedef void Transform(int16_t block[6][64], const int flat[6], int blocks, uint8_t *const to[6],
    const size_t step[6]);
#define TRANSFORM(name, idct) \
    static void name(int16_t block[6][64], const int flat[6], int blocks, uint8_t *const to[6], \
        const size_t step[6]) { \
        for (int n = 0; n < blocks; n++) \
            if (flat[n]) flat_block(block[n][0], to[n], step[n]); \
            else idct(block[n], to[n], step[n]); \
    }
TRANSFORM(transform_any, idct)

#if defined(X86)
typedef __m256i V;
#define VECTOR V
#define IDCT8 AVX2 INLINE void idct8_avx2
#define MM(operation) _mm256_##operation
#include "idct8.h"

/* Compute the pixels of a block, 4 columns a vector: rows 0 to 3 of each, then rows 4 to 7. */
AVX2 INLINE void idct_bytes_avx2(const int16_t block[64], V bytes[2]) {
    V in[4], out[8], row[4];
    for (int n = 0; n < 4; n++) /* columns 0 to 3 of both rows below, 4 to 7 above */
        in[n] = _mm256_permute4x64_epi64(_mm256_loadu_si256((const V *)block + n), 0xD8);
    idct8_avx2(in, 1 << 10, 11, out);
    for (int n = 0; n < 4; n++) /* row n below, row n + 4 above */
        row[n] = _mm256_permute4x64_epi64(_mm256_packs_epi32(out[n], out[n + 4]), 0xD8);
    V low[2] = {_mm256_unpacklo_epi16(row[0], row[1]), _mm256_unpacklo_epi16(row[2], row[3])};
    V high[2] = {_mm256_unpackhi_epi16(row[0], row[1]), _mm256_unpackhi_epi16(row[2], row[3])};
    in[0] = _mm256_unpacklo_epi32(low[0], low[1]), in[1] = _mm256_unpackhi_epi32(low[0], low[1]);
    in[2] = _mm256_unpacklo_epi32(high[0], high[1]);
    in[3] = _mm256_unpackhi_epi32(high[0], high[1]);
    idct8_avx2(in, (1 << 17) + (128 << 18), 18, out);
    for (int n = 0; n < 2; n++) {
        V *four = out + 4 * n, first = _mm256_packs_epi32(four[0], four[1]);
        bytes[n] = _mm256_packus_epi16(first, _mm256_packs_epi32(four[2], four[3]));
    }
}

AVX2 INLINE void idct_avx2(const int16_t block[64], uint8_t *to, size_t step) {
    V bytes[2];
    idct_bytes_avx2(block, bytes);
    for (int x = 0; x < 8; x += 4) {
        __m128i upper = _mm256_castsi256_si128(bytes[x / 4]);
        __m128i lower = _mm256_extracti128_si256(bytes[x / 4], 1);
        __m128i two[2] = {_mm_unpacklo_epi32(upper, lower), _mm_unpackhi_epi32(upper, lower)};
        for (int n = 0; n < 2; n++) {
            _mm_storel_epi64((__m128i *)(to + (x + 2 * n) * step), two[n]);
            _mm_storeh_pi((__m64 *)(to + (x + 2 * n + 1) * step), _mm_castsi128_ps(two[n]));
        }
    }
}

AVX2 TRANSFORM(transform_avx2, idct_avx2)

typedef __m512i W;
#define VECTOR W
#define IDCT8 AVX512 INLINE void idct8_avx512
#define MM(operation) _mm512_##operation
#include "idct8.h"

/* Where the pixels of a block, row by row, are in the two vectors of idct_bytes_avx2. */
static uint8_t rows_at[64];

/* Store the 8 rows of a block. */
AVX512 INLINE void store_block_avx512(W rows, uint8_t *to, size_t step) {
    const __m128i two[4] = {
        _mm512_castsi512_si128(rows), _mm512_extracti32x4_epi32(rows, 1),
        _mm512_extracti32x4_epi32(rows, 2), _mm512_extracti32x4_epi32(rows, 3),
    };
    for (int n = 0; n < 4; n++, to += 2 * step) {
        _mm_storel_epi64((__m128i *)to, two[n]);
        _mm_storeh_pi((__m64 *)(to + step), _mm_castsi128_ps(two[n]));
    }
}

/* Write a block row-major. */
AVX512 INLINE void idct_one_avx512(const int16_t block[64], uint8_t *to, size_t step) {
    V bytes[2];
    idct_bytes_avx2(block, bytes);
    W first = _mm512_castsi256_si512(bytes[0]), second = _mm512_castsi256_si512(bytes[1]);
    W place = _mm512_loadu_si512(rows_at);
    store_block_avx512(_mm512_permutex2var_epi8(first, place, second), to, step);
}

/* Write two blocks row-major, each in its half of the vectors: saves 11 of 122 us of a crop. */
AVX512 INLINE void idct_avx512(
    const int16_t *one, const int16_t *two, uint8_t *to[2], const size_t step[2]) {
    W in[4], out[8], row[4];
    for (int n = 0; n < 4; n++) {
        W pair = _mm512_castsi256_si512(_mm256_loadu_si256((const V *)one + n));
        pair = _mm512_inserti64x4(pair, _mm256_loadu_si256((const V *)two + n), 1);
        in[n] = _mm512_permutex_epi64(pair, 0xD8);
    }
    idct8_avx512(in, 1 << 10, 11, out);
    for (int n = 0; n < 4; n++)
        row[n] = _mm512_permutex_epi64(_mm512_packs_epi32(out[n], out[n + 4]), 0xD8);
    W low[2] = {_mm512_unpacklo_epi16(row[0], row[1]), _mm512_unpacklo_epi16(row[2], row[3])};
    W high[2] = {_mm512_unpackhi_epi16(row[0], row[1]), _mm512_unpackhi_epi16(row[2], row[3])};
    in[0] = _mm512_unpacklo_epi32(low[0], low[1]), in[1] = _mm512_unpackhi_epi32(low[0], low[1]);
    in[2] = _mm512_unpacklo_epi32(high[0], high[1]);
    in[3] = _mm512_unpackhi_epi32(high[0], high[1]);
    idct8_avx512(in, (1 << 17) + (128 << 18), 18, out);
    W bytes[2];
    for (int n = 0; n < 2; n++) {
        W *four = out + 4 * n, first = _mm512_packs_epi32(four[0], four[1]);
        bytes[n] = _mm512_packus_epi16(first, _mm512_packs_epi32(four[2], four[3]));
    }
    for (int n = 0; n < 2; n++) {
        /* The second block's pixels are 32 bytes further in both vectors. */
        W place = _mm512_add_epi8(_mm512_loadu_si512(rows_at), _mm512_set1_epi8((char)(32 * n)));
        store_block_avx512(_mm512_permutex2var_epi8(bytes[0], place, bytes[1]), to[n], step[n]);
    }
}

AVX512 static void transform_avx512(int16_t block[6][64], const int flat[6], int blocks,
    uint8_t *const to[6], const size_t step[6]) {
    int waiting = -1;
    for (int n = 0; n < blocks; n++) {
        if (flat[n]) flat_block(block[n][0], to[n], step[n]);
        else if (waiting < 0) waiting = n;
        else {
            uint8_t *both[2] = {to[waiting], to[n]};
            const size_t steps[2] = {step[waiting], step[n]};
            idct_avx512(block[waiting], block[n], both, steps);
            waiting = -1;
        }
    }
    if (waiting >= 0) idct_one_avx512(block[waiting], to[waiting], step[waiting]);
}
#endif

static Transform *transform = transform_any;
static int row_major; /* whether `transform` stores rows of pixels, not columns */

__attribute__((constructor)) static void choose_transform(void) {
#if defined(X86)
    __builtin_cpu_init();
    if (HAS_AVX2) transform = transform_avx2;
    if (HAS_AVX512) transform = transform_avx512, row_major = 1;
    for (int n = 0; n < 64; n++) {
        int y = n / 8, x = n % 8;
        rows_at[n] = x / 4 * 64 + y / 4 * 16 + x % 4 * 4 + y % 4;
    }
#endif
}

/* ------------------------------------------------------------------------- Segments */
/* A row of MCUs. All blocks of an MCU are decoded before the first is transformed: loading a vector
 * right after its parts were stored separately would stall. */
typedef struct {
    const uint8_t *at, *end; /* the remaining bytes of the row */
    uint8_t *clean; /* room for a segment without stuffed zeros */
    const uint8_t *clean_end;
    uint8_t *out[3]; /* where the first MCU of the span goes in each plane */
    int number, segment; /* of the row; the next segment in it */
    Span across; /* the MCUs that the crops need */
    int shown; /* the first MCU that is written */
    int mcu, until; /* the next MCU, and the last of the segment */
    int prediction[3];
    int flat[6]; /* per block: only the first coefficient is nonzero */
    int16_t block[6][64] __attribute__((aligned(64))); /* dequantized, row-major; reset after use */
} Row;

/* Copy the segment at `at` without stuffed zeros to *to and advance that, unless it is NULL.
 * Returns the segment's end: its restart marker or the end of the row. */
static const uint8_t *copy_segment(const uint8_t *at, const uint8_t *end, uint8_t **to) {
    for (const uint8_t *from = at;; from = at) {
        at = memchr(at, 0xFF, end - at);
        if (!at || at + 1 == end) at = end;
        int stuffed = at < end && at[1] == 0;
        size_t length = at - from + stuffed;
        if (*to) memcpy(*to, from, length), *to += length;
        if (!stuffed) return at;
        at += 2;
    }
}

/* Advance to the next segment of a row, and copy this one unless `to` is NULL. Returns its end, or
 * NULL if there is none with this number. */
static const uint8_t *next_segment(const Header *header, Row *row, uint8_t *to) {
    if (row->at >= row->end) return NULL;
    int marker = row->number * (header->mcus_across / header->interval) + row->segment++;
    const uint8_t *stop = copy_segment(row->at, row->end, &to);
    if (stop != row->end && stop[1] != 0xD0 + (marker & 7)) return NULL;
    if (to) row->clean_end = to, memset(to, 0, SLACK);
    row->at = stop == row->end ? stop : stop + 2;
    return stop;
}

/* What all rows of an image share: the blocks of an MCU, and where their pixels go. */
typedef struct {
    Header *header;
    Sample *sample;
    struct Block {
        const DcTable *dc;
        const AcTable *ac;
        const struct Place *place;
        int plane;
        size_t stride, offset; /* bytes between MCUs, and within one */
    } block[6];
    size_t step[6]; /* bytes between columns of pixels, or between rows, per block */
    size_t down[3]; /* bytes between rows of MCUs, per plane */
    uint8_t *out[3];
    const Boxes *boxes;
    int blocks;
    int next; /* the row that begins next */
} Decoding;

/* Write the pixels of an MCU, and clear its coefficients. */
static void finish_mcu(const Decoding *d, Row *row) {
    if (row->mcu >= row->shown) {
        uint8_t *to[6];
        for (int n = 0; n < d->blocks; n++) {
            const struct Block *b = &d->block[n];
            int mcu = row->mcu - d->header->across.from;
            to[n] = row->out[b->plane] + mcu * b->stride + b->offset;
        }
        transform(row->block, row->flat, d->blocks, to, d->step);
    }
    memset(row->block, 0, d->blocks * sizeof row->block[0]);
    row->mcu++;
}

/* Fail because of the bytes of a row, whose checksum says that they were written so. Declared cold,
 * so that the calls do not lie between what runs: 6 % of the decoding time. */
__attribute__((cold)) static int report_corrupt(
    Sample *sample, const Header *header, const Row *row) {
    return fail(sample->message, DAMAGED, "the segments at pixel row %d are corrupt",
        row->number * header->mcu_height);
}

/* Begin the next segment of a row. */
static int begin_segment(const Decoding *d, Row *row) {
    int interval = d->header->interval;
    row->mcu = row->segment * interval;
    row->until = min(row->mcu + interval - 1, row->across.to);
    memset(row->prediction, 0, sizeof row->prediction);
    if (!next_segment(d->header, row, row->clean)) return report_corrupt(d->sample, d->header, row);
    return OK;
}

/* Begin row `number` of MCUs, the first of the remaining ones, and verify its checksum. */
static int begin_row(Header *header, Sample *sample, int number, Row *row) {
    const uint8_t *entry = header->rows + 8 * number;
    row->at = header->data, row->end = header->data += u32(entry);
    row->number = number, row->segment = 0;
    if (densefeed_crc32(row->at, u32(entry), 0) == u32(entry + 4)) return OK;
    int first = number * header->mcu_height;
    return fail(sample->message, DAMAGED, "the bytes of pixel rows %d to %d do not match their"
        " checksum", first, first + header->mcu_height - 1);
}

/* The MCUs between two edges of a box, with a margin of two pixels, because half-resolution chroma
 * is interpolated between neighbors. */
static Span needed(int from, int to, int mcu, int mcus) {
    return (Span){max(from - 2, 0) / mcu, min((to + 1) / mcu, mcus - 1)};
}

static Span needed_across(const Header *header, Box box) {
    return needed(box.left, box.right, header->mcu_width, header->mcus_across);
}

static Span needed_down(const Header *header, Box box) {
    return needed(box.top, box.bottom, header->mcu_height, header->mcus_down);
}

/* The MCUs of row `number` that the boxes need; `to` is -1 if there are none. */
static Span needed_of_row(const Header *header, const Boxes *boxes, int number) {
    Span span = {header->mcus_across, -1};
    for (int n = 0; n < boxes->count; n++) {
        Span down = needed_down(header, boxes->box[n]);
        if (number < down.from || number > down.to) continue;
        Span across = needed_across(header, boxes->box[n]);
        span.from = min(span.from, across.from), span.to = max(span.to, across.to);
    }
    return span;
}

/* Begin the next row that a crop needs, at its first segment that is needed. After the last row
 * `until` is -1. */
static int take_row(Decoding *d, Row *row) {
    Header *header = d->header;
    row->until = row->across.to = -1;
    for (; d->next <= header->down.to; header->data += u32(header->rows + 8 * d->next++)) {
        row->across = needed_of_row(header, d->boxes, d->next);
        if (row->across.to >= 0) break;
    }
    if (row->across.to < 0) return OK;
    size_t above = d->next - header->down.from;
    row->shown = d->out[0] ? row->across.from : header->mcus_across;
    TRY(begin_row(header, d->sample, d->next++, row));
    for (int n = 0; n < header->components && d->out[n]; n++)
        row->out[n] = d->out[n] + above * d->down[n];
    while (row->segment < row->across.from / header->interval)
        if (!next_segment(header, row, NULL)) return report_corrupt(d->sample, d->header, row);
    return begin_segment(d, row);
}

/* ------------------------------------------------------------------------- Rows of MCUs */
/* The block of a row that is being decoded; the compiler keeps it in registers. */
typedef struct {
    Bits bits;
    const AcTable *ac;
    const struct Place *place;
    int16_t *block;
    int k, n; /* the next coefficient; the block's number in its MCU */
} Cursor;

/* Begin block `n` of an MCU; at least 29 bits remain. */
INLINE int begin_block(const Decoding *d, Row *row, Cursor *c, int n) {
    const struct Block *b = &d->block[n];
    c->n = n, c->k = 1, c->block = row->block[n], c->ac = b->ac, c->place = b->place;
    refill(&c->bits);
    if (decode_first(&c->bits, b->dc, b->place->quant, &row->prediction[b->plane], c->block))
        return OK;
    return report_corrupt(d->sample, d->header, row);
}

/* Returned instead of a status where there are no more rows. */
enum { DONE = -1 };

/* Begin the first block of a row's segment. */
INLINE int begin_blocks(const Decoding *d, Row *row, Cursor *c) {
    if (row->until < 0) return DONE;
    c->bits = (Bits){.at = row->clean};
    return begin_block(d, row, c, 0);
}

/* Begin what comes after the last coefficient of a block: a block, a segment or a row. */
INLINE int next_block(Decoding *d, Row *row, Cursor *c) {
    /* No bit from past the end of the segment may have been used. */
    if (c->bits.at - c->bits.count / 8 > row->clean_end)
        return report_corrupt(d->sample, d->header, row);
    row->flat[c->n] = c->k == 1 + END_OF_BLOCK;
    if (c->n + 1 < d->blocks) return begin_block(d, row, c, c->n + 1);
    finish_mcu(d, row);
    if (row->mcu <= row->until) return begin_block(d, row, c, 0);
    TRY(row->mcu <= row->across.to ? begin_segment(d, row) : take_row(d, row));
    return begin_blocks(d, row, c);
}

/* Decode a coefficient of a row, and begin what comes after its block; after the last row, do
 * `at_end`. */
#define STEP(c, row, at_end) \
    if (!decode_next(&c.bits, c.ac, c.place, &c.k, c.block)) \
        return report_corrupt(d->sample, d->header, row); \
    if (__builtin_expect(c.k > 63, 0)) { \
        int status = next_block(d, row, &c); \
        if (status == DONE) { at_end; } \
        if (status) return status; \
    }

/* Decode all rows of MCUs, two at once: a look-up waits for the previous one of its own row only.
 * One at a time takes 17 % longer, three save 2 %. */
FOR_EVERY_CPU static int decode_rows(Decoding *d, Row rows[2]) {
    Row *one = &rows[0], *two = &rows[1];
    Cursor a, b;
    TRY(take_row(d, one));
    TRY(begin_blocks(d, one, &a));
    TRY(take_row(d, two));
    int status = begin_blocks(d, two, &b);
    if (status > 0) return status;
    while (status == OK) {
        refill(&a.bits), refill(&b.bits);
        STEP(a, one, a = b; one = two; break)
        STEP(b, two, break)
        STEP(a, one, a = b; one = two; break)
        STEP(b, two, break)
    }
    for (;;) {
        refill(&a.bits);
        STEP(a, one, return OK)
        STEP(a, one, return OK)
    }
}

/* Open an image with our index: find the MCUs that `box` needs, and load the bytes of their rows.
 * `head`, at least the header, is already in memory, and may move to scratch->encoded. */
static int open_rows(Header *header, Sample *sample, Scratch *scratch, const uint8_t *head,
    size_t head_length, Box box) {
    TRY(open_header(header, head, head_length, sample->message));
    if (header->height != sample->height || header->width != sample->width)
        return fail(sample->message, DAMAGED, "it is %d x %d pixels, not %d x %d as recorded in the"
            " dataset", header->width, header->height, sample->width, sample->height);
    header->across = needed_across(header, box), header->down = needed_down(header, box);
    size_t start = header->length, length = 0, whole = header->length + 2;
    header->longest = 0;
    for (int row = 0; row < header->mcus_down; row++) {
        size_t bytes = u32(header->rows + 8 * row);
        if (row < header->down.from) start += bytes;
        else if (row <= header->down.to) {
            length += bytes;
            header->longest = bytes > header->longest ? bytes : header->longest;
        }
        whole += bytes;
    }
    if (whole != (size_t)sample->length)
        return fail(sample->message, DAMAGED, "its length does not match its index");
    if (sample->bytes) {
        header->data = sample->bytes + start;
        return OK;
    }
    /* The rows are read behind the head. Of the head only the index is still needed. */
    TRY(load(sample, scratch, start, head_length, length));
    header->rows = scratch->encoded + INDEX_AT + INDEX_FIXED;
    header->data = scratch->encoded + head_length;
    return OK;
}

/* 24 KB, too much for the stack of a thread. */
static __thread Header header;

/* Decode the MCUs that the boxes need into planes of the span of `header` at `out`, or only check
 * them if `step` is NULL. */
static int decode_span(Sample *sample, Scratch *scratch, const Boxes *boxes, uint8_t *const out[3],
    const size_t step[3]) {
    size_t room = header.longest + SLACK;
    if (!GROW(scratch, segments, 2 * room)) return NO_MEMORY;
    Decoding d = {
        .header = &header, .sample = sample, .boxes = boxes, .next = header.down.from,
    };
    for (int n = 0; n < header.components; n++) {
        const Component *c = &header.component[n];
        /* Bytes to the next pixel of a row, and to that of a column. */
        size_t line = step ? step[n] : 0, right = row_major ? 1 : line, down = row_major ? line : 1;
        d.out[n] = step ? out[n] : NULL;
        d.down[n] = c->v * 8 * down;
        for (int k = 0; k < c->v * c->h; k++, d.blocks++) {
            d.step[d.blocks] = line;
            d.block[d.blocks] = (struct Block){
                &header.dc[c->dc], &header.ac[c->ac], header.place[c->quant], n,
                .stride = c->h * 8 * right, .offset = 8 * (k % c->h * right + k / c->h * down),
            };
        }
    }
    Row rows[2] = {0};
    for (int n = 0; n < 2; n++) rows[n].clean = scratch->segments + n * room;
    return decode_rows(&d, rows);
}

/* Decode the planes of an image with our index, around all boxes. What no box needs is undefined. */
int segments_decode(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length,
    const Boxes *boxes, Picture *picture) {
    TRY(open_rows(&header, sample, scratch, head, head_length, boxes->around));
    Span across = header.across, down = header.down;
    size_t room = 0, step[3];
    int columns = across.to - across.from + 1, rows = down.to - down.from + 1;
    for (int n = 0; n < header.components; n++) {
        const Component *c = &header.component[n];
        size_t wide = columns * c->h * 8, tall = (size_t)rows * c->v * 8;
        step[n] = row_major ? wide : tall;
        room += wide * tall + AHEAD;
    }
    if (!GROW(scratch, planes, room)) return NO_MEMORY;
    uint8_t *memory = scratch->planes, *out[3];
    *picture = (Picture){
        .planes = header.components, .ycc = header.ycc, .scale = 1, .row_major = row_major,
        .height = header.height, .width = header.width,
    };
    for (int n = 0; n < header.components; n++) {
        const Component *c = &header.component[n];
        int ratio_x = header.component[0].h / c->h, ratio_y = header.component[0].v / c->v;
        picture->plane[n] = (Plane){
            .data = memory, .step = (int)step[n], .ratio_x = ratio_x, .ratio_y = ratio_y,
            .left = across.from * c->h * 8, .top = down.from * c->v * 8,
            .width = columns * c->h * 8, .height = rows * c->v * 8,
            .extent_x = (header.width + ratio_x - 1) / ratio_x,
            .extent_y = (header.height + ratio_y - 1) / ratio_y,
        };
        out[n] = memory;
        memory += (size_t)picture->plane[n].width * picture->plane[n].height + AHEAD;
    }
    return decode_span(sample, scratch, boxes, out, step);
}

/* Check the entropy coding of `box` of an image with our index. */
static int check_box(
    Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length, Box box) {
    const Boxes one = {.count = 1, .around = box, .box = {box}};
    TRY(open_rows(&header, sample, scratch, head, head_length, box));
    return decode_span(sample, scratch, &one, NULL, NULL);
}

/* Check the entropy coding of a crop, unless `cut` says that the whole image passed: the other
 * decoder would guess pixels where it is corrupt. Checksums say that the bytes are those that were
 * written, not that they are a JPEG. The whole image is checked once, not every crop of it. */
static int check_coding(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length,
    Box box, Cut *cut) {
    uint64_t found = (uint64_t)sample->length << 32 | u32(head + INDEX_AT + 10);
    if (found == cut->sound) return OK;
    cut->sound = 0;
    Box whole = {0, 0, sample->height, sample->width};
    if (check_box(sample, scratch, head, head_length, whole) == OK) {
        cut->sound = found;
        return OK;
    }
    /* The damage may lie outside the crop. */
    sample->message[0] = 0;
    return check_box(sample, scratch, sample->bytes ? head : scratch->encoded, head_length, box);
}

/* Write a shorter JPEG of the segments that `box` needs: the header without our index and with the
 * new size, then those segments with renumbered restart markers. It is not longer than the image:
 * of our index 8 bytes per row are left out, and a row may get one marker that it lacks. */
int segments_cut(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length,
    Box box, Cut *cut) {
    TRY(check_coding(sample, scratch, head, head_length, box, cut));
    if (!sample->bytes) head = scratch->encoded;
    TRY(open_rows(&header, sample, scratch, head, head_length, box));
    Span across = header.across, down = header.down;
    if (!sample->bytes) head = scratch->encoded;
    int first = across.from / header.interval, final = across.to / header.interval;
    int segment_width = header.interval * header.mcu_width;
    cut->left = first * segment_width, cut->top = down.from * header.mcu_height;
    cut->width = min((final + 1) * segment_width, header.width) - cut->left;
    cut->height = min((down.to + 1) * header.mcu_height, header.height) - cut->top;

    uint8_t *out = cut->bytes;
    *out++ = 0xFF, *out++ = 0xD8;
    for (size_t at = 4 + be16(head + 4), size; at < header.length; at += size, out += size) {
        memcpy(out, head + at, size = 2 + be16(head + at + 2));
        if (head[at + 1] != 0xC0) continue;
        out[5] = cut->height >> 8, out[6] = cut->height & 255;
        out[7] = cut->width >> 8, out[8] = cut->width & 255;
    }
    int marker = 0;
    for (int number = down.from; number <= down.to; number++) {
        Row row;
        TRY(begin_row(&header, sample, number, &row));
        for (int segment = 0; segment <= final; segment++) {
            const uint8_t *from = row.at, *stop = next_segment(&header, &row, NULL);
            if (!stop) return report_corrupt(sample, &header, &row);
            if (segment < first) continue;
            memcpy(out, from, stop - from), out += stop - from;
            *out++ = 0xFF, *out++ = 0xD0 + (marker++ & 7);
        }
    }
    /* The end marker replaces the last restart marker. */
    out[-1] = 0xD9;
    cut->length = out - cut->bytes;
    return OK;
}
