/* Decode batches of crops with a pool of threads that never use Python.
 *
 * A batch is submitted, processed image by image by free threads, and waited for. Threads that
 * find no sample left in a batch take the next one, so none idles during a batch's last sample. */
#define _GNU_SOURCE /* SCHED_BATCH */
#include "native.h"
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t submitted, finished;
    pthread_t *thread;
    int threads, closing;
    Batch *first;
} Pool;

/* Whether no sample of a batch is being decoded or will be. */
static int is_finished(const Batch *batch) {
    return batch->done >= (batch->cancelled ? batch->next : batch->count);
}

/* Process samples of one image; return how many of them failed. */
static int decode_some(const Batch *batch, int first, int count, Scratch *scratch) {
    int failed = 0;
    samples_decode(batch, first, count, scratch);
    for (int n = first; n < first + count; n++) failed += batch->samples[n].status != OK;
    return failed;
}

static void free_scratch(Scratch *scratch) {
    free(scratch->encoded), free(scratch->segments), free(scratch->planes), free(scratch->middle);
    free(scratch->weights), free(scratch->seen);
}

/* Prevent this thread from preempting another one when it wakes up. By default Linux may wake it on
 * the core of the thread that submits a batch, which then waits 0.5 ms for the first sample. */
static void avoid_preemption(void) {
#if defined(SCHED_BATCH)
    int policy;
    struct sched_param parameters;
    pthread_getschedparam(pthread_self(), &policy, &parameters);
    /* Not where the user chose another policy, such as SCHED_IDLE. */
    if (policy == SCHED_OTHER) pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
#endif
}

static void *work(void *argument) {
    Pool *pool = argument;
    Scratch scratch = {0};
    avoid_preemption();
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        Batch *batch = pool->first;
        while (batch && (batch->cancelled || batch->next >= batch->count)) batch = batch->after;
        if (!batch) {
            if (pool->closing) break;
            pthread_cond_wait(&pool->submitted, &pool->lock);
            continue;
        }
        int first = batch->next, count = samples_of_image(batch, first);
        batch->next += count;
        pthread_mutex_unlock(&pool->lock);
        int failed = decode_some(batch, first, count, &scratch);
        pthread_mutex_lock(&pool->lock);
        batch->done += count, batch->failed += failed;
        /* Waking the waiting thread after every sample would cost 3 % on one core. */
        if (is_finished(batch)) pthread_cond_broadcast(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    free_scratch(&scratch);
    return NULL;
}

/* Initialize a condition for wait_timed, whose time must not jump when the clock is set. macOS has
 * no condition on the monotonic clock, but waits for a span of time. */
static void init_timed(pthread_cond_t *condition) {
#if defined(__APPLE__)
    pthread_cond_init(condition, NULL);
#else
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &clock);
    pthread_condattr_destroy(&clock);
#endif
}

/* Wait for a condition until microseconds() is `until`. Returns 0 if that is in the past, without
 * a wait: on macOS a wait of 0 has no end. */
static int wait_timed(pthread_cond_t *condition, pthread_mutex_t *lock, double until) {
    double now = microseconds();
    if (now >= until) return 0;
#if defined(__APPLE__)
    double span = fmax(until - now, 1);
    struct timespec time = {(time_t)(span / 1e6), (long)(fmod(span, 1e6) * 1e3)};
    pthread_cond_timedwait_relative_np(condition, lock, &time);
#else
    struct timespec time = {(time_t)(until / 1e6), (long)(fmod(until, 1e6) * 1e3)};
    pthread_cond_timedwait(condition, lock, &time);
#endif
    return 1;
}

/* Stop all threads. Batches that were not waited for must not be read. */
API void densefeed_close(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    for (Batch *batch = pool->first; batch; batch = batch->after) batch->cancelled = 1;
    pthread_cond_broadcast(&pool->submitted);
    pthread_mutex_unlock(&pool->lock);
    for (int n = 0; n < pool->threads; n++) pthread_join(pool->thread[n], NULL);
    pthread_cond_destroy(&pool->submitted), pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->lock);
    free(pool->thread), free(pool);
}

/* Open a pool. Returns NULL if the system has no more threads or `threads` is below 1. */
API Pool *densefeed_open(int threads) {
    Pool *pool = threads > 0 ? calloc(1, sizeof *pool) : NULL;
    if (!pool || !(pool->thread = calloc(threads, sizeof *pool->thread))) return free(pool), NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->submitted, NULL);
    init_timed(&pool->finished);
    /* The threads block all signals; Python's main thread handles them. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->threads < threads; pool->threads++)
        if (pthread_create(&pool->thread[pool->threads], NULL, work, pool)) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->threads == threads) return pool;
    densefeed_close(pool);
    return NULL;
}

/* Submit a batch. All its memory must stay valid until densefeed_wait returns 1. */
API void densefeed_submit(Pool *pool, Batch *batch) {
    batch->next = batch->done = batch->cancelled = batch->failed = 0, batch->after = NULL;
    pthread_mutex_lock(&pool->lock);
    Batch **at = &pool->first;
    while (*at) at = &(*at)->after;
    *at = batch;
    pthread_cond_broadcast(&pool->submitted);
    pthread_mutex_unlock(&pool->lock);
}

/* Wait up to `seconds` for a batch. Returns 1 when it is finished and removed from the pool, 0 on
 * timeout. `cancel`: start no more of its samples. */
API int densefeed_wait(Pool *pool, Batch *batch, double seconds, int cancel) {
    double until = microseconds() + seconds * 1e6;
    pthread_mutex_lock(&pool->lock);
    if (cancel) batch->cancelled = 1;
    while (!is_finished(batch) && wait_timed(&pool->finished, &pool->lock, until)) continue;
    int finished = is_finished(batch);
    if (finished) {
        Batch **at = &pool->first;
        while (*at && *at != batch) at = &(*at)->after;
        if (*at) *at = batch->after;
    }
    pthread_mutex_unlock(&pool->lock);
    return finished;
}

/* Decode a batch on the calling thread. */
API void densefeed_decode(Batch *batch) {
    Scratch scratch = {0};
    batch->failed = 0;
    for (int first = 0, count; first < batch->count; first += count) {
        count = samples_of_image(batch, first);
        batch->failed += decode_some(batch, first, count, &scratch);
    }
    free_scratch(&scratch);
}

/* Read only the score maps of a batch, on the calling thread. */
API void densefeed_maps(Batch *batch) {
    Scratch scratch = {0};
    for (int n = 0; n < batch->count; n++) {
        Sample *sample = &batch->samples[n];
        sample->message[0] = 0;
        sample->status = sample_map(&batch->parts, batch->first_row + n, sample, &scratch, 0);
    }
    free_scratch(&scratch);
}

/* Size of a struct, so that the caller can check its own declaration. */
API int densefeed_sizes(int which) {
    return (int)(which == 0 ? sizeof(Sample) : which == 1 ? sizeof(Batch) : sizeof(Cut));
}
