/* Shared by all stages: growing buffers, reads from files, error messages, a clock. */
#include "native.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Write a message of at most MESSAGE - 1 characters and return `status`. */
int fail(char *message, int status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, MESSAGE, format, list);
    va_end(list);
    return status;
}

/* Pillow's MAX_IMAGE_PIXELS. */
int64_t most_pixels = 89478485;

/* Set the largest number of pixels of an image. Not while a batch is decoded. */
API void densefeed_limit(int64_t pixels) { most_pixels = pixels; }

/* Refuse an image that is too large before memory is allocated for it. */
int check_size(int64_t height, int64_t width, char *message) {
    if (height * width <= most_pixels) return OK;
    return fail(message, DAMAGED, "its %lld x %lld pixels are more than --max-pixels %lld",
        (long long)width, (long long)height, (long long)most_pixels);
}

/* Make room for `needed` bytes, and a quarter more; returns 0 if there is no memory. */
int grow(void **memory, size_t *room, size_t needed) {
    if (needed <= *room) return 1;
    needed += needed / 4;
    void *larger = realloc(*memory, needed);
    if (!larger) return 0;
    *memory = larger, *room = needed;
    return 1;
}

double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec * 1e-3;
}

/* Read exactly `length` bytes of a file, and add the time to scratch->reading. */
int read_all(Sample *sample, Scratch *scratch, int file, int64_t at, void *to, size_t length) {
    double began = microseconds();
    while (length) {
        ssize_t got = pread(file, to, length, at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(sample->message, UNREADABLE, "%s", strerror(errno));
        if (got == 0)
            return fail(sample->message, UNREADABLE, "its file was cut or replaced while open");
        to = (uint8_t *)to + got, at += got, length -= got;
    }
    scratch->reading += microseconds() - began;
    return OK;
}

/* Read `length` bytes of an image, from its byte `from` on, to scratch->encoded + `at`. */
int load(Sample *sample, Scratch *scratch, size_t from, size_t at, size_t length) {
    if (!GROW(scratch, encoded, at + length + PADDING)) return NO_MEMORY;
    uint8_t *to = scratch->encoded + at;
    return read_all(sample, scratch, sample->file, sample->offset + from, to, length);
}
