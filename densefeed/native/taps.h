/* The taps of OUTPUTS outputs at once. Included for each instruction set, because GCC splits such
 * vectors before it makes the versions of FOR_EVERY_CPU: INLINED(x) and DEFINE(x) begin the
 * definition of function x, CALL(x) is the name of x. */

/* Numbers of neighboring outputs, of all and of half of them. A comparison of two is -1 where it
 * holds, else 0. */
typedef float CALL(Floats) __attribute__((vector_size(4 * OUTPUTS)));
typedef int32_t CALL(Ints) __attribute__((vector_size(4 * OUTPUTS)));
typedef int16_t CALL(Shorts) __attribute__((vector_size(2 * OUTPUTS)));
typedef float CALL(HalfFloats) __attribute__((vector_size(2 * OUTPUTS)));
typedef int32_t CALL(HalfInts) __attribute__((vector_size(2 * OUTPUTS)));
typedef double CALL(HalfDoubles) __attribute__((vector_size(4 * OUTPUTS)));
#define Floats CALL(Floats)
#define Ints CALL(Ints)
#define Shorts CALL(Shorts)
#define HalfFloats CALL(HalfFloats)
#define HalfInts CALL(HalfInts)
#define HalfDoubles CALL(HalfDoubles)

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
    /* In two halves: GCC splits vectors of doubles that are longer than the processor's. */
    for (int half = 0; half < 2; half++) {
        HalfInts order;
        for (int n = 0; n < OUTPUTS / 2; n++) order[n] = n;
        int at = i + OUTPUTS / 2 * half;
        HalfInts output = span->mirror ? span->size - 1 - at - order : at + order, low, high;
        HalfDoubles center = span->from
            + (__builtin_convertvector(output, HalfDoubles) + 0.5) * span->scale;
        high = __builtin_convertvector(center + span->support + 0.5, HalfInts);
        low = __builtin_convertvector(center - span->support + 0.5, HalfInts);
        high = EITHER(high < span->high, high, span->high - (HalfInts){0});
        low = EITHER(low > span->low, low, span->low - (HalfInts){0});
        low = EITHER(low < high - 1, low, high - 1);
        HalfFloats from = __builtin_convertvector(
            __builtin_convertvector(low, HalfDoubles) + 0.5 - center, HalfFloats);
        memcpy((int *)&start + OUTPUTS / 2 * half, &low, sizeof low);
        memcpy((int *)&end + OUTPUTS / 2 * half, &high, sizeof high);
        memcpy((float *)&offset + OUTPUTS / 2 * half, &from, sizeof from);
    }
    Ints count = end - start, first = start, last = end - 1;
    if (span->smooth) {
        first = (start - 1) >> 1, last = end >> 1;
        /* They are monotonic. */
        const int end = OUTPUTS - 1;
        if (min(first[0], first[end]) < 0 || max(last[0], last[end]) > span->extent - 1) return 0;
    }
    int taps = 0;
    for (int n = 0; n < OUTPUTS; n++) taps = max(taps, last[n] - first[n] + 1);
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
        memcpy(room + OUTPUTS * tap, &weight, sizeof weight);
    }
    Ints none = total == 0;
    int any = 0;
    for (int n = 0; n < OUTPUTS; n++) any |= none[n];
    if (any) return 0;
    int one = filter == BICUBIC ? ONE_CUBIC : ONE;
    Floats unit = (float)one / total;
    Ints sum = {0}, most = INT32_MIN - (Ints){0}, largest = {0}, number = {0}, rounded;
    for (int tap = 0; tap < taps; tap++, number += 1) {
        memcpy(&weight, room + OUTPUTS * tap, sizeof weight);
        weight *= unit;
        /* Half a unit with the weight's sign. */
        Floats half = (Floats)(((Ints)weight & INT32_MIN) | 0x3F000000);
        rounded = __builtin_convertvector(weight + half, Ints);
        Ints more = rounded > most;
        sum += rounded;
        most = EITHER(more, rounded, most), largest = EITHER(more, number, largest);
        memcpy(room + OUTPUTS * tap, &rounded, sizeof rounded);
    }
    int16_t *to = axis->weight + i;
    Ints rest = one - sum;
    number = (Ints){0};
    /* Behind an output's own taps there is room, for zeros. */
    for (int tap = 0; tap < taps; tap++, to += axis->step, number += 1) {
        memcpy(&rounded, room + OUTPUTS * tap, sizeof rounded);
        rounded += rest & (largest == number);
        Shorts weights = __builtin_convertvector(rounded, Shorts);
        memcpy(to, &weights, sizeof weights);
    }
    count = last - first + 1;
    memcpy(axis->start + i, &first, sizeof first);
    memcpy(axis->count + i, &count, sizeof count);
    return 1;
}

/* The filter as a constant: the compiler leaves out the other one. */
DEFINE(int, set_taps)(const Span *span, Axis *axis, float *room, int i) {
    return span->filter == BICUBIC ? CALL(taps_of)(span, BICUBIC, axis, room, i)
                                   : CALL(taps_of)(span, BILINEAR, axis, room, i);
}
#undef EITHER
#undef Floats
#undef Ints
#undef Shorts
#undef HalfFloats
#undef HalfInts
#undef HalfDoubles
#undef OUTPUTS
#undef INLINED
#undef DEFINE
#undef CALL
