/* One sample: read the bytes that its crop needs, decode, resample, and read its score map. */
#include "native.h"
#include <math.h>
#include <string.h>
#include <sys/uio.h>

/* Bytes read first. They hold the header and index of nearly every image of up to 1,000 rows. */
#define HEAD 2048
#define MOST_PARTS 8 /* per preadv call */
#define MOST_GAP 64 /* bytes between two parts read by one call */
#define WINDOW_BYTES 16

/* Transpose the rows that a crop of raw RGB touches. The bytes of a column of one plane are then
 * together, and the same column of the next plane follows them. */
static int raw_decode(Sample *sample, Scratch *scratch, Box box, Picture *picture) {
    int rows = box.bottom - box.top, columns = box.right - box.left, height = sample->height;
    size_t row = 3 * (size_t)sample->width;
    if (sample->length != (int64_t)(row * height))
        return fail(sample->message, DAMAGED, "it has %lld bytes, not %d x %d x 3",
            (long long)sample->length, height, sample->width);
    if (!GROW(scratch, planes, 3 * (size_t)rows * columns + PADDING)) return NO_MEMORY;
    size_t at = box.top * row;
    if (!sample->bytes) TRY(load(sample, scratch, at, 0, rows * row));
    const uint8_t *from = sample->bytes ? sample->bytes + at : scratch->encoded;
    transpose_bytes(from + 3 * box.left, (int)row, scratch->planes, rows, rows, 3 * columns);
    *picture = (Picture){.planes = 3, .scale = 1, .height = height, .width = sample->width};
    for (int n = 0; n < 3; n++)
        picture->plane[n] = (Plane){
            .data = scratch->planes + n * rows, .step = 3 * rows, .left = box.left,
            .top = box.top, .width = columns, .height = rows, .ratio_x = 1, .ratio_y = 1,
            .extent_x = sample->width, .extent_y = height,
        };
    return OK;
}

/* Compute the pixels that the sample's crop touches. */
static int crop_box(Sample *sample, Box *box) {
    double top = sample->top, bottom = ceil(top + sample->box_height - 1e-9);
    double left = sample->left, right = ceil(left + sample->box_width - 1e-9);
    if (!(top >= 0 && left >= 0 && sample->box_height > 0 && sample->box_width > 0
            && bottom <= sample->height && right <= sample->width && floor(top) < bottom
            && floor(left) < right))
        return fail(sample->message, UNSUPPORTED, "the crop is not inside the image");
    *box = (Box){(int)top, (int)left, (int)bottom, (int)right};
    return OK;
}

/* Load the bytes of a JPEG: if it has our index, the `*header` bytes of its header, else all. */
static int open_jpeg(Sample *sample, Scratch *scratch, const uint8_t **bytes, size_t *header) {
    size_t whole = sample->length, have = sample->bytes || whole < HEAD ? whole : HEAD;
    if (!sample->bytes && scratch->head < have) TRY(load(sample, scratch, 0, 0, have));
    *bytes = sample->bytes ? sample->bytes : scratch->encoded;
    *header = segments_header(*bytes, have);
    size_t needed = *header ? *header : whole;
    if (needed > whole) return fail(sample->message, DAMAGED, "its header is longer than the file");
    if (needed <= have) return OK;
    TRY(load(sample, scratch, have, have, needed - have));
    *bytes = scratch->encoded;
    return OK;
}

/* Give a JPEG without our index to another decoder, as a whole and validated. */
static int give_whole(Sample *sample, Scratch *scratch, const uint8_t *bytes, Cut *cut) {
    /* Decoding the last row reads all entropy-coded data, and transforms no more than that row. */
    Box last = {sample->height - 1, 0, sample->height, sample->width};
    Picture picture;
    size_t length = sample->length;
    uint64_t found = (uint64_t)length << 32 | densefeed_crc32(bytes, length, 0);
    if (found != cut->sound) TRY(turbo_decode(sample, scratch, bytes, length, last, 1, &picture));
    cut->sound = found;
    if (sample->bytes) cut->bytes = (uint8_t *)bytes;
    else memcpy(cut->bytes, bytes, length);
    cut->length = length, cut->height = sample->height, cut->width = sample->width;
    return OK;
}

/* libjpeg's transform is fast at 1/2, 1/4 and 1/8; other fractions are slower than full size. It
 * drops frequencies that the resampling filter would partly keep, so at least 4 of its pixels must
 * remain per output pixel. In a sweep over photographs the worst crop's mean difference from
 * Pillow's was then 0.44 gray levels; with 3 it was 0.70, 2: 1.0, 1: 5.5. */
static int turbo_scale(const Sample *sample, const Batch *batch) {
    int scale = 1;
    while (scale < 8 && sample->box_height >= 8.0 * scale * batch->height
        && sample->box_width >= 8.0 * scale * batch->width)
        scale *= 2;
    return scale;
}

/* Compute the boxes of `count` crops of an image. */
static int find_boxes(Sample *samples, int count, Boxes *boxes) {
    TRY(check_size(samples->height, samples->width, samples->message));
    boxes->count = count;
    for (int n = 0; n < count; n++) {
        Box *box = &boxes->box[n], *around = &boxes->around;
        TRY(crop_box(&samples[n], box));
        if (!n) *around = *box;
        around->top = min(around->top, box->top), around->left = min(around->left, box->left);
        around->bottom = max(around->bottom, box->bottom);
        around->right = max(around->right, box->right);
    }
    return OK;
}

/* Decode the planes that `count` crops of one image need; if `cut` is not NULL, produce a valid
 * JPEG that contains the crop instead, for another decoder. The first sample gets the message. */
static int decode(Sample *sample, int count, Scratch *scratch, const Batch *batch, Cut *cut,
    Picture *picture) {
    const uint8_t *bytes;
    size_t header;
    Boxes boxes;
    TRY(find_boxes(sample, count, &boxes));
    Box box = boxes.around;
    if (sample->kind != JPEG) {
        if (cut) return OK;
        return (sample->kind == RAW ? raw_decode : planes_decode)(sample, scratch, box, picture);
    }
    TRY(open_jpeg(sample, scratch, &bytes, &header));
    if (cut && header) return segments_cut(sample, scratch, bytes, header, box, cut);
    if (cut) return give_whole(sample, scratch, bytes, cut);
    if (header) return segments_decode(sample, scratch, bytes, header, &boxes, picture);
    int scale = turbo_scale(sample, batch);
    Box small = {.top = box.top / scale, .left = box.left / scale};
    small.bottom = (box.bottom + scale - 1) / scale, small.right = (box.right + scale - 1) / scale;
    return turbo_decode(sample, scratch, bytes, sample->length, small, scale, picture);
}

/* Read the parts of row `n`. Neighbors in the file (all, in a .beton) are read by one call, and
 * with them the first `head` bytes of the image, if it follows the last part, as in a .beton: one
 * call of two costs 0.3 microseconds less. Read to one place and then divided they would cost 0.5
 * more. Sets scratch->head to what was read of the image. */
static int copy_parts(
    const Parts *parts, int n, Sample *sample, Scratch *scratch, size_t head) {
    uint32_t crc = 0;
    const int32_t *file = parts->file + (size_t)n * parts->count;
    const int64_t *offset = parts->offset + (size_t)n * parts->count;
    for (int p = 0, next; p < parts->count; p = next) {
        struct iovec run[2 * MOST_PARTS + 1], part[MOST_PARTS];
        uint8_t gap[MOST_GAP];
        int64_t end = offset[p];
        int pieces = 0, limit = min(parts->count, p + MOST_PARTS);
        for (next = p; next < limit && file[next] == file[p]; next++) {
            int64_t between = offset[next] - end, bytes = parts->bytes[next];
            if (between < 0 || between > MOST_GAP) break;
            if (between) run[pieces++] = (struct iovec){gap, between};
            part[next - p] = (struct iovec){parts->to[next] + n * bytes, bytes};
            run[pieces++] = part[next - p];
            end = offset[next] + bytes;
        }
        int follows = head && next == parts->count && sample->file == file[p]
            && sample->offset == end;
        if (follows) {
            if (!GROW(scratch, encoded, head + PADDING)) return NO_MEMORY;
            run[pieces++] = (struct iovec){scratch->encoded, head};
            end += head;
        }
        /* If the call was interrupted, hit the end of the file or failed, read the parts singly. */
        int whole = preadv(file[p], run, pieces, offset[p]) == end - offset[p];
        if (whole && follows) scratch->head = head;
        for (int k = p; k < next; k++) {
            struct iovec to = part[k - p];
            if (!whole)
                TRY(read_all(sample, scratch, file[k], offset[k], to.iov_base, to.iov_len));
            crc = densefeed_crc32(to.iov_base, to.iov_len, crc);
        }
    }
    if (parts->count && parts->crc && crc != parts->crc[n])
        return fail(sample->message, DAMAGED, "its score map does not match its checksum");
    return OK;
}

/* Read and unpack the packed score map of row `n`, and read its Window. */
static int copy_packed(const Parts *parts, int n, Sample *sample, Scratch *scratch) {
    const Packed *packed = parts->packed;
    int palette = packed->palette[n];
    size_t entries = (size_t)packed->cells * packed->top_k, bytes = map_bytes(packed, palette);
    const int32_t *file = parts->file + (size_t)n * 2;
    const int64_t *offset = parts->offset + (size_t)n * 2;
    uint8_t *const *to = parts->to, *window = to[3] + (size_t)n * WINDOW_BYTES;
    if (!GROW(scratch, encoded, bytes + 2 * (entries + 8))) return NO_MEMORY;
    uint8_t *row = scratch->encoded;
    TRY(read_all(sample, scratch, file[0], offset[0], row, bytes));
    TRY(read_all(sample, scratch, file[1], offset[1], window, WINDOW_BYTES));
    uint32_t crc = densefeed_crc32(window, WINDOW_BYTES, densefeed_crc32(row, bytes, 0));
    if (parts->crc && crc != parts->crc[n])
        return fail(sample->message, DAMAGED, "its score map does not match its checksum");
    return map_unpack(packed, palette, row, row + bytes, to[0] + n * 2 * entries,
        to[1] + n * 2 * entries, to[2] + (size_t)n * 2 * packed->cells, sample->message);
}

/* Read the score map of row `n`, and check its values. `head` is that of copy_parts. */
int sample_map(const Parts *parts, int n, Sample *sample, Scratch *scratch, size_t head) {
    TRY(parts->packed ? copy_packed(parts, n, sample, scratch)
                      : copy_parts(parts, n, sample, scratch, head));
    const Limits *limits = parts->limits;
    if (!limits) return OK;
    if (!GROW(scratch, seen, limits->classes * sizeof *scratch->seen)) return NO_MEMORY;
    uint8_t *const *to = parts->to;
    size_t cells = limits->cells, entries = n * cells * limits->top_k;
    return map_check(limits, scratch->seen, to[0] + 2 * entries, to[1] + 2 * entries,
        to[2] + 2 * n * cells, to[3] + (size_t)n * WINDOW_BYTES, sample->message);
}

/* Copy the score map of row `from`, which was read without a fault, to row `n`. Returns 0 if that
 * is another map. */
static int copy_map(const Parts *parts, int from, int n) {
    const Packed *packed = parts->packed;
    int ranges = packed ? 2 : parts->count;
    for (int p = 0; p < ranges; p++) {
        size_t a = (size_t)from * ranges + p, b = (size_t)n * ranges + p;
        if (parts->file[a] != parts->file[b]) return 0;
        if (parts->offset[a] != parts->offset[b]) return 0;
    }
    if (packed && packed->palette[from] != packed->palette[n]) return 0;
    if (parts->crc && parts->crc[from] != parts->crc[n]) return 0;
    size_t entries = packed ? 2 * (size_t)packed->cells * packed->top_k : 0;
    size_t cells = packed ? 2 * (size_t)packed->cells : 0;
    const size_t unpacked[4] = {entries, entries, cells, WINDOW_BYTES};
    for (int p = 0; p < (packed ? 4 : ranges); p++) {
        size_t bytes = packed ? unpacked[p] : (size_t)parts->bytes[p];
        memcpy(parts->to[p] + n * bytes, parts->to[p] + from * bytes, bytes);
    }
    return 1;
}

/* Count the samples from `first` on that are crops of one image and can share its planes: repeats
 * of an image lie next to each other in a batch. */
int samples_of_image(const Batch *batch, int first) {
    const Sample *one = &batch->samples[first];
    int most = batch->cuts ? 1 : min(batch->count - first, MOST_BOXES), count = 1;
    for (; count < most; count++) {
        const Sample *next = one + count;
        if (next->bytes != one->bytes || next->offset != one->offset || next->file != one->file
            || next->length != one->length || next->kind != one->kind
            || next->height != one->height || next->width != one->width
            || turbo_scale(next, batch) != turbo_scale(one, batch))
            break;
    }
    return count;
}

/* Process sample `n` of a batch, from its files to its pixels and score map; sets its status. If
 * `shared` is not NULL, it holds the planes of samples `first` to `n`. */
static void sample_decode(
    const Batch *batch, int first, int n, Scratch *scratch, const Picture *shared) {
    Sample *sample = &batch->samples[n];
    Cut *cut = batch->cuts ? &batch->cuts[n] : NULL;
    Picture own;
    const Picture *picture = shared ? shared : &own;
    double at[4] = {microseconds()};
    /* All of it: an earlier message would remain behind a zero. */
    memset(sample->message, 0, sizeof sample->message);
    /* Score maps come first: they are then complete if the image is left to the caller. */
    sample->status = OK;
    scratch->head = 0;
    /* Planes that are shared may lie in the memory that the head is read to. */
    int reads = sample->kind == JPEG && !sample->bytes && !shared && sample->length > 0;
    size_t head = !reads ? 0 : sample->length < HEAD ? (size_t)sample->length : HEAD;
    int row = batch->first_row + n, copied = n > first && batch->samples[first].status == OK;
    if (!copied || !copy_map(&batch->parts, batch->first_row + first, row))
        sample->status = sample_map(&batch->parts, row, sample, scratch, head);
    at[1] = microseconds();
    if (sample->status == OK && sample->length <= 0)
        sample->status = fail(sample->message, UNREADABLE, "it is empty");
    scratch->reading = 0;
    if (cut) cut->length = cut->top = cut->left = 0;
    if (sample->status == OK && !shared)
        sample->status = decode(sample, 1, scratch, batch, cut, &own);
    at[2] = microseconds();
    if (sample->status == OK && !cut) sample->status = resample(batch, n, scratch, picture);
    at[3] = microseconds();
    if (sample->status == NO_MEMORY) fail(sample->message, NO_MEMORY, "out of memory");
    sample->took[LABELS] = at[1] - at[0], sample->took[READ] = scratch->reading;
    sample->took[DECODE] = shared ? 0 : at[2] - at[1] - scratch->reading;
    sample->took[RESAMPLE] = at[3] - at[2];
}

/* Process `count` samples of one image, and decode together what their crops need. If that fails,
 * each is decoded alone: damage outside a crop must not matter to it. */
void samples_decode(const Batch *batch, int first, int count, Scratch *scratch) {
    Sample *sample = &batch->samples[first];
    Picture picture;
    double begin = microseconds();
    scratch->reading = 0, scratch->head = 0;
    int together = count > 1 && sample->length > 0
        && decode(sample, count, scratch, batch, NULL, &picture) == OK;
    double reading = scratch->reading, decoding = microseconds() - begin - reading;
    for (int n = first; n < first + count; n++)
        sample_decode(batch, first, n, scratch, together ? &picture : NULL);
    if (together) sample->took[READ] = (float)reading, sample->took[DECODE] = (float)decoding;
}
