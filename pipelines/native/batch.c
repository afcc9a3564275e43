/* Batches of crops, decoded by a pool of threads that never touch Python.
 *
 * A batch is submitted, worked on sample by sample by whichever thread is free, and waited for; threads that find nothing left in
 * one batch go on with the next, so none idles while the last sample of a batch is decoded.
 */
#include "native.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HEAD 2048 /* bytes read first: header and index of nearly every image of up to 1,000 rows */

#define MOST_PARTS 8 /* read by one call */
#define MOST_GAP 64 /* bytes between two such parts */

typedef struct Batch {
    Sample *samples;
    int count, size; /* samples; side of the output, pixels */
    uint8_t *pixels; /* [count][size][size][3] */
    /* Score maps: `parts` runs of bytes a sample, each read from its file to where numpy wants it. */
    int parts;
    const int32_t *part_file; /* [count][parts] */
    const int64_t *part_offset; /* [count][parts] */
    const int64_t *part_bytes; /* [parts] */
    uint8_t *const *part_to; /* [parts], each [count][part_bytes] */
    const uint32_t *part_crc; /* [count] of all parts in their order, or NULL */
    int next, done, cancelled; /* under the pool's lock */
    struct Batch *after;
} Batch;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    pthread_t *thread;
    int threads, closing;
    Batch *first, *last;
} Pool;

int fail(char *message, int status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(message, MESSAGE, format, list);
    va_end(list);
    return status;
}

int grow(void **memory, size_t *room, size_t needed)
{
    if (needed <= *room) return 1;
    needed += needed / 4;
    void *larger = realloc(*memory, needed);
    if (!larger) return 0;
    *memory = larger, *room = needed;
    return 1;
}

double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec * 1e-3;
}

/* Exactly `length` bytes of a file. */
int read_all(Scratch *scratch, int file, int64_t offset, uint8_t *to, size_t length, char *message)
{
    double began = microseconds();
    while (length) {
        ssize_t got = pread(file, to, length, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(message, UNREADABLE, "%s", strerror(errno));
        if (got == 0) return fail(message, UNREADABLE, "its file was cut or replaced while it was open");
        to += got, offset += got, length -= got;
    }
    scratch->reading += microseconds() - began;
    return OK;
}

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

/* The planes of what the sample's crop touches. */
static int decode(Sample *sample, Scratch *scratch, int size, Picture *picture)
{
    double bottom = ceil(sample->top + sample->box_height - 1e-9), right = ceil(sample->left + sample->box_width - 1e-9);
    if (!(sample->top >= 0 && sample->left >= 0 && sample->box_height > 0 && sample->box_width > 0 && bottom <= sample->height
          && right <= sample->width && floor(sample->top) < bottom && floor(sample->left) < right))
        return fail(sample->message, UNSUPPORTED, "the crop is not inside it");
    Box box = {(int)sample->top, (int)sample->left, (int)bottom, (int)right};
    int status;
    if (sample->kind == RAW) return raw_decode(sample, scratch, box, picture);
    const uint8_t *bytes = sample->bytes;
    size_t have = sample->length;
    if (!bytes) {
        if (have > HEAD) have = HEAD;
        if (!grow((void **)&scratch->encoded, &scratch->encoded_room, have + PADDING)) return NO_MEMORY;
        if ((status = read_all(scratch, sample->file, sample->offset, scratch->encoded, have, sample->message))) return status;
        bytes = scratch->encoded;
    }
    size_t header = segments_header(bytes, have), needed = header ? header : (size_t)sample->length;
    if (needed > (size_t)sample->length) return fail(sample->message, DAMAGED, "its header is longer than the file");
    if (needed > have) {
        if (!grow((void **)&scratch->encoded, &scratch->encoded_room, needed + PADDING)) return NO_MEMORY;
        status = read_all(scratch, sample->file, sample->offset + have, scratch->encoded + have, needed - have, sample->message);
        if (status) return status;
        bytes = scratch->encoded;
    }
    if (header) return segments_decode(sample, scratch, bytes, header, box, picture);
    /* libjpeg's transform at 1/2, 1/4 and 1/8 is fast; other fractions are slower than the whole. At least another halving is
     * left to the antialiasing filter, which hides how the transform cuts off frequencies. */
    int scale = 1;
    while (scale < 8 && sample->box_height >= 4.0 * scale * size && sample->box_width >= 4.0 * scale * size) scale *= 2;
    Box small = {box.top / scale, box.left / scale, (box.bottom + scale - 1) / scale, (box.right + scale - 1) / scale};
    return turbo_decode(sample, scratch, bytes, sample->length, small, scale, picture);
}

/* The parts of sample `n`. Neighbours in the file are read by one call: in a .beton that is all of them. */
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

static void work_on(Batch *batch, int n, Scratch *scratch)
{
    Sample *sample = &batch->samples[n];
    Picture picture;
    double at[4] = {microseconds()};
    sample->message[0] = 0, scratch->reading = 0;
    sample->status = copy_parts(batch, n, sample, scratch); /* first, so that they are there if the image is left to the caller */
    at[1] = microseconds();
    if (sample->status == OK && sample->length <= 0) sample->status = fail(sample->message, UNREADABLE, "there are no bytes of it");
    scratch->reading = 0;
    if (sample->status == OK) sample->status = decode(sample, scratch, batch->size, &picture);
    at[2] = microseconds();
    if (sample->status == OK)
        sample->status = resample(scratch, &picture, sample, batch->size, batch->pixels + (size_t)n * batch->size * batch->size * 3);
    at[3] = microseconds();
    if (sample->status == NO_MEMORY) fail(sample->message, NO_MEMORY, "memory is used up");
    sample->took[LABELS] = at[1] - at[0], sample->took[READ] = scratch->reading;
    sample->took[DECODE] = at[2] - at[1] - scratch->reading, sample->took[RESAMPLE] = at[3] - at[2];
}

static void *run(void *argument)
{
    Pool *pool = argument;
    Scratch scratch = {0};
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        Batch *batch = pool->first;
        while (batch && (batch->cancelled || batch->next >= batch->count)) batch = batch->after;
        if (!batch) {
            if (pool->closing) break;
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        int n = batch->next++;
        pthread_mutex_unlock(&pool->lock);
        work_on(batch, n, &scratch);
        pthread_mutex_lock(&pool->lock);
        batch->done++;
        /* Waking the waiting thread after every sample cost 3 % on one core. */
        if (batch->done >= (batch->cancelled ? batch->next : batch->count)) pthread_cond_broadcast(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    free(scratch.encoded), free(scratch.planes), free(scratch.middle), free(scratch.weights);
    return NULL;
}

API void densefeed_close(Pool *pool);

/* NULL if the system gives no more threads, or none are asked for. */
API Pool *densefeed_open(int threads)
{
    Pool *pool = threads > 0 ? calloc(1, sizeof *pool) : NULL; /* without threads a batch would never be done */
    if (!pool || !(pool->thread = calloc(threads, sizeof *pool->thread))) return free(pool), NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->finished, &clock);
    pthread_condattr_destroy(&clock);
    /* Signals belong to Python's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->threads < threads && !pthread_create(&pool->thread[pool->threads], NULL, run, pool)) pool->threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->threads == threads) return pool;
    densefeed_close(pool);
    return NULL;
}

/* Stop all threads; batches that were not waited for must not be read. */
API void densefeed_close(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    for (Batch *batch = pool->first; batch; batch = batch->after) batch->cancelled = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int n = 0; n < pool->threads; n++) pthread_join(pool->thread[n], NULL);
    pthread_cond_destroy(&pool->work), pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->lock);
    free(pool->thread), free(pool);
}

/* Begin a batch. All its memory must live until it was waited for. */
API void densefeed_submit(Pool *pool, Batch *batch)
{
    batch->next = batch->done = batch->cancelled = 0, batch->after = NULL;
    pthread_mutex_lock(&pool->lock);
    if (pool->first) pool->last->after = batch;
    else pool->first = batch;
    pool->last = batch;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* Wait up to `seconds` for a batch; 1 once it is finished and forgotten, 0 if it needs longer. `cancel`: begin none of its
 * samples any more. */
API int densefeed_wait(Pool *pool, Batch *batch, double seconds, int cancel)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long nanoseconds = until.tv_nsec + (long)((seconds - floor(seconds)) * 1e9);
    until.tv_sec += (time_t)seconds + nanoseconds / 1000000000, until.tv_nsec = nanoseconds % 1000000000;
    pthread_mutex_lock(&pool->lock);
    if (cancel) batch->cancelled = 1;
    int late = 0;
    while (!late && batch->done < (batch->cancelled ? batch->next : batch->count))
        late = pthread_cond_timedwait(&pool->finished, &pool->lock, &until) == ETIMEDOUT;
    int finished = batch->done >= (batch->cancelled ? batch->next : batch->count);
    if (finished) {
        Batch **at = &pool->first, *before = NULL;
        while (*at && *at != batch) before = *at, at = &(*at)->after;
        if (*at) *at = batch->after;
        if (pool->last == batch) pool->last = before;
    }
    pthread_mutex_unlock(&pool->lock);
    return finished;
}

/* Decode a batch on the calling thread. */
API void densefeed_decode(Batch *batch)
{
    Scratch scratch = {0};
    for (int n = 0; n < batch->count; n++) work_on(batch, n, &scratch);
    free(scratch.encoded), free(scratch.planes), free(scratch.middle), free(scratch.weights);
}

/* For the caller's own check that both sides mean the same structs. */
API int densefeed_sizes(int which) { return which ? (int)sizeof(Batch) : (int)sizeof(Sample); }
