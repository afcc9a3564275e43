/* Both halves of resampling with their sums in registers, bit for bit those of the loops in
 * resample.c. Included for each length of vectors: VECTOR is their type, of COUNT numbers,
 * INLINED(x) and DEFINE(x) begin the definition of function x, CALL(x) is its name, and MM(x) is the
 * intrinsic x. */

/* Add the product of the numbers at `from` and a weight. */
INLINED(VECTOR, add_product)(VECTOR sum, const int16_t *from, VECTOR weight) {
    return MM(add_epi16)(sum, MM(mulhrs_epi16)(*(const VECTOR *)from, weight));
}

/* Eight outputs are summed, transposed and stored at once. */
INLINED(void, sum_strip)(const int16_t *const input[STRIP], size_t tall, const Axis *axis,
    int first, int outputs, int filter, int rows, int16_t *to, size_t across, int taps) {
    VECTOR weight[STRIP / 8][MOST_TAPS][8] __attribute__((aligned(ALIGNED)));
    int last = first + outputs - 1;
    for (int x = 0; x < outputs; x += 8)
        for (int k = 0; k < taps; k++)
            for (int n = 0; n < 8; n++)
                weight[x / 8][k][n] = MM(set1_epi16)(
                    axis->weight[k * axis->step + min(first + x + n, last)]);
    for (int y = 0; y < rows; y += COUNT, to += COUNT * across)
        for (int x = 0; x < outputs; x += 8) {
            VECTOR m[8], mixed[8];
            for (int n = 0; n < 8; n++)
                m[n] = MM(mulhrs_epi16)(*(const VECTOR *)(input[x + n] + y), weight[x / 8][0][n]);
            for (int k = 1; k < taps; k++)
                for (int n = 0; n < 8; n++)
                    m[n] = CALL(add_product)(m[n], input[x + n] + k * tall + y, weight[x / 8][k][n]);
            if (filter == BICUBIC)
                for (int n = 0; n < 8; n++) m[n] = MM(add_epi16)(m[n], m[n]);
            for (int round = 0; round < 3; round++) {
                for (int n = 0; n < 4; n++) {
                    mixed[2 * n] = MM(unpacklo_epi16)(m[n], m[n + 4]);
                    mixed[2 * n + 1] = MM(unpackhi_epi16)(m[n], m[n + 4]);
                }
                for (int n = 0; n < 8; n++) m[n] = mixed[n];
            }
            /* Row n is now in the first 16 bytes of m[n], row n + 8 in the second. */
            for (int n = 0; n < 8; n++) CALL(store_rows)(m[n], to + n * across + x, 8 * across);
        }
}

DEFINE(void, shrink_strip)(const int16_t *const input[STRIP], size_t tall, const Axis *axis,
    int first, int outputs, int filter, int rows, int16_t *to, size_t across) {
#define SUM(taps) CALL(sum_strip)(input, tall, axis, first, outputs, filter, rows, to, across, taps)
    switch (axis->most) {
    case 2: SUM(2); break;    case 3: SUM(3); break;
    case 4: SUM(4); break;    default: SUM(axis->most);
    }
#undef SUM
}

/* Sum COUNT outputs of plane n, whose first inputs are at `from`; limit a cubic's like `clamp`. */
INLINED(VECTOR, sum_column)(const int16_t *from, size_t across, const VECTOR *weight, int n,
    int filter, int taps) {
    VECTOR sum = MM(mulhrs_epi16)(*(const VECTOR *)from, weight[0]);
    for (int k = 1; k < taps; k++)
        sum = CALL(add_product)(sum, from + k * across, weight[k]);
    if (filter != BICUBIC) return sum;
    sum = MM(add_epi16)(sum, sum);
    sum = MM(max_epi16)(sum, MM(set1_epi16)(n ? 0 : LEAST_LUMA));
    return MM(min_epi16)(sum, MM(set1_epi16)(n ? MOST_CHROMA : MOST_LUMA));
}

INLINED(void, sum_row)(const int16_t *const from[3], size_t across, const Axis axis[3], int i,
    int filter, int width, uint8_t *pixels, int luma, int chroma) {
    VECTOR weight[3][MOST_TAPS] __attribute__((aligned(ALIGNED)));
    for (int n = 0; n < 3; n++)
        for (int k = 0; k < (n ? chroma : luma); k++)
            weight[n][k] = MM(set1_epi16)(axis[n].weight[k * axis[n].step + i]);
    const CALL(Colors) colors = CALL(load_colors)();
    const int16_t *y = from[0], *cb = from[1], *cr = from[2];
    for (size_t ahead = 6 * (size_t)width; width > 0; width -= LANES, pixels += 3 * LANES) {
        /* Two rows ahead: 51 instead of 54 us. */
        __builtin_prefetch(pixels + ahead, 1);
        __builtin_prefetch(pixels + ahead + 64, 1);
        VECTOR rgb[LANES / COUNT][3];
        for (int part = 0; part < LANES / COUNT; part++, y += COUNT, cb += COUNT, cr += COUNT) {
            const VECTOR ycc[3] = {
                CALL(sum_column)(y, across, weight[0], 0, filter, luma),
                CALL(sum_column)(cb, across, weight[1], 1, filter, chroma),
                CALL(sum_column)(cr, across, weight[2], 2, filter, chroma),
            };
            CALL(to_colors)(&colors, ycc, rgb[part]);
        }
        CALL(store_pixels)(rgb, min(width, LANES), pixels);
    }
}

DEFINE(void, shrink_row)(const int16_t *const from[3], size_t across, const Axis axis[3], int i,
    int filter, int width, uint8_t *pixels) {
    int luma = axis[0].count[i], chroma = max(axis[1].count[i], axis[2].count[i]);
#define SUM(luma, chroma) \
    CALL(sum_row)(from, across, axis, i, BILINEAR, width, pixels, luma, chroma)
    if (filter == BICUBIC)
        CALL(sum_row)(from, across, axis, i, BICUBIC, width, pixels, luma, chroma);
    else switch (8 * luma + chroma) {
    case 8 * 2 + 2: SUM(2, 2); break;    case 8 * 2 + 3: SUM(2, 3); break;
    case 8 * 3 + 2: SUM(3, 2); break;    case 8 * 3 + 3: SUM(3, 3); break;
    case 8 * 4 + 3: SUM(4, 3); break;    case 8 * 5 + 3: SUM(5, 3); break;
    case 8 * 4 + 4: SUM(4, 4); break;    default: SUM(luma, chroma);
    }
#undef SUM
}
#undef VECTOR
#undef COUNT
#undef INLINED
#undef DEFINE
#undef CALL
#undef MM
