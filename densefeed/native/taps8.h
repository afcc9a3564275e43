/* The taps of 8 outputs at once. Included for each instruction set, because GCC splits such vectors
 * before it makes the versions of FOR_EVERY_CPU: INLINED(x) and DEFINE(x) begin the definition of
 * function x, CALL(x) is its name. */

#define EITHER(condition, yes, no) (((yes) & (condition)) | ((no) & ~(condition)))

/* `filter_weight` of input k of each output, `offset` + k pixels from its center; 0 where k is not
 * one of its `count` inputs. */
INLINED(Floats, filter_weights)(int filter, Floats offset, Ints count, Ints k, float inverse) {
    Floats at = (offset + __builtin_convertvector(k, Floats)) * inverse;
    Floats x = (Floats)((Ints)at & INT32_MAX), weight = 1.0f - x;
    Ints inside = (k >= 0) & (k < count);
    if (filter == BICUBIC) {
        Floats near = (1.5f * x - 2.5f) * x * x + 1.0f;
        Floats far = ((-0.5f * x + 2.5f) * x - 4.0f) * x + 2.0f;
        weight = (Floats)EITHER(x < 1.0f, (Ints)near, (Ints)far);
        return (Floats)((Ints)weight & inside & (x < 2.0f));
    }
    return (Floats)((Ints)weight & inside & (x < 1.0f));
}

INLINED(int, taps_of)(const Span *span, int filter, Axis *axis, float *room, int i) {
    Ints start, end;
    Floats offset;
    /* In two halves: GCC splits vectors of 8 doubles to single ones where they have no instructions. */
    for (int half = 0; half < 2; half++) {
        const Ints4 order = {0, 1, 2, 3};
        int at = i + 4 * half;
        Ints4 output = span->mirror ? span->size - 1 - at - order : at + order, low, high;
        Doubles4 center = span->from
            + (__builtin_convertvector(output, Doubles4) + 0.5) * span->scale;
        high = __builtin_convertvector(center + span->support + 0.5, Ints4);
        low = __builtin_convertvector(center - span->support + 0.5, Ints4);
        high = EITHER(high < span->high, high, span->high - (Ints4){0});
        low = EITHER(low > span->low, low, span->low - (Ints4){0});
        low = EITHER(low < high - 1, low, high - 1);
        Floats4 from = __builtin_convertvector(
            __builtin_convertvector(low, Doubles4) + 0.5 - center, Floats4);
        memcpy((int *)&start + 4 * half, &low, sizeof low);
        memcpy((int *)&end + 4 * half, &high, sizeof high);
        memcpy((float *)&offset + 4 * half, &from, sizeof from);
    }
    Ints count = end - start, first = start, last = end - 1;
    if (span->smooth) {
        first = (start - 1) >> 1, last = end >> 1;
        for (int n = 0; n < 8; n++)
            if (first[n] < 0 || last[n] > span->extent - 1) return 0;
    }
    int taps = 0;
    for (int n = 0; n < 8; n++) taps = max(taps, last[n] - first[n] + 1);
    Floats total = {0}, before = {0}, weight;
    /* Of a smooth plane, a tap has two inputs and a part of their neighbors. */
    Ints k = span->smooth ? 2 * first - start : (Ints){0};
    Floats here = CALL(filter_weights)(filter, offset, count, k, span->inverse);
    for (int tap = 0; tap < taps; tap++) {
        total += here, k += 1;
        Floats next = CALL(filter_weights)(filter, offset, count, k, span->inverse);
        weight = here;
        if (span->smooth) {
            total += next, k += 1;
            Floats after = CALL(filter_weights)(filter, offset, count, k, span->inverse);
            weight = 0.75f * (here + next) + 0.25f * (before + after);
            before = next, next = after;
        }
        here = next;
        memcpy(room + 8 * tap, &weight, sizeof weight);
    }
    for (int n = 0; n < 8; n++)
        if (total[n] == 0) return 0;
    int one = filter == BICUBIC ? ONE_CUBIC : ONE;
    Floats unit = (float)one / total;
    Ints sum = {0}, most = INT32_MIN - (Ints){0}, largest = {0}, number = {0}, rounded;
    for (int tap = 0; tap < taps; tap++, number += 1) {
        memcpy(&weight, room + 8 * tap, sizeof weight);
        weight *= unit;
        /* Half a unit with the weight's sign. */
        Floats half = (Floats)(((Ints)weight & INT32_MIN) | 0x3F000000);
        rounded = __builtin_convertvector(weight + half, Ints);
        Ints more = rounded > most;
        sum += rounded;
        most = EITHER(more, rounded, most), largest = EITHER(more, number, largest);
        memcpy(room + 8 * tap, &rounded, sizeof rounded);
    }
    int16_t *to = axis->weight + i;
    Ints rest = one - sum;
    number = (Ints){0};
    /* Behind an output's own taps there is room, for zeros. */
    for (int tap = 0; tap < taps; tap++, to += axis->step, number += 1) {
        memcpy(&rounded, room + 8 * tap, sizeof rounded);
        rounded += rest & (largest == number);
        Half eight = __builtin_convertvector(rounded, Half);
        memcpy(to, &eight, sizeof eight);
    }
    count = last - first + 1;
    memcpy(axis->start + i, &first, sizeof first);
    memcpy(axis->count + i, &count, sizeof count);
    return 1;
}

/* The filter as a constant: the compiler leaves out the other one. */
DEFINE(int, set_eight_taps)(const Span *span, Axis *axis, float *room, int i) {
    return span->filter == BICUBIC ? CALL(taps_of)(span, BICUBIC, axis, room, i)
                                   : CALL(taps_of)(span, BILINEAR, axis, room, i);
}
#undef EITHER
#undef INLINED
#undef DEFINE
#undef CALL
