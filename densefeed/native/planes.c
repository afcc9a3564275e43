/* Images stored as planes: what libjpeg decodes, without compression and column-major as turbo.c
 * leaves them in memory, so a crop needs no decoding. densefeed/storage/FORMAT.md describes the
 * bytes. */
#include "native.h"
#include <stdlib.h>
#include <string.h>

#define HEADER 16
static const uint8_t MARK[6] = {'D', 'F', 'P', 'L', 'N', 1};

typedef struct {
    uint8_t mark[6], planes, ycc;
    uint8_t ratio[3]; /* of each plane, ratio_x << 4 | ratio_y */
    uint8_t zero;
    uint32_t crc; /* of the bytes before it and the planes */
} Header;
_Static_assert(sizeof(Header) == HEADER, "the header of planes has 16 bytes");

/* Whether a plane may have this ratio. Sampling factors of JPEG are 1 to 4. */
static int is_ratio(int ratio) { return ratio >= 1 && ratio <= 4; }

/* Read `length` bytes of an image, from its byte `from` on. */
static int fetch(Sample *sample, Scratch *scratch, size_t from, void *to, size_t length) {
    if (!sample->bytes)
        return read_all(sample, scratch, sample->file, sample->offset + from, to, length);
    memcpy(to, sample->bytes + from, length);
    return OK;
}

/* Read and check the header, and describe the whole planes. */
static int open_planes(Sample *sample, Scratch *scratch, Picture *picture) {
    Header header;
    int64_t total = HEADER;
    if (sample->length < HEADER) return fail(sample->message, DAMAGED, "its header is cut");
    TRY(fetch(sample, scratch, 0, &header, HEADER));
    if (memcmp(header.mark, MARK, sizeof MARK) || (header.planes != 1 && header.planes != 3)
        || header.ycc > 1 || header.zero)
        return fail(sample->message, DAMAGED, "its header is not one of planes");
    *picture = (Picture){.planes = header.planes, .ycc = header.ycc, .scale = 1,
        .height = sample->height, .width = sample->width};
    for (int n = 0; n < header.planes; n++) {
        Plane *plane = &picture->plane[n];
        plane->ratio_x = header.ratio[n] >> 4, plane->ratio_y = header.ratio[n] & 15;
        if (!is_ratio(plane->ratio_x) || !is_ratio(plane->ratio_y))
            return fail(sample->message, DAMAGED, "its header is not one of planes");
        plane->extent_x = (sample->width + plane->ratio_x - 1) / plane->ratio_x;
        plane->extent_y = (sample->height + plane->ratio_y - 1) / plane->ratio_y;
        plane->step = plane->height = plane->extent_y;
        total += (int64_t)plane->extent_x * plane->extent_y;
    }
    if (sample->length != total)
        return fail(sample->message, DAMAGED, "it has %lld bytes, but its planes have %lld",
            (long long)sample->length, (long long)total);
    return OK;
}

/* Read the columns of `box`, with a margin of two pixels for interpolated chroma. All their rows are
 * read: those of neighboring columns are then one range of the file. */
int planes_decode(Sample *sample, Scratch *scratch, Box box, Picture *picture) {
    TRY(open_planes(sample, scratch, picture));
    size_t room = 0, at = HEADER;
    for (int n = 0; n < picture->planes; n++) {
        Plane *plane = &picture->plane[n];
        plane->left = max(box.left - 2, 0) / plane->ratio_x;
        plane->width = min((box.right + 1) / plane->ratio_x + 1, plane->extent_x) - plane->left;
        room += (size_t)plane->width * plane->step + PADDING;
    }
    if (!GROW(scratch, planes, room)) return NO_MEMORY;
    uint8_t *to = scratch->planes;
    for (int n = 0; n < picture->planes; n++) {
        Plane *plane = &picture->plane[n];
        size_t step = plane->step, length = plane->width * step;
        TRY(fetch(sample, scratch, at + plane->left * step, to, length));
        plane->data = to;
        to += length + PADDING, at += plane->extent_x * step;
    }
    return OK;
}

/* Decode a JPEG of height x width pixels to the bytes of its planes. The caller frees `*out` with
 * densefeed_free. */
API int densefeed_planes(const uint8_t *bytes, size_t length, int height, int width, uint8_t **out,
    size_t *out_length, char *message) {
    Sample sample = {.height = height, .width = width};
    Scratch scratch = {0};
    Picture picture;
    Header header = {.zero = 0};
    int status = turbo_decode(
        &sample, &scratch, bytes, length, (Box){0, 0, height, width}, 1, &picture);
    size_t total = HEADER;
    *out = NULL, *out_length = 0;
    for (int n = 0; status == OK && n < picture.planes; n++)
        total += (size_t)picture.plane[n].extent_x * picture.plane[n].extent_y;
    if (status == OK && !(*out = malloc(total))) status = NO_MEMORY;
    if (status == OK) {
        uint8_t *to = *out + HEADER;
        memcpy(header.mark, MARK, sizeof MARK);
        header.planes = picture.planes, header.ycc = picture.ycc;
        for (int n = 0; n < picture.planes; n++) {
            const Plane *plane = &picture.plane[n];
            header.ratio[n] = plane->ratio_x << 4 | plane->ratio_y;
            for (int x = 0; x < plane->extent_x; x++, to += plane->extent_y)
                memcpy(to, plane->data + (size_t)x * plane->step, plane->extent_y);
        }
        uint32_t crc = densefeed_crc32((uint8_t *)&header, HEADER - sizeof crc, 0);
        header.crc = densefeed_crc32(*out + HEADER, total - HEADER, crc);
        memcpy(*out, &header, HEADER);
        *out_length = total;
    }
    if (status == NO_MEMORY) fail(sample.message, NO_MEMORY, "out of memory");
    memcpy(message, sample.message, MESSAGE);
    free(scratch.planes);
    return status;
}
