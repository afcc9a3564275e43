/* Preloaded into a process, this library counts the calls that change files below one folder, and
 * makes one of them fail.
 *
 * The file FAULT_STATE holds the folder, the number of the call and the fault, and what was counted.
 * It is mapped, so faults.py changes it while the process runs, and reads it when that has died. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, CALLS = 1 << 14, LONGEST = 1024 };

/* The number of calls so far, and each of them; State of faults.py has the same layout. */
static struct {
    long count, at, fault;
    char folder[PATH_MAX], calls[CALLS][LONGEST];
} *state;

__attribute__((constructor)) static void begin(void) {
    FILE *file = fopen(getenv("FAULT_STATE"), "r+");
    if (!file) abort();
    void *page = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    if (page == MAP_FAILED) abort();
    fclose(file);
    state = page;
}

static int below(const char *path) {
    size_t length = strlen(state->folder);
    return !strncmp(path, state->folder, length) && (path[length] == '/' || !path[length]);
}

/* Writes the path of an open file. */
static int name(int file, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* Counts a call on a path; returns 0, or the fault of this call. */
static int next(const char *call, const char *path) {
    if (!below(path)) return 0;
    long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
    snprintf(state->calls[number % CALLS], LONGEST, "%s %.400s", call, path);
    return number == state->at ? state->fault : 0;
}

static int next_open(const char *call, int file) {
    char path[PATH_MAX];
    return state && state->folder[0] && name(file, path) ? next(call, path) : 0;
}

/* Writes the absolute path of a path that is relative to an open folder. */
static int resolve(int folder, const char *path, char *whole) {
    whole[0] = 0;
    if (!state || !state->folder[0] || !path) return 0;
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX)) return 0;
        } else if (!name(folder, whole)) {
            return 0;
        }
        strcat(whole, "/");
    }
    strncat(whole, path, PATH_MAX - 1);
    return 1;
}

static int next_path(const char *call, int folder, const char *path) {
    char whole[2 * PATH_MAX];
    /* The kernel never interrupts these. */
    int fault = resolve(folder, path, whole) ? next(call, whole) : 0;
    return fault == EINTR ? 0 : fault;
}

/* As next_path, for a file `from` that gets the name `to`; the call names both. */
static int next_name(const char *call, int from_folder, const char *from, int folder,
    const char *to) {
    char whole[2 * PATH_MAX], both[LONGEST];
    resolve(from_folder, from, whole);
    snprintf(both, sizeof both, "%s %.400s", call, whole);
    return next_path(both, folder, to);
}

#define REAL(function) \
    static __typeof__(function) *real; \
    if (!real) real = (__typeof__(function) *)dlsym(RTLD_NEXT, #function)
/* A fault without an effect of its own, such as a short rename, is EIO. */
#define FAIL(fault, value) \
    do { \
        int wrong = (fault); \
        if (wrong) { \
            errno = wrong == SHORT ? EIO : wrong; \
            return value; \
        } \
    } while (0)

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        REAL(function); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & O_CREAT) FAIL(next_path("open", AT_FDCWD, path), -1); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int folder, const char *path, int flags, ...) { \
        REAL(function); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (flags & O_CREAT) FAIL(next_path("openat", folder, path), -1); \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

/* Half of the bytes, at least one. */
static size_t half(size_t size) { return size > 1 ? size / 2 : size; }

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    int fault = next_open("write", file);
    if (fault == SHORT) return real(file, data, half(size));
    FAIL(fault, -1);
    return real(file, data, size);
}

#define PWRITE(function, offset_t) \
    ssize_t function(int file, const void *data, size_t size, offset_t at) { \
        REAL(function); \
        int fault = next_open("pwrite", file); \
        if (fault == SHORT) return real(file, data, half(size), at); \
        FAIL(fault, -1); \
        return real(file, data, size, at); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    int fault = next_open("writev", file);
    if (fault == SHORT) return write(file, parts[0].iov_base, half(parts[0].iov_len));
    FAIL(fault, -1);
    return real(file, parts, count);
}

/* No test cuts the power, and on a disk each sync takes milliseconds. */
#define SYNC(function) \
    int function(int file) { \
        FAIL(next_open(#function, file), -1); \
        return 0; \
    }
SYNC(fsync)
SYNC(fdatasync)
SYNC(syncfs)

/* The file is closed in any case, as in Linux, which does not interrupt it on a local disk. Files
 * that were only read are not counted. */
int close(int file) {
    REAL(close);
    int saved = errno, flags = fcntl(file, F_GETFL);
    errno = saved;
    int fault = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY ? next_open("close", file) : 0;
    int closed = real(file);
    FAIL(fault == EINTR ? 0 : fault, -1);
    return closed;
}

#define TRUNCATE(function, offset_t) \
    int function(int file, offset_t size) { \
        REAL(function); \
        FAIL(next_open(#function, file), -1); \
        return real(file, size); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

/* Returns the error, and leaves errno alone. */
#define ALLOCATE(function, offset_t) \
    int function(int file, offset_t at, offset_t size) { \
        REAL(function); \
        int fault = next_open(#function, file); \
        if (fault) return fault == SHORT ? EIO : fault; \
        return real(file, at, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int rename(const char *from, const char *to) {
    REAL(rename);
    FAIL(next_name("rename", AT_FDCWD, from, AT_FDCWD, to), -1);
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    FAIL(next_name("renameat", from_folder, from, to_folder, to), -1);
    return real(from_folder, from, to_folder, to);
}

int link(const char *from, const char *to) {
    REAL(link);
    FAIL(next_name("link", AT_FDCWD, from, AT_FDCWD, to), -1);
    return real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(linkat);
    FAIL(next_name("linkat", from_folder, from, to_folder, to), -1);
    return real(from_folder, from, to_folder, to, flags);
}

int symlink(const char *target, const char *path) {
    REAL(symlink);
    FAIL(next_path("symlink", AT_FDCWD, path), -1);
    return real(target, path);
}

int symlinkat(const char *target, int folder, const char *path) {
    REAL(symlinkat);
    FAIL(next_path("symlinkat", folder, path), -1);
    return real(target, folder, path);
}

int unlink(const char *path) {
    REAL(unlink);
    FAIL(next_path("unlink", AT_FDCWD, path), -1);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    FAIL(next_path("unlinkat", folder, path), -1);
    return real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(rmdir);
    FAIL(next_path("rmdir", AT_FDCWD, path), -1);
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    FAIL(next_path("mkdir", AT_FDCWD, path), -1);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    FAIL(next_path("mkdirat", folder, path), -1);
    return real(folder, path, mode);
}
