/* One sample: read what its crop needs, decode it by whichever way its bytes allow, resample it, and fetch its score map. */
#include "native.h"
#include <math.h>
#include <string.h>
#include <sys/uio.h>

#define HEAD 2048 /* bytes read first: header and index of nearly every image of up to 1,000 rows */
#define MOST_PARTS 8 /* read by one call */
#define WINDOW_BYTES 16
#define MOST_GAP 64 /* bytes between two such parts */

/* Three planes of the rows that a crop of raw RGB touches. */
static int raw_decode(Sample *sample, Scratch *scratch, Box box, Picture *picture)
{
    int rows = box.bottom - box.top, columns = box.right - box.left;
    size_t row = 3 * (size_t)sample->width, plane = (size_t)rows * columns + PADDING;
    if (sample->length != (int64_t)(row * sample->height))
        return fail(sample->message, DAMAGED, "it has %lld bytes, not %d x %d x 3", (long long)sample->length, sample->height, sample->width);
    if (!grow((void **)&scratch->planes, &scratch->planes_room, 3 * plane + 3 * (size_t)columns * 8)) return NO_MEMORY;
    const uint8_t *from = sample->bytes ? sample->bytes + box.top * row : scratch->encoded;
    if (!sample->bytes) {
        if (!grow((void **)&scratch->encoded, &scratch->encoded_room, rows * row)) return NO_MEMORY;
        int status = read_all(scratch, sample->file, sample->offset + box.top * row, scratch->encoded, rows * row, sample->message);
        if (status) return status;
        from = scratch->encoded;
    }
    *picture = (Picture){.planes = 3, .ycc = 0, .scale = 1, .height = sample->height, .width = sample->width};
    uint8_t *strip = scratch->planes + 3 * plane;
    for (int n = 0; n < 3; n++)
        picture->plane[n] = (Plane){
            .data = scratch->planes + n * plane, .step = rows, .left = box.left, .top = box.top, .width = columns, .height = rows,
            .ratio_x = 1, .ratio_y = 1, .extent_x = sample->width, .extent_y = sample->height,
        };
    for (int y = 0; y < rows; y += 8) {
        int tall = rows - y < 8 ? rows - y : 8;
        for (int k = 0; k < tall; k++) {
            const uint8_t *rgb = from + (y + k) * row + 3 * (size_t)box.left;
            uint8_t *red = strip + (size_t)k * columns, *green = red + 8 * (size_t)columns, *blue = green + 8 * (size_t)columns;
            for (int x = 0; x < columns; x++) red[x] = rgb[3 * x], green[x] = rgb[3 * x + 1], blue[x] = rgb[3 * x + 2];
        }
        for (int n = 0; n < 3; n++)
            transpose_bytes(strip + n * 8 * (size_t)columns, columns, picture->plane[n].data + y, rows, tall, columns);
    }
    return OK;
}

/* The pixels that the sample's crop touches. */
static int box_of(Sample *sample, Box *box)
{
    double bottom = ceil(sample->top + sample->box_height - 1e-9), right = ceil(sample->left + sample->box_width - 1e-9);
    if (!(sample->top >= 0 && sample->left >= 0 && sample->box_height > 0 && sample->box_width > 0 && bottom <= sample->height
          && right <= sample->width && floor(sample->top) < bottom && floor(sample->left) < right))
        return fail(sample->message, UNSUPPORTED, "the crop is not inside it");
    *box = (Box){(int)sample->top, (int)sample->left, (int)bottom, (int)right};
    return OK;
}

/* Have the bytes of a JPEG in memory: its header if it has our index, of `*header` bytes, else all of it. */
static int open_jpeg(Sample *sample, Scratch *scratch, const uint8_t **bytes, size_t *header)
{
    int status;
    size_t have = sample->length;
    *bytes = sample->bytes;
    if (!sample->bytes) {
        if (have > HEAD) have = HEAD;
        if (!grow((void **)&scratch->encoded, &scratch->encoded_room, have + PADDING)) return NO_MEMORY;
        if ((status = read_all(scratch, sample->file, sample->offset, scratch->encoded, have, sample->message))) return status;
        *bytes = scratch->encoded;
    }
    *header = segments_header(*bytes, have);
    size_t needed = *header ? *header : (size_t)sample->length;
    if (needed > (size_t)sample->length) return fail(sample->message, DAMAGED, "its header is longer than the file");
    if (needed > have) {
        if (!grow((void **)&scratch->encoded, &scratch->encoded_room, needed + PADDING)) return NO_MEMORY;
        status = read_all(scratch, sample->file, sample->offset + have, scratch->encoded + have, needed - have, sample->message);
        if (status) return status;
        *bytes = scratch->encoded;
    }
    return OK;
}

/* A sound JPEG that shows the sample's crop, for another decoder. */
static int cut_out(Sample *sample, Scratch *scratch, Cut *cut)
{
    const uint8_t *bytes;
    size_t header;
    Box box;
    Picture picture;
    int status = box_of(sample, &box);
    if (status || sample->kind == RAW || (status = open_jpeg(sample, scratch, &bytes, &header))) return status;
    if (header) return segments_cut(sample, scratch, bytes, header, box, cut);
    /* The last row's pixels need all of the code to be read, and no more of it to be transformed. */
    Box last = {sample->height - 1, 0, sample->height, sample->width};
    uint64_t these = (uint64_t)sample->length << 32 | densefeed_crc32(bytes, sample->length, 0);
    if (these != cut->sound && (status = turbo_decode(sample, scratch, bytes, sample->length, last, 1, &picture))) return status;
    cut->sound = these;
    if (sample->bytes) cut->bytes = (uint8_t *)bytes;
    else memcpy(cut->bytes, bytes, sample->length);
    cut->length = sample->length, cut->height = sample->height, cut->width = sample->width;
    return OK;
}

/* The planes of what the sample's crop touches. */
static int decode(Sample *sample, Scratch *scratch, int size, Picture *picture)
{
    const uint8_t *bytes;
    size_t header;
    Box box;
    int status = box_of(sample, &box);
    if (status) return status;
    if (sample->kind == RAW) return raw_decode(sample, scratch, box, picture);
    if ((status = open_jpeg(sample, scratch, &bytes, &header))) return status;
    if (header) return segments_decode(sample, scratch, bytes, header, box, picture);
    /* libjpeg's transform at 1/2, 1/4 and 1/8 is fast; other fractions are slower than the whole. It drops frequencies that the
     * resampling filter would keep a little of, so 4 of its pixels must be left for each of the output's: in a sweep over photographs the
     * worst crop was then 0.44 gray levels from Pillow's on average; with 3 it was 0.70, with 2 1.0, with 1 5.5. */
    int scale = 1;
    while (scale < 8 && sample->box_height >= 8.0 * scale * size && sample->box_width >= 8.0 * scale * size) scale *= 2;
    Box small = {box.top / scale, box.left / scale, (box.bottom + scale - 1) / scale, (box.right + scale - 1) / scale};
    return turbo_decode(sample, scratch, bytes, sample->length, small, scale, picture);
}

/* The parts of sample `n`. Neighbors in the file are read by one call: in a .beton that is all of them. */
static int copy_parts(const Batch *batch, int n, Sample *sample, Scratch *scratch)
{
    uint32_t crc = 0;
    const int32_t *file = batch->part_file + (size_t)n * batch->parts;
    const int64_t *offset = batch->part_offset + (size_t)n * batch->parts;
    for (int p = 0, next; p < batch->parts; p = next) {
        struct iovec run[2 * MOST_PARTS];
        uint8_t gap[MOST_GAP];
        int64_t end = offset[p];
        int pieces = 0;
        for (next = p; next < batch->parts && next < p + MOST_PARTS && file[next] == file[p]; next++) {
            int64_t between = offset[next] - end;
            if (between < 0 || between > MOST_GAP) break;
            if (between) run[pieces++] = (struct iovec){gap, between};
            run[pieces++] = (struct iovec){batch->part_to[next] + n * batch->part_bytes[next], batch->part_bytes[next]};
            end = offset[next] + batch->part_bytes[next];
        }
        if (preadv(file[p], run, pieces, offset[p]) != end - offset[p]) /* interrupted, cut or at fault: one by one */
            for (int k = p; k < next; k++) {
                int status = read_all(scratch, file[k], offset[k], batch->part_to[k] + n * batch->part_bytes[k], batch->part_bytes[k], sample->message);
                if (status) return status;
            }
        for (int k = p; k < next; k++) crc = densefeed_crc32(batch->part_to[k] + n * batch->part_bytes[k], batch->part_bytes[k], crc);
    }
    if (batch->parts && batch->part_crc && crc != batch->part_crc[n])
        return fail(sample->message, DAMAGED, "its score map does not match its checksum");
    return OK;
}

/* The packed score map of sample `n`, and its Window. */
static int copy_packed(const Batch *batch, int n, Sample *sample, Scratch *scratch)
{
    const Packed *packed = batch->packed;
    int palette = packed->palette[n], status;
    size_t entries = (size_t)packed->cells * packed->top_k, bytes = map_bytes(packed, palette);
    const int32_t *file = batch->part_file + (size_t)n * 2;
    const int64_t *offset = batch->part_offset + (size_t)n * 2;
    uint8_t *const *to = batch->part_to, *window = to[3] + (size_t)n * WINDOW_BYTES;
    if (!grow((void **)&scratch->encoded, &scratch->encoded_room, bytes + 2 * (entries + 8))) return NO_MEMORY;
    if ((status = read_all(scratch, file[0], offset[0], scratch->encoded, bytes, sample->message))) return status;
    if ((status = read_all(scratch, file[1], offset[1], window, WINDOW_BYTES, sample->message))) return status;
    uint32_t crc = densefeed_crc32(window, WINDOW_BYTES, densefeed_crc32(scratch->encoded, bytes, 0));
    if (batch->part_crc && crc != batch->part_crc[n])
        return fail(sample->message, DAMAGED, "its score map does not match its checksum");
    return map_unpack(packed, palette, scratch->encoded, scratch->encoded + bytes, to[0] + n * 2 * entries, to[1] + n * 2 * entries,
                      to[2] + (size_t)n * 2 * packed->cells, sample->message);
}

/* Score map `n` of a batch. */
int sample_map(const Batch *batch, int n, Sample *sample, Scratch *scratch)
{
    return batch->packed ? copy_packed(batch, n, sample, scratch) : copy_parts(batch, n, sample, scratch);
}

/* Sample `n` of a batch, from its files to its pixels and score map; its status says how it went. */
void sample_decode(const Batch *batch, int n, Scratch *scratch)
{
    Sample *sample = &batch->samples[n];
    Picture picture;
    double at[4] = {microseconds()};
    sample->message[0] = 0, scratch->reading = 0;
    sample->status = sample_map(batch, n, sample, scratch); /* first, so that they are there if the image is left to the caller */
    at[1] = microseconds();
    if (sample->status == OK && sample->length <= 0) sample->status = fail(sample->message, UNREADABLE, "there are no bytes of it");
    scratch->reading = 0;
    if (batch->cuts) batch->cuts[n].length = batch->cuts[n].top = batch->cuts[n].left = 0;
    if (sample->status == OK)
        sample->status = batch->cuts ? cut_out(sample, scratch, &batch->cuts[n]) : decode(sample, scratch, batch->size, &picture);
    at[2] = microseconds();
    if (sample->status == OK && !batch->cuts)
        sample->status = resample(scratch, &picture, sample, batch->size, batch->filter, batch->pixels + (size_t)n * batch->size * batch->size * 3);
    at[3] = microseconds();
    if (sample->status == NO_MEMORY) fail(sample->message, NO_MEMORY, "memory is used up");
    sample->took[LABELS] = at[1] - at[0], sample->took[READ] = scratch->reading;
    sample->took[DECODE] = at[2] - at[1] - scratch->reading, sample->took[RESAMPLE] = at[3] - at[2];
}
