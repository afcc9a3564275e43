/* Declarations shared by the C files of this folder. `size` is the outputs along an axis.
 *
 * Planes are column-major: the pixels of a column are neighbors in memory. This saves two
 * transpositions: the inverse DCT leaves its block transposed, and resampling a row of pixels
 * works on vectors of rows. The exception is an image with our index on a processor with AVX-512
 * VBMI: its planes are row-major, because one instruction then finds a tap's bytes for 32 outputs
 * (sum_bytes in resample.c). */
#ifndef DENSEFEED_NATIVE_H
#define DENSEFEED_NATIVE_H

#include <stdint.h>
#include <stddef.h>

/* Packed score maps, the index of a JPEG and the shuffles of pixels assume this order. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "DenseFeed needs a little-endian processor, such as x86-64 or arm64."
#endif

/* -DDENSEFEED_PLAIN omits all code for a particular processor, to test the portable code. */
#if defined(__x86_64__) && !defined(DENSEFEED_PLAIN)
#define X86
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512bw,avx512vbmi")))
/* Whether the processor has them or, with DENSEFEED_ONE_CPU, whether -march has. */
#if defined(DENSEFEED_ONE_CPU)
enum {
#if defined(__AVX512VBMI__)
    HAS_AVX512 = 1,
#else
    HAS_AVX512 = 0,
#endif
#if defined(__AVX2__)
    HAS_AVX2 = 1,
#else
    HAS_AVX2 = 0,
#endif
    HAS_WIDE_PRODUCT = 0,
};
#else
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#define HAS_AVX512 (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi"))
/* The carry-less product of 512 bits. */
#define HAS_WIDE_PRODUCT (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f"))
#endif
#endif

/* Compile a function for several instruction sets and select one when the library is loaded (GNU
 * ifunc; needs ELF and glibc). Sanitized builds use the default version, because sanitizers cannot
 * run before their own setup. The targets are levels: "arch=haswell" would match that CPU only.
 * -DDENSEFEED_ONE_CPU compiles the instruction set of -march alone, to test each on one machine. */
#if defined(X86) && !defined(DENSEFEED_ONE_CPU) && defined(__GLIBC__) && __GNUC__ >= 12 \
    && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FOR_EVERY_CPU \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU
#endif

/* All other symbols are hidden, so symbols of other libraries cannot replace them. */
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE int max(int a, int b) { return a > b ? a : b; }
INLINE int be16(const uint8_t *at) { return at[0] << 8 | at[1]; }

/* Portable vectors of GCC and Clang. SHUFFLE picks elements of a and b by index, a's first. */
typedef int16_t Half __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Transpose 8 x 8 numbers: interleaving the halves of the 8 rows three times does it. */
INLINE void transpose8(Half m[8]) {
    for (int round = 0; round < 3; round++) {
        Half mixed[8];
        for (int n = 0; n < 4; n++) {
            mixed[2 * n] = SHUFFLE(Half, m[n], m[n + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            mixed[2 * n + 1] = SHUFFLE(Half, m[n], m[n + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        for (int n = 0; n < 8; n++) m[n] = mixed[n];
    }
}

/* Limit of the pixels of an image: memory is allocated from unverified headers. See densefeed_limit. */
extern int64_t most_pixels;

/* DAMAGED: refused for good. UNSUPPORTED: the caller may try another decoder. */
enum { OK = 0, DAMAGED = 1, UNSUPPORTED = 2, UNREADABLE = 3, NO_MEMORY = 4 };
enum { JPEG = 0, RAW = 1, PLANES = 2 };
enum { BILINEAR = 0, BICUBIC = 1 }; /* antialiased like Pillow's */

/* Return the status of a call from the enclosing function unless it is OK. */
#define TRY(call) do { int status_ = (call); if (status_) return status_; } while (0)

#define MESSAGE 120
#define PADDING 64 /* bytes that may be read past the end of any buffer of encoded bytes */

/* One sample of a batch. __init__.py declares the same struct for numpy. */
typedef struct {
    const uint8_t *bytes; /* the encoded image in memory; NULL: read it from `file` */
    int64_t offset, length;
    int32_t file, kind; /* file descriptor; JPEG, RAW (rows of RGB) or PLANES (planes.c) */
    int32_t height, width; /* as recorded in the dataset; a JPEG of another size is damaged */
    double top, left, box_height, box_width; /* the crop, pixels */
    int32_t flip, filter, status; /* filter: BILINEAR or BICUBIC, to resize the crop */
    float took[4]; /* microseconds; of crops decoded together, the first has READ and DECODE */
    char message[MESSAGE];
} Sample;
enum { LABELS, READ, DECODE, RESAMPLE };

/* The packing of score maps (densefeed/storage/FORMAT.md). */
typedef struct {
    int32_t cells, top_k; /* cells per map; classes per cell */
    const int32_t *palette; /* [count], classes in each row's palette */
    const float *levels; /* [256], of a compact store; NULL: lossless */
} Packed;

/* The values that score maps may have. `to` of Parts then holds 4 arrays: logits, classes,
 * logsumexps and Windows. */
typedef struct {
    int32_t cells, top_k; /* cells per map; classes per cell */
    int32_t classes, palette; /* classes of the dataset; most distinct classes of a map */
} Limits;

/* Instead of pixels: a validated JPEG that contains at least the crop, for another decoder. */
typedef struct {
    uint8_t *bytes; /* in: room for the sample's length; out: the JPEG, maybe sample.bytes */
    int64_t length; /* of the JPEG; 0: the image is not one, or its status is not OK */
    int32_t top, left, height, width; /* the JPEG's region of the stored image, pixels */
    /* length << 32 | CRC-32, of the whole image or, if it has our index, of its header. In: of bytes
     * that passed validation before, or 0; an image with another value is entropy-decoded in full.
     * Out: of this image, or 0 if an indexed image is damaged outside the crop. The checksums of an
     * index are always verified. */
    uint64_t sound;
} Cut;

/* Score maps: byte ranges, each read from its file into a numpy array. They have a row for each
 * sample of one or several batches. */
typedef struct {
    int count; /* ranges per sample */
    const int32_t *file; /* [rows][count] */
    const int64_t *offset; /* [rows][count] */
    const int64_t *bytes; /* [count] */
    uint8_t *const *to; /* [count], each [rows][bytes] */
    const uint32_t *crc; /* [rows], over all parts in order; NULL: not verified */
    /* If not NULL, there are 2 parts (a packed row and a Window), and `to` holds 4 arrays: logits,
     * classes, logsumexps and Windows. */
    const Packed *packed;
    const Limits *limits; /* NULL: the values of score maps are not checked */
} Parts;

typedef struct Batch {
    Sample *samples;
    int count, height, width; /* samples; height and width of the output, pixels */
    uint8_t *pixels; /* [count][height][width][3] */
    Cut *cuts; /* [count]; if not NULL, `pixels` is not used */
    int first_row; /* of `parts`: that of the first sample */
    Parts parts;
    int next, done, cancelled, failed; /* guarded by the pool's lock */
    struct Batch *after;
} Batch;

/* Buffers of one thread. They grow on demand and are reused for every sample. */
typedef struct {
    uint8_t *encoded; size_t encoded_room;
    uint8_t *segments; size_t segments_room;
    uint8_t *planes; size_t planes_room;
    int16_t *middle; size_t middle_room;
    void *weights; size_t weights_room;
    int32_t *seen; size_t seen_room;
    double reading; /* microseconds spent reading this sample */
    size_t head; /* bytes of its image that were read to `encoded` with its score map */
} Scratch;

/* Bytes that may be read past the end of a row-major plane. */
#define AHEAD 128

/* A rectangle of one color plane. Pixel (x, y) is data[(x - left) * step + (y - top)] or, if the
 * picture is row-major, data[(y - top) * step + (x - left)]. Coordinates are those of the plane: a
 * plane at half resolution has ratio 2. `extent` is the size of the whole plane; libjpeg repeats
 * the last pixel beyond it. */
typedef struct {
    uint8_t *data;
    int step, left, top, width, height;
    int ratio_x, ratio_y; /* full-resolution pixels per pixel of this plane: 1 to 4 */
    int extent_x, extent_y;
} Plane;

/* The decoded rectangle of an image, at 1/scale of the stored size (libjpeg's scaled DCT). */
typedef struct {
    Plane plane[3];
    int planes; /* 1 (gray) or 3 */
    int ycc; /* the planes are Y, Cb, Cr; else R, G, B */
    int row_major; /* not column-major; then AHEAD bytes follow each plane */
    int scale;
    int height, width; /* of the whole image at this scale */
} Picture;

/* The pixels of the whole image that a crop touches. */
typedef struct { int top, left, bottom, right; } Box;

/* The boxes of all crops that one decoding serves, and the smallest box around them. */
#define MOST_BOXES 8
typedef struct {
    int count;
    Box around, box[MOST_BOXES];
} Boxes;

double microseconds(void);
int read_all(Sample *sample, Scratch *scratch, int file, int64_t at, void *to, size_t length);
int load(Sample *sample, Scratch *scratch, size_t from, size_t at, size_t length);
int grow(void **memory, size_t *room, size_t needed);
#define GROW(scratch, name, bytes) grow((void **)&scratch->name, &scratch->name##_room, bytes)
int fail(char *message, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
int check_size(int64_t height, int64_t width, char *message);

API uint32_t densefeed_crc32(const uint8_t *bytes, size_t length, uint32_t crc);

int64_t map_bytes(const Packed *packed, int palette);
int map_unpack(const Packed *packed, int palette, const uint8_t *row, uint8_t *room,
    uint8_t *logit, uint8_t *class, uint8_t *lse, char *message);
int map_check(const Limits *limits, int32_t *seen, const uint8_t *logit, const uint8_t *class,
    const uint8_t *lse, const uint8_t *window, char *message);

int sample_map(const Parts *parts, int n, Sample *sample, Scratch *scratch, size_t head);
int samples_of_image(const Batch *batch, int first);
void samples_decode(const Batch *batch, int first, int count, Scratch *scratch);
int planes_decode(Sample *sample, Scratch *scratch, Box box, Picture *picture);
int segments_header(const uint8_t *bytes, size_t length);
int segments_decode(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length,
    const Boxes *boxes, Picture *picture);
int segments_cut(Sample *sample, Scratch *scratch, const uint8_t *head, size_t head_length,
    Box box, Cut *cut);
int turbo_decode(Sample *sample, Scratch *scratch, const uint8_t *bytes, size_t length, Box box,
    int scale, Picture *picture);
int resample(const Batch *batch, int index, Scratch *scratch, const Picture *picture);
void transpose_bytes(
    const uint8_t *from, int from_step, uint8_t *to, int to_step, int rows, int columns);

#endif
