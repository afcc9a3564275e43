/* What every stage needs: memory that grows, bytes from a file, words for what went wrong, a clock. */
#include "native.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
