/* What the files of this folder share. Letters and shapes: `size` is the side of the output, planes are column-major.
 *
 * Column-major planes (a column's pixels are neighbors in memory) save two transpositions: the inverse DCT leaves its block
 * transposed, and the horizontal half of a resampling wants a vector of rows.
 */
#ifndef DENSEFEED_NATIVE_H
#define DENSEFEED_NATIVE_H

#include <stdint.h>
#include <stddef.h>

/* One source compiled for several instruction sets, chosen when the library is loaded (GNU ifunc; needs ELF and glibc).
 * Sanitizers cannot run before they are set up themselves, so sanitised builds take the plain one. Levels and not processors:
 * "arch=haswell" would match that one processor only. -DDENSEFEED_PLAIN leaves out all that is made for one processor, so that
 * what others run is tested everywhere. */
#if defined(__x86_64__) && !defined(DENSEFEED_PLAIN)
#define X86
#endif
#if defined(X86) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif

#define API __attribute__((visibility("default"))) /* all else is hidden: no other library's symbols can take its place */
#define INLINE static inline __attribute__((always_inline))

/* Vectors as GCC and Clang write them for any processor. SHUFFLE picks elements of a and b by number, b's after a's. */
typedef int16_t Half __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Three times interleaving the halves of 8 rows swaps rows and columns. */
INLINE void transpose8(Half m[8])
{
    for (int round = 0; round < 3; round++) {
        Half mixed[8];
        for (int n = 0; n < 4; n++) {
            mixed[2 * n] = SHUFFLE(Half, m[n], m[n + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            mixed[2 * n + 1] = SHUFFLE(Half, m[n], m[n + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        for (int n = 0; n < 8; n++) m[n] = mixed[n];
    }
}

enum { OK = 0, DAMAGED = 1, UNSUPPORTED = 2, UNREADABLE = 3, NO_MEMORY = 4 };
enum { JPEG = 0, RAW = 1 };
enum { BILINEAR = 0, BICUBIC = 1 }; /* filters, antialiased as Pillow's */

#define MESSAGE 120
#define MOST_PIXELS (1 << 28) /* of an image: what its header says is allocated before its bytes can prove it */
#define PADDING 64 /* bytes that may be read past the end of any buffer of encoded bytes */

/* One sample of a batch; numpy sees the same struct, see __init__.py. */
typedef struct {
    const uint8_t *bytes; /* the encoded image in memory, or NULL: it is read from a file */
    int64_t offset, length;
    int32_t file, kind; /* file descriptor; JPEG or RAW (rows of RGB) */
    int32_t height, width; /* as the dataset says; a JPEG that says otherwise is damaged */
    double top, left, box_height, box_width; /* the crop, pixels */
    int32_t flip, status;
    float took[4]; /* microseconds, see the enum below */
    char message[MESSAGE];
} Sample;
enum { LABELS, READ, DECODE, RESAMPLE };

/* How score maps are packed (densefeed/storage/FORMAT.md). */
typedef struct {
    int32_t cells, top_k; /* of a map; classes a cell names */
    const int32_t *palette; /* [count], classes in each row's palette */
    const float *levels; /* [256] of a compact store; NULL: lossless */
} Packed;

/* Instead of pixels: a JPEG that shows at least the crop, for another decoder, and found sound. */
typedef struct {
    uint8_t *bytes; /* in: room for as many as the sample has; out: where the JPEG is, which may be the sample's own memory */
    int64_t length; /* of the JPEG; 0: the image is left to be decoded here, or is not OK */
    int32_t top, left, height, width; /* what it shows of the stored image, pixels */
    /* Of an image without our index, its length << 32 | CRC-32. In: of the bytes that were found sound before, 0 for none: others
     * are looked at as a whole; out: of these, which are. An index's checksums are always looked at. */
    uint64_t sound;
} Cut;

typedef struct Batch {
    Sample *samples;
    int count, size; /* samples; side of the output, pixels */
    uint8_t *pixels; /* [count][size][size][3] */
    Cut *cuts; /* [count], or NULL; if not, `pixels` is not used */
    /* Score maps: `parts` runs of bytes a sample, each read from its file to where numpy wants it. */
    int parts;
    const int32_t *part_file; /* [count][parts] */
    const int64_t *part_offset; /* [count][parts] */
    const int64_t *part_bytes; /* [parts] */
    uint8_t *const *part_to; /* [parts], each [count][part_bytes] */
    const uint32_t *part_crc; /* [count] of all parts in their order, or NULL */
    /* If not NULL there are 2 parts, a packed row and a Window, and `part_to` is of logits, classes, logsumexps and Windows. */
    const Packed *packed;
    int filter;
    int next, done, cancelled; /* under the pool's lock */
    struct Batch *after;
} Batch;

/* Memory of one thread, grown as needed and used again for every sample. */
typedef struct {
    uint8_t *encoded; size_t encoded_room;
    uint8_t *planes; size_t planes_room;
    int16_t *middle; size_t middle_room;
    void *weights; size_t weights_room;
    double reading; /* microseconds of this sample so far */
} Scratch;

/* A rectangle of one color plane: data[(x - left) * step + (y - top)] for left <= x < left + width. Coordinates are the
 * plane's own: a plane at half resolution has ratio 2. `extent` is the whole plane's, where libjpeg repeats the last pixel. */
typedef struct {
    uint8_t *data;
    int step, left, top, width, height;
    int ratio_x, ratio_y; /* full-resolution pixels per pixel of this plane: 1, 2 or 4 */
    int extent_x, extent_y;
} Plane;

/* The decoded rectangle of an image. `scale`: it is 1/scale of the stored image (libjpeg's scaled DCT). */
typedef struct {
    Plane plane[3];
    int planes; /* 1: gray, 3 */
    int ycc; /* planes are Y, Cb, Cr; else R, G, B */
    int scale;
    int height, width; /* of the whole image at this scale */
} Picture;

/* The pixels of the whole-image rectangle that a crop touches. */
typedef struct { int top, left, bottom, right; } Box;

double microseconds(void);
int read_all(Scratch *scratch, int file, int64_t offset, uint8_t *to, size_t length, char *message);
int grow(void **memory, size_t *room, size_t needed);
int fail(char *message, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

API uint32_t densefeed_crc32(const uint8_t *bytes, size_t length, uint32_t crc);

int map_planes(int palette);
int64_t map_bytes(const Packed *packed, int palette);
int map_unpack(const Packed *packed, int palette, const uint8_t *row, uint8_t *room, uint8_t *logit, uint8_t *class, uint8_t *lse, char *message);

int sample_map(const Batch *batch, int n, Sample *sample, Scratch *scratch);
void sample_decode(const Batch *batch, int n, Scratch *scratch);
int segments_header(const uint8_t *bytes, size_t length);
int segments_decode(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length, Box box, Picture *picture);
int segments_cut(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length, Box box, Cut *cut);
int turbo_decode(Sample *sample, Scratch *scratch, const uint8_t *bytes, size_t length, Box box, int scale, Picture *picture);
int resample(Scratch *scratch, const Picture *picture, Sample *sample, int size, int filter, uint8_t *pixels);
void transpose_bytes(const uint8_t *from, int from_step, uint8_t *to, int to_step, int rows, int columns);

#endif
