/* Fuzzer of the native decoder: runs every function on mutated files, under sanitizers.
 * test_fuzz.py builds and runs it.
 *
 *     fuzz SECONDS INPUTS SEED THREADED FILE...
 *
 * It first tries every FILE unchanged, then INPUTS mutations of them or until SECONDS of processor
 * time are used. All choices for a file (crop, size, interval) are drawn from a hash of its own
 * bytes, so a file alone reproduces its case. A crash or a hang leaves its input in ./crasher; add
 * it to the corpus. THREADED = 1 also submits batches to thread pools: waits for, cancels or
 * abandons them.
 *
 * Beyond what sanitizers detect, it checks that a status other than OK has a message, that bytes in
 * memory and in a file decode alike, that an indexed file decodes to libjpeg's pixels, that
 * transcoded files can be read, and that checksums of score maps are verified. It prints a digest
 * of all pixels that do not depend on the version of libjpeg, to compare processors.
 *
 * Sanitizers cannot run the versions of a function for other processors. -DGUARDED, without
 * sanitizers, puts every buffer before a page that cannot be accessed. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ------------------------------------------------------------------------- Exact buffers */

static void save_crasher(void);

#if defined(GUARDED)
#define PAGE 4096
#define MOST_BUFFERS 256
/* Pages of buffers; they are kept for the next buffer of as many pages. */
static struct Buffer { uint8_t *pages, *start; size_t room, size; } buffers[MOST_BUFFERS];

/* Find the buffer that starts at `start`, or if that is NULL, a free one of `room` bytes in pages,
 * without pages, or any. */
static struct Buffer *find_buffer(const uint8_t *start, size_t room) {
    struct Buffer *found = NULL;
    for (struct Buffer *b = buffers; b < buffers + MOST_BUFFERS; b++) {
        if (b->start != start) continue;
        if (start || b->room == room) return b;
        if (!found || !b->pages) found = b;
    }
    return found;
}

/* Allocate a buffer that ends where a page without access begins; another such page and a pattern
 * are before it. Only for programs of one thread. */
static void *allocate(size_t size) {
    size_t room = (size + PAGE - 1) / PAGE * PAGE;
    struct Buffer *b = find_buffer(NULL, room);
    if (!b) return NULL;
    if (!b->pages || b->room != room) {
        if (b->pages) munmap(b->pages, b->room + 2 * PAGE);
        b->pages = mmap(NULL, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b->pages == MAP_FAILED) return b->pages = NULL;
        if (room && mprotect(b->pages + PAGE, room, PROT_READ | PROT_WRITE)) abort();
        b->room = room;
    }
    memset(b->pages + PAGE, 0x5A, room - size);
    b->size = size;
    return b->start = b->pages + PAGE + room - size;
}

/* Free a buffer of `allocate`, or of libjpeg. */
static void release(void *memory) {
    struct Buffer *b = memory ? find_buffer(memory, 0) : NULL;
    if (!b) return free(memory);
    for (uint8_t *before = b->pages + PAGE; before < b->start; before++)
        if (*before != 0x5A) {
            fprintf(stderr, "bytes before a buffer were changed\n");
            save_crasher();
            _Exit(5);
        }
    b->start = NULL;
}
#define malloc(size) allocate(size)
#define free(memory) release(memory)
#endif

#include "batch.c"
#include "planes.c"
#include "turbo.c"
#include <fcntl.h>
#include <sys/time.h>
#define grow grow_with_slack
#include "scratch.c"
#undef grow

/* The library's `grow` leaves a quarter more, in which nothing would detect an overrun. */
int grow(void **memory, size_t *room, size_t needed) {
    if (*room == needed) return 1;
    void *exact = malloc(needed);
    if (!exact) return 0;
    if (*room) memcpy(exact, *memory, *room < needed ? *room : needed);
    free(*memory);
    *memory = exact, *room = needed;
    return 1;
}

#define MOST 65536 /* bytes of an input */
#define HANG 20 /* seconds of processor time; sanitizers slow everything by 3 to 10 */
#define DEADLOCK 900 /* seconds; a loaded machine may not run a program for minutes */
#define BEFORE 5 /* bytes before an image in its file */

typedef struct {
    uint8_t *bytes;
    size_t length;
} Input;

static Input now; /* the current input */
static uint64_t state; /* of the generator */
static uint32_t digest; /* of all pixels */

/* Draw a number in [0, below) with xorshift64* (Vigna 2016). */
static uint32_t draw(uint32_t below) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return below ? (uint32_t)((state * 2685821657736338717u) >> 32) % below : 0;
}

/* Write the current input to ./crasher. */
static void save_crasher(void) {
    int file = open("crasher", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || write(file, now.bytes, now.length) != (ssize_t)now.length) return;
    close(file);
}

/* Limit the time of the current check, or lift the limit. */
static void set_limit(int on) {
    struct itimerval limit = {.it_value.tv_sec = on ? HANG : 0};
    setitimer(ITIMER_PROF, &limit, NULL);
    alarm(on ? DEADLOCK : 0);
}

static void on_signal(int signal) {
    static const char late[] = "an input took too long\n", wild[] = "access outside a buffer\n";
    if (signal == SIGALRM || signal == SIGPROF) (void)!write(2, late, sizeof late - 1);
    else (void)!write(2, wild, sizeof wild - 1);
    save_crasher();
    _exit(3);
}

#define CHECK(condition) ((condition) ? (void)0 : report_failure(#condition, __LINE__))

static void report_failure(const char *condition, int line) {
    fprintf(stderr, "fuzz.c:%d: check failed: %s\n", line, condition);
    save_crasher();
    _exit(4);
}

#if defined(__SANITIZE_ADDRESS__)
void __sanitizer_set_death_callback(void (*callback)(void));
#endif

/* ------------------------------------------------------------------------- Checks of one input */

/* Find height and width in the first frame header, wherever it is: samples of broken files need a
 * size too. */
static void find_extent(Input in, int *height, int *width) {
    for (size_t at = 0; at + 9 <= in.length; at++)
        if (in.bytes[at] == 0xFF && in.bytes[at + 1] >= 0xC0 && in.bytes[at + 1] <= 0xC2) {
            *height = in.bytes[at + 5] << 8 | in.bytes[at + 6],
            *width = in.bytes[at + 7] << 8 | in.bytes[at + 8];
            return;
        }
    *height = *width = 16;
}

static int draw_size(void) {
    static const int sizes[] = {1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 48, 65, 97};
    return sizes[draw(sizeof sizes / sizeof *sizes)];
}

static void draw_sample(Sample *sample, Input in) {
    int height, width;
    find_extent(in, &height, &width);
    *sample = (Sample){.bytes = in.bytes,
        .length = (int64_t)in.length,
        .kind = JPEG,
        .height = height,
        .width = width,
        .flip = (int)draw(2),
        .filter = draw(2) ? BICUBIC : BILINEAR};
    double *box[2][2] = {{&sample->top, &sample->box_height}, {&sample->left, &sample->box_width}};
    for (int d = 0; d < 2; d++) {
        int extent = d ? width : height;
        double from = draw(extent), length = 1 + draw(extent - (uint32_t)from);
        if (draw(4) == 0) from = 0, length = extent;
        /* The box may exceed the edge. */
        if (draw(8) == 0) from += draw(1000) / 1000., length -= draw(1000) / 1000.;
        if (draw(64) == 0) from = (double[]){-1, -0., 1e300, NAN, INFINITY, 65535}[draw(6)];
        if (draw(64) == 0) length = (double[]){0, -1, 1e-12, 1e300, NAN, INFINITY}[draw(6)];
        *box[d][0] = from, *box[d][1] = length;
    }
}

/* Decode one sample. Returns its pixels, in a buffer of exactly their size. */
static uint8_t *decode_sample(Sample *sample, int size) {
    uint8_t *pixels = malloc(3 * size * size);
    memset(pixels, 0xA5, 3 * size * size);
    Batch batch = {.samples = sample,
        .count = 1,
        .height = size,
        .width = size,
        .pixels = pixels};
    densefeed_decode(&batch);
    CHECK(sample->status >= OK && sample->status <= NO_MEMORY);
    CHECK(memchr(sample->message, 0, MESSAGE) && !sample->message[0] == (sample->status == OK));
    return pixels;
}

static uint32_t get32(const uint8_t *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Whether the index matches the restart markers and these are in order. If not, libjpeg reads other
 * segments than we do. */
static int index_matches(Input in) {
    size_t at = get32(in.bytes + 12), rows = in.bytes[20] | in.bytes[21] << 8;
    size_t found = 0, per_row = 0;
    for (size_t row = 0; row < rows; row++) {
        size_t end = at + get32(in.bytes + 22 + 8 * row), before = found, last = 0;
        for (; at + 1 < end; at++)
            if (in.bytes[at] == 0xFF && in.bytes[at + 1]) {
                if (in.bytes[at + 1] != 0xD0 + (found++ & 7)) return 0;
                last = at + 2;
            }
        if (row < rows - 1 && last != end) return 0;
        if (!row) per_row = found + (rows == 1);
        if (found - before + (row == rows - 1) != per_row) return 0;
        at = end;
    }
    return 1;
}

/* Return the largest sum of the coefficients of a block, without signs; INT64_MAX if the file
 * cannot be read. The coefficients of photographs are below 1,100. */
static int64_t largest_block(Input in) {
    struct jpeg_decompress_struct from;
    Errors errors;
    volatile int64_t most = 0;
    if (!setjmp(errors.back)) {
        open_jpeg(&from, &errors, in.bytes, in.length);
        jvirt_barray_ptr *arrays = jpeg_read_coefficients(&from);
        for (int n = 0; n < from.num_components; n++)
            /* A component of no scan has no table. */
            for (JDIMENSION y = 0;
                 from.comp_info[n].quant_table && y < from.comp_info[n].height_in_blocks; y++) {
                JBLOCKARRAY row =
                    from.mem->access_virt_barray((j_common_ptr)&from, arrays[n], y, 1, FALSE);
                for (JDIMENSION x = 0; x < from.comp_info[n].width_in_blocks; x++) {
                    int64_t sum = 0;
                    for (int k = 0; k < 64; k++)
                        sum +=
                            labs((long)row[0][x][k] * from.comp_info[n].quant_table->quantval[k]);
                    if (sum > most) most = sum;
                }
            }
    } else {
        most = INT64_MAX;
    }
    jpeg_destroy_decompress(&from);
    return most;
}

/* Up to this sum no block overflows in libjpeg. 16 bits hold coefficients times 1.39 * 4, the scale
 * of the first pass, up to 5,900: beyond them its vector code, its C code and ours differ. Its C
 * code also takes pixels modulo 1,024, which sums from 2,100 on can exceed. */
#define MODERATE 2000
static int64_t block_sum; /* of the current input; -1: not computed yet */

static int is_moderate(Input in) {
    if (block_sum < 0) block_sum = largest_block(in);
    return block_sum < MODERATE;
}

/* Compare with libjpeg's decoding of the same crop from the whole scan. */
static void check_pixels(const Sample *sample, int size, const uint8_t *pixels) {
    Sample again = *sample;
    Scratch scratch = {0};
    Picture picture;
    Box box = {(int)again.top, (int)again.left, (int)ceil(again.top + again.box_height - 1e-9),
        (int)ceil(again.left + again.box_width - 1e-9)};
    if (turbo_decode(&again, &scratch, again.bytes, again.length, box, 1, &picture) == OK) {
        uint8_t *want = malloc(3 * size * size);
        Batch batch = {.samples = &again,
            .count = 1,
            .height = size,
            .width = size,
            .pixels = want};
        if (resample(&batch, 0, &scratch, &picture) == OK)
            CHECK(!memcmp(want, pixels, 3 * size * size));
        free(want);
    }
    free_scratch(&scratch);
}

static int has_index(Input in) { return segments_header(in.bytes, in.length) > 0; }

/* Write an input to a file in memory, after BEFORE other bytes; returns its descriptor. */
static int create_file(Input in) {
    int file = memfd_create("input", 0);
    uint8_t around[BEFORE] = {1, 2, 3, 4, 5};
    if (file < 0 || write(file, around, BEFORE) != BEFORE
        || write(file, in.bytes, in.length) != (ssize_t)in.length)
        abort();
    return file;
}

static void try_crops(Input in) {
    int file = create_file(in);
    for (int n = 0; n < 2; n++) {
        Sample sample;
        draw_sample(&sample, in);
        int size = draw_size();
        uint8_t *pixels = decode_sample(&sample, size);
        Sample from_file = sample;
        from_file.bytes = NULL, from_file.file = file, from_file.offset = BEFORE;
        uint8_t *same = decode_sample(&from_file, size);
        CHECK(from_file.status == sample.status);
        if (sample.status == OK) {
            CHECK(!memcmp(pixels, same, 3 * size * size));
            if (is_moderate(in)) digest = densefeed_crc32(pixels, 3 * size * size, digest);
            if (has_index(in) && index_matches(in) && is_moderate(in))
                check_pixels(&sample, size, pixels);
        }
        free(pixels), free(same);
        /* A file that is shorter than recorded, and an invalid descriptor. */
        from_file.length += 1 + draw(5000);
        free(decode_sample(&from_file, size));
        CHECK(from_file.status != OK);
        from_file.file = -1;
        free(decode_sample(&from_file, size));
        CHECK(from_file.status != OK);
    }
    close(file);
}

#define MOST_CROPS (MOST_BOXES + 2)

/* Crops of one image in one batch have the status and the pixels of each alone. */
static void try_together(Input in) {
    Sample together[MOST_CROPS];
    int size = draw_size(), count = 2 + (int)draw(draw(8) ? 2 : MOST_CROPS - 1);
    size_t bytes = 3 * (size_t)size * size;
    uint8_t *pixels = malloc(count * bytes);
    for (int n = 0; n < count; n++) draw_sample(&together[n], in);
    Batch batch = {.samples = together,
        .count = count,
        .height = size,
        .width = size,
        .pixels = pixels};
    densefeed_decode(&batch);
    for (int n = 0; n < count; n++) {
        Sample alone = together[n];
        uint8_t *same = decode_sample(&alone, size);
        CHECK(alone.status == together[n].status);
        CHECK(alone.status != OK || !memcmp(same, pixels + n * bytes, bytes));
        free(same);
    }
    free(pixels);
}

/* Whether pixels differ by one level at most. A box that begins elsewhere has centers of filters with
 * other rounding errors. They tip a weight to the next of 15 bits where it lies at a rounding
 * boundary, which changes a sum by one or two 64ths of a level: 1 of 500,000 inputs had a pixel at
 * the boundary of two levels. */
static int are_close(const uint8_t *one, const uint8_t *other, int count) {
    for (int n = 0; n < count; n++)
        if (abs(one[n] - other[n]) > 1) return 0;
    return 1;
}

/* Cut JPEGs are written to a buffer of exactly the input's length. A valid one must decode to the
 * same crop as the input. */
static void try_cuts(Input in) {
    int file = create_file(in);
    for (int n = 0; n < 2; n++) {
        Sample sample;
        draw_sample(&sample, in);
        uint64_t sound =
            draw(2) ? 0 : (uint64_t)in.length << 32 | densefeed_crc32(in.bytes, in.length, 0);
        Cut cut[2];
        uint8_t *room[2];
        for (int from_file = 0; from_file < 2; from_file++) {
            Sample one = sample;
            if (from_file) one.bytes = NULL, one.file = file, one.offset = BEFORE;
            cut[from_file] =
                (Cut){.bytes = room[from_file] = malloc(in.length + !in.length), .sound = sound};
            Batch batch = {.samples = &one, .count = 1, .cuts = &cut[from_file]};
            densefeed_decode(&batch);
            CHECK(!one.message[0] == (one.status == OK)
                && (cut[from_file].length > 0) == (one.status == OK));
            CHECK(cut[from_file].length <= (int64_t)in.length);
        }
        CHECK(cut[0].length == cut[1].length && !memcmp(cut[0].bytes, cut[1].bytes, cut[0].length));
        if (cut[0].length && has_index(in) && index_matches(in) && is_moderate(in)) {
            int size = draw_size();
            uint8_t *want = decode_sample(&sample, size), *got;
            Sample shown = sample;
            shown.bytes = cut[0].bytes, shown.length = cut[0].length, shown.height = cut[0].height,
            shown.width = cut[0].width;
            shown.top -= cut[0].top, shown.left -= cut[0].left;
            int was = sample.status;
            got = decode_sample(&shown, size);
            /* Of larger crops libjpeg decodes the cut at a smaller scale. */
            if (was == OK && sample.box_height < 8 * size && sample.box_width < 8 * size)
                CHECK(shown.status == OK && are_close(want, got, 3 * size * size));
            free(want), free(got);
        }
        free(room[0]), free(room[1]);
    }
    close(file);
}

static void try_raw(Input in) {
    Sample sample;
    draw_sample(&sample, in);
    sample.kind = RAW, sample.width = 1 + draw(64),
    sample.height = (int)(in.length / 3 / sample.width);
    if (draw(8)) sample.length = 3 * (int64_t)sample.height * sample.width;
    if (draw(8) && sample.height) {
        sample.top = draw(sample.height),
        sample.box_height = 1 + draw(sample.height - (uint32_t)sample.top);
        sample.left = draw(sample.width),
        sample.box_width = 1 + draw(sample.width - (uint32_t)sample.left);
    }
    int size = draw_size(), file = create_file(in);
    Sample from_file = sample;
    from_file.bytes = NULL, from_file.file = file, from_file.offset = BEFORE;
    uint8_t *pixels = decode_sample(&sample, size), *same = decode_sample(&from_file, size);
    CHECK(from_file.status == sample.status);
    if (sample.status == OK) {
        CHECK(!memcmp(pixels, same, 3 * size * size));
        digest = densefeed_crc32(pixels, 3 * size * size, digest);
    }
    free(pixels), free(same);
    close(file);
}

/* Crops of a JPEG's planes have the pixels of its own crops; then with a damaged header or length. */
static void try_planes(Input in) {
    char message[MESSAGE] = "";
    Sample jpeg;
    uint8_t *out;
    size_t length;
    draw_sample(&jpeg, in);
    int done = densefeed_planes(
        in.bytes, in.length, jpeg.height, jpeg.width, &out, &length, message);
    CHECK(!message[0] == (done == OK) && !out == (done != OK));
    if (done != OK) return;
    int file = create_file((Input){out, length});
    for (int n = 0; n < 4; n++) {
        int size = draw_size();
        draw_sample(&jpeg, in);
        Sample planes = jpeg, from_file;
        planes.bytes = out, planes.length = (int64_t)length, planes.kind = PLANES;
        if (n) {
            if (draw(3)) out[draw(16)] = (uint8_t)draw(256);
            else planes.length -= 1 + draw(40);
            if (draw(4) == 0) planes.height += 1 + draw(9), planes.width -= draw(9);
        }
        from_file = planes, from_file.bytes = NULL, from_file.file = file;
        from_file.offset = BEFORE;
        uint8_t *want = decode_sample(&jpeg, size), *got = decode_sample(&planes, size);
        uint8_t *same = decode_sample(&from_file, size);
        /* Of larger crops libjpeg decodes at a smaller scale. */
        int full = jpeg.box_height < 8 * size || jpeg.box_width < 8 * size;
        if (!n && jpeg.status == OK && full && (!has_index(in) || index_matches(in))) {
            CHECK(planes.status == OK && from_file.status == OK);
            if (is_moderate(in)) CHECK(!memcmp(want, got, 3 * size * size));
            CHECK(!memcmp(same, got, 3 * size * size));
        }
        free(want), free(got), free(same);
    }
    close(file);
    densefeed_free(out);
}

static void try_transcoding(Input in) {
    char message[MESSAGE] = "";
    int height, width;
    int status = densefeed_probe(in.bytes, in.length, &height, &width, message);
    CHECK(!message[0] == (status == OK));
    uint8_t *out;
    size_t length;
    message[0] = 0;
    int done = densefeed_transcode(in.bytes, in.length, (int)draw(5), &out, &length, message);
    CHECK(!message[0] == (done == OK) && !out == (done != OK));
    int warnings = 0;
    message[0] = 0;
    int scanned = densefeed_scan(in.bytes, in.length, &warnings, message);
    CHECK(!message[0] == (scanned == OK && !warnings));
    CHECK(done != OK || scanned == OK);
    if (done == OK) {
        int new_height, new_width;
        /* The transcoder accepts other beginnings: libjpeg searches for the first marker. */
        CHECK(status == OK || memcmp(in.bytes, "\xFF\xD8\xFF", 3));
        CHECK(densefeed_probe(out, length, &new_height, &new_width, message) == OK);
        CHECK(status != OK || (new_height == height && new_width == width));
        Sample sample;
        draw_sample(&sample, (Input){out, length});
        sample.top = sample.left = 0, sample.box_height = sample.height = new_height,
        sample.box_width = sample.width = new_width;
        free(decode_sample(&sample, 16));
        CHECK(sample.status == OK || sample.status == UNSUPPORTED);
        densefeed_free(out);
    }
}

/* ------------------------------------------------------------------------- Score maps */

/* Unpack arbitrary bytes as a packed row; all buffers have exactly the documented size. */
static void try_map(Input in) {
    static float levels[256];
    for (int n = 0; n < 256; n++) levels[n] = (float)n * (n % 3 ? 1e-6f : 1e3f);
    int side = 1 + (int)draw(9), top_k = 1 + (int)draw(6);
    int palette = 1 + (int)draw(draw(3) ? 12 : 700);
    Packed packed = {.cells = side * side,
        .top_k = top_k,
        .palette = &palette,
        .levels = draw(2) ? levels : NULL};
    size_t entries = (size_t)packed.cells * top_k, bytes = map_bytes(&packed, palette);
    uint8_t *row = malloc(bytes), *room = malloc(2 * entries + 16), *logit = malloc(2 * entries),
            *class = malloc(2 * entries);
    uint8_t *lse = malloc(2 * packed.cells);
    char message[MESSAGE] = "";
    for (size_t n = 0; n < bytes; n++) row[n] = in.length ? in.bytes[n % in.length] : 0;
    int status = map_unpack(&packed, palette, row, room, logit, class, lse, message);
    CHECK(status == OK || status == DAMAGED);
    CHECK(!message[0] == (status == OK));
    /* In a palette of 2^n classes every place is valid. */
    CHECK(status == OK || palette & (palette - 1));
    free(row), free(room), free(logit), free(class), free(lse);
}

#define MANY_PARTS 12 /* more than one call reads */

/* Read the score map of one sample from a file, unpacked or packed: the right checksum is accepted
 * and another one is not. All buffers have exactly the documented size. */
static void try_checksums(Input in) {
    int file = create_file(in), is_packed = draw(2), right = draw(2);
    int32_t files[MANY_PARTS], palette = 1 + (int)draw(20);
    int64_t offset[MANY_PARTS], bytes[MANY_PARTS], end = 0;
    uint8_t *to[MANY_PARTS] = {NULL};
    static float levels[256];
    Packed packed = {.cells = 4, .top_k = 2, .palette = &palette, .levels = draw(2) ? levels : NULL};
    int parts = is_packed ? 2 : 1 + (int)draw(MANY_PARTS), whole = 1;
    uint32_t crc = 0;
    for (int p = 0; p < parts; p++) {
        bytes[p] = !is_packed ? 1 + draw(40) : p ? 16 : map_bytes(&packed, palette);
        /* Neighbors, small gaps, or anywhere. */
        uint32_t gap = draw(2) ? 0 : draw(80);
        offset[p] = draw(3) ? end + gap : draw((uint32_t)in.length + BEFORE);
        files[p] = file, end = offset[p] + bytes[p], to[p] = malloc(bytes[p]);
        uint8_t *content = malloc(bytes[p]);
        whole &= pread(file, content, bytes[p], offset[p]) == bytes[p];
        crc = densefeed_crc32(content, bytes[p], crc);
        free(content);
    }
    if (is_packed) {
        static const int sizes[4] = {16, 16, 8, 16};
        for (int p = 0; p < 4; p++) free(to[p]), to[p] = malloc(sizes[p]);
    }
    crc ^= right ? 0 : 1u << draw(32);
    Sample sample = {0};
    Batch batch = {
        .samples = &sample,
        .count = 1,
        .parts = {
            .count = parts,
            .file = files,
            .offset = offset,
            .bytes = bytes,
            .to = to,
            .crc = &crc,
            .packed = is_packed ? &packed : NULL,
        },
    };
    densefeed_maps(&batch);
    CHECK(!sample.message[0] == (sample.status == OK));
    CHECK(whole ? sample.status != UNREADABLE : sample.status == UNREADABLE);
    CHECK(!whole || right || strstr(sample.message, "checksum"));
    CHECK(!whole || !right || (is_packed ? !strstr(sample.message, "checksum") : !sample.status));
    for (int p = 0; p < MANY_PARTS; p++) free(to[p]);
    close(file);
}

/* Run all checks on one input, in a buffer of exactly its length. */
static void try_input(const uint8_t *bytes, size_t length) {
    uint8_t *exact = malloc(length ? length : 1);
    memcpy(exact, bytes, length);
    now = (Input){exact, length};
    uint64_t before = state;
    state = 0x9E3779B97F4A7C15u ^ densefeed_crc32(exact, length, 0);
    block_sum = -1;
    set_limit(1);
    try_crops(now), try_together(now), try_cuts(now), try_raw(now), try_planes(now);
    try_transcoding(now);
    try_map(now), try_checksums(now);
    set_limit(0);
    state = before;
    free(exact);
}

/* ------------------------------------------------------------------------- Batches */

#define ROWS 12
#define BATCHES 3

/* Submit batches to a thread pool, and wait for them in any order, cancel them or leave them to
 * close(). */
static void try_pool(const Input *inputs, int count) {
    static Sample samples[BATCHES][ROWS];
    static uint8_t pixels[BATCHES][ROWS * 32 * 32 * 3], maps[BATCHES][ROWS][2][8],
        rows[BATCHES][3][ROWS * 16], windows[BATCHES][ROWS][16];
    static int32_t part_file[BATCHES][ROWS][2];
    static int64_t part_offset[BATCHES][ROWS][2], part_bytes[2] = {8, 8};
    static uint8_t *part_to[BATCHES][4];
    static int32_t palettes[BATCHES][ROWS];
    static float levels[256];
    Packed packed[BATCHES];
    Batch batches[BATCHES];
    int file = create_file(inputs[draw(count)]), waited[BATCHES] = {0};
    set_limit(1);
    Pool *pool = densefeed_open(1 + (int)draw(4));
    if (!pool) abort();
    for (int b = 0; b < BATCHES; b++) {
        for (int n = 0; n < ROWS; n++) {
            /* Sometimes another crop of the image before. */
            const Sample *before = &samples[b][max(n - 1, 0)];
            Input same = {(uint8_t *)before->bytes, before->length};
            draw_sample(&samples[b][n], n && draw(2) ? same : inputs[draw(count)]);
            palettes[b][n] = 1 + (int)draw(20);
            for (int p = 0; p < 2; p++)
                part_file[b][n][p] = draw(20) ? file : -1, part_offset[b][n][p] = draw(100) + 8 * p;
        }
        for (int p = 0; p < 2; p++) part_to[b][p] = maps[b][0][0] + p * ROWS * 8;
        packed[b] = (Packed){
            .cells = 4, .top_k = 2, .palette = palettes[b], .levels = draw(2) ? levels : NULL};
        int is_packed = draw(2);
        if (is_packed)
            for (int p = 0; p < 4; p++) part_to[b][p] = p < 3 ? rows[b][p] : windows[b][0];
        int here = (int)draw(ROWS + 1);
        batches[b] = (Batch){
            .samples = samples[b],
            .count = here,
            .height = 32,
            .width = 32,
            .pixels = pixels[b],
            .first_row = (int)draw(ROWS - here + 1),
            .parts = {
                .count = 2,
                .file = part_file[b][0],
                .offset = part_offset[b][0],
                .bytes = part_bytes,
                .to = part_to[b],
                .packed = is_packed ? &packed[b] : NULL,
            },
        };
        densefeed_submit(pool, &batches[b]);
        if (draw(3) == 0) usleep(draw(2000));
    }
    for (int round = 0; round < BATCHES; round++) {
        int b = (int)draw(BATCHES);
        if (waited[b] || draw(4) == 0) continue;
        int cancel = draw(3) == 0;
        while (!densefeed_wait(pool, &batches[b], draw(2) ? 0.001 : 1.25, cancel)) continue;
        waited[b] = 1;
        int done = cancel ? batches[b].next : batches[b].count;
        CHECK(batches[b].done == done);
        for (int n = 0; n < done; n++)
            CHECK(!samples[b][n].message[0] == (samples[b][n].status == OK));
    }
    densefeed_close(pool);
    set_limit(0);
    close(file);
}

/* ------------------------------------------------------------------------- Mutations */

static void put32(uint8_t *at, uint32_t value) {
    for (int n = 0; n < 4; n++) at[n] = (uint8_t)(value >> 8 * n);
}

/* Recompute lengths and checksums of an indexed file, so that a mutation reaches the code after
 * their verification. */
static void repair(Input *in) {
    uint8_t *bytes = in->bytes;
    if (in->length < 64 || memcmp(bytes + 6, "DFSEG\1", 6)) return;
    size_t header = get32(bytes + 12);
    /* Find where the scan begins now. */
    if (draw(2))
        for (size_t at = 2; at + 4 <= in->length && bytes[at] == 0xFF;
            at += 2 + (bytes[at + 2] << 8 | bytes[at + 3]))
            if (bytes[at + 1] == 0xDA) {
                header = at + 2 + (bytes[at + 2] << 8 | bytes[at + 3]);
                break;
            }
    if (header < 22 || header > in->length) return;
    put32(bytes + 12, (uint32_t)header);
    size_t rows = bytes[20] | bytes[21] << 8, at = header;
    if (22 + 8 * rows > header) return;
    for (size_t row = 0; row < rows; row++) {
        size_t length = get32(bytes + 22 + 8 * row);
        size_t left = in->length - 2 < at ? 0 : in->length - 2 - at;
        if (row == rows - 1 || length > left) length = left;
        put32(bytes + 22 + 8 * row, (uint32_t)length);
        put32(bytes + 26 + 8 * row, densefeed_crc32(bytes + at, length, 0));
        at += length;
    }
    put32(bytes + 16, densefeed_crc32(bytes + 20, header - 20, densefeed_crc32(bytes, 16, 0)));
}

static void mutate(Input *in, const Input *seeds, int count) {
    static const uint8_t known[] = {0, 1, 2, 3, 4, 0x10, 0x11, 0x21, 0x22, 0x41, 0x7F, 0x80, 0xC0,
        0xC2, 0xC4, 0xD0, 0xD9, 0xDA, 0xDB, 0xDD, 0xE9, 0xFE, 0xFF};
    uint8_t *bytes = in->bytes;
    for (int edits = 1 + (int)draw(4); edits > 0 && in->length > 4; edits--) {
        size_t length = in->length,
               at = draw(2) ? draw((uint32_t)length) : draw(length < 700 ? (uint32_t)length : 700);
        switch (draw(10)) {
        case 0:
        case 1: bytes[at] ^= (uint8_t)(1 << draw(8)); break;
        case 2: bytes[at] = (uint8_t)draw(256); break;
        case 3: bytes[at] = known[draw(sizeof known)]; break;
        case 4:
            if (at + 1 < length) bytes[at] = 0xFF, bytes[at + 1] = known[draw(sizeof known)];
            break;
        case 5:
            if (draw(4) == 0) in->length = at;
            break;
        case 6: { /* delete or duplicate a run */
            size_t run = 1 + draw(draw(2) ? 4 : 200);
            if (at + run >= length) break;
            if (draw(2))
                memmove(bytes + at, bytes + at + run, length - at - run), in->length -= run;
            else if (length + run <= MOST)
                memmove(bytes + at + run, bytes + at, length - at), in->length += run;
            break;
        }
        case 7: { /* copy a run from another file */
            const Input *other = &seeds[draw((uint32_t)count)];
            size_t from = draw((uint32_t)other->length), run = 1 + draw(draw(2) ? 16 : 600);
            if (run > other->length - from) run = other->length - from;
            if (run > length - at) run = length - at;
            memcpy(bytes + at, other->bytes + from, run);
            break;
        }
        case 8: { /* change size, sampling or table in the frame header */
            for (at = 0; at + 20 < length; at++)
                if (bytes[at] == 0xFF && bytes[at + 1] >= 0xC0 && bytes[at + 1] <= 0xC2) break;
            if (at + 20 >= length) break;
            size_t field = 5 + draw(14);
            if (draw(8)) bytes[at + field] = known[draw(sizeof known)];
            else put32(bytes + at + 5, draw(2) ? 0xDCFFDCFF : draw(1 << 30));
            break;
        }
        default: { /* The order of draws must not depend on the compiler. */
            int value = draw(2) ? 0 : 0xFF;
            memset(bytes + at, value, length - at < 24 ? length - at : 1 + draw(24));
        }
        }
    }
    if (draw(10) < 8) repair(in);
}

static double seconds_used(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + used.tv_nsec * 1e-9;
}

int main(int count, char **words) {
    if (count < 6) return fprintf(stderr, "fuzz SECONDS INPUTS SEED THREADED FILE...\n"), 2;
    double until = atof(words[1]), slowest = 0;
    long most = atol(words[2]);
    int threaded = atoi(words[4]), seeds = count - 5;
    signal(SIGALRM, on_signal), signal(SIGPROF, on_signal);
#if defined(GUARDED)
    signal(SIGSEGV, on_signal), signal(SIGBUS, on_signal);
#elif defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback(save_crasher);
#endif
    Input *seed = calloc(seeds, sizeof *seed);
    for (int n = 0; n < seeds; n++) {
        FILE *file = fopen(words[5 + n], "rb");
        if (!file) return fprintf(stderr, "cannot read %s\n", words[5 + n]), 2;
        seed[n].bytes = malloc(MOST);
        seed[n].length = fread(seed[n].bytes, 1, MOST, file);
        fclose(file);
        try_input(seed[n].bytes, seed[n].length);
    }
    state = 0x853C49E6748FEA9Bu + strtoull(words[3], NULL, 10);
    Input in = {malloc(MOST), 0}, recent[4] = {0};
    long tried = 0;
    for (; tried < most && seconds_used() < until; tried++) {
        const Input *from = &seed[draw((uint32_t)seeds)];
        memcpy(in.bytes, from->bytes, in.length = from->length);
        mutate(&in, seed, seeds);
        double before = seconds_used();
        try_input(in.bytes, in.length);
        if (seconds_used() - before > slowest) slowest = seconds_used() - before;
        if (!threaded) continue;
        int slot = (int)(tried % 4);
        free(recent[slot].bytes);
        recent[slot] = (Input){malloc(in.length + 1), in.length};
        memcpy(recent[slot].bytes, in.bytes, in.length);
        if (tried > 4 && draw(4) == 0) try_pool(recent, 4);
        if (tried > 4 && draw(4) == 0) try_pool(seed, seeds);
    }
    printf("%ld inputs from %d files in %.0f s, slowest %.2f s, digest %08x\n", tried, seeds,
        seconds_used(), slowest, digest);
    for (int n = 0; n < seeds; n++) free(seed[n].bytes);
    for (int n = 0; n < 4; n++) free(recent[n].bytes);
    free(seed), free(in.bytes);
    return 0;
}
