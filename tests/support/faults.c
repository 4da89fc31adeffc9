/* SPDX-License-Identifier: BSD-3-Clause
 *
 * A library to preload into Python, rattler or pixi. It makes one call of the C library fail, or
 * kills the process at that call.
 *
 * FAULT=KIND:N:ERRNO:PART selects the N-th call, counted from 1, of this kind whose path contains
 * PART. In a running process, faults_arm() does the same. KIND is a name from the list below, such
 * as "rename", or `any`. If ERRNO is positive, the call fails, and errno gets this value. If ERRNO
 * is 0, SIGKILL is sent to the process. If ERRNO is negative, -ERRNO is the number of a signal that
 * is sent to the process, and the call is executed.
 *
 * FAULT_TRACE names a file to which each call whose path contains PART appends a line, `KIND PATH`.
 * Tests choose their cases from these lines.
 *
 * FAULT_COUNT names a file of two ints that several processes share: the number of calls with this
 * KIND and PART, of all these processes, and the process group of the first process. With
 * FAULT_COUNT, SIGKILL is sent to that group, and any other signal is sent to the leader of the
 * group. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char kind[16], part[PATH_MAX];
static int at, code, trace = -1;
static atomic_int seen[2], *counted = seen;

void faults_arm(const char *spec, const char *file) {
    int used = 0, count = -1;
    const char *name = getenv("FAULT_COUNT");
    at = 0;
    part[0] = 0;
    atomic_store(&seen[0], 0);
    counted = seen;
    if (name && *name && (count = open(name, O_RDWR | O_CLOEXEC)) >= 0) {
        void *shared = mmap(NULL, sizeof seen, PROT_READ | PROT_WRITE, MAP_SHARED, count, 0);
        int none = 0;
        close(count);
        if (shared == MAP_FAILED) abort();
        counted = shared;
        atomic_compare_exchange_strong(&counted[1], &none, getpgrp());
    }
    if (spec && sscanf(spec, "%15[^:]:%d:%d:%n", kind, &at, &code, &used) == 3 && used)
        snprintf(part, sizeof part, "%s", spec + used);
    trace = file ? open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

__attribute__((constructor)) static void start(void) {
    faults_arm(getenv("FAULT"), getenv("FAULT_TRACE"));
}

/* Returns whether this call has to fail; if so, sets errno. A relative PATH is relative to DIR. */
static int faulty(const char *what, int dir, const char *path) {
    char link[32], full[2 * PATH_MAX] = "";
    if (!(at || trace >= 0) || !path) return 0;
    if (path[0] != '/' && dir != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        if (readlink(link, full, PATH_MAX) < 0) return 0;
        strcat(strcat(full, "/"), path);
        path = full;
    }
    if (!strstr(path, part)) return 0;
    if (trace >= 0) dprintf(trace, "%s %s\n", what, path);
    if (!at || (strcmp(kind, "any") && strcmp(kind, what)) ||
        atomic_fetch_add(&counted[0], 1) + 1 != at)
        return 0;
    if (!code) kill(counted[1] ? -counted[1] : getpid(), SIGKILL);
    if (code < 0) {
        kill(counted[1] ? counted[1] : getpid(), -code);
        return 0;
    }
    errno = code;
    return 1;
}

static int faulty_fd(const char *what, int fd) {
    char link[32], path[PATH_MAX] = "";
    if (!(at || trace >= 0) || fd == trace) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && path[0] == '/' &&
           faulty(what, AT_FDCWD, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* For a call with two paths, pass the second one, which is the path that the call creates. */
#define ON_PATH(what, name, args, dir, path, call) \
    int name args { return faulty(what, dir, path) ? -1 : NEXT(name) call; }
#define ON_FD(type, what, name, args, fd, call) \
    type name args { return faulty_fd(what, fd) ? -1 : NEXT(name) call; }

ON_PATH("rename", rename, (const char *a, const char *b), AT_FDCWD, b, (a, b))
ON_PATH("rename", renameat, (int x, const char *a, int y, const char *b), y, b, (x, a, y, b))
ON_PATH("rename", renameat2, (int x, const char *a, int y, const char *b, unsigned f), y, b,
        (x, a, y, b, f))
ON_PATH("link", link, (const char *a, const char *b), AT_FDCWD, b, (a, b))
ON_PATH("link", linkat, (int x, const char *a, int y, const char *b, int f), y, b, (x, a, y, b, f))
ON_PATH("symlink", symlink, (const char *a, const char *b), AT_FDCWD, b, (a, b))
ON_PATH("symlink", symlinkat, (const char *a, int y, const char *b), y, b, (a, y, b))
ON_PATH("mkdir", mkdir, (const char *a, mode_t m), AT_FDCWD, a, (a, m))
ON_PATH("mkdir", mkdirat, (int x, const char *a, mode_t m), x, a, (x, a, m))
ON_PATH("unlink", unlink, (const char *a), AT_FDCWD, a, (a))
ON_PATH("unlink", rmdir, (const char *a), AT_FDCWD, a, (a))
ON_PATH("unlink", unlinkat, (int x, const char *a, int f), x, a, (x, a, f))
ON_FD(int, "fsync", fsync, (int fd), fd, (fd))
ON_FD(int, "fsync", fdatasync, (int fd), fd, (fd))
ON_FD(int, "flock", flock, (int fd, int op), fd, (fd, op))
ON_FD(ssize_t, "write", write, (int fd, const void *p, size_t n), fd, (fd, p, n))
ON_FD(ssize_t, "write", sendfile, (int fd, int from, off_t *o, size_t n), fd, (fd, from, o, n))
ON_FD(ssize_t, "write", sendfile64, (int fd, int from, off64_t *o, size_t n), fd, (fd, from, o, n))
ON_FD(ssize_t, "write", copy_file_range,
      (int from, off64_t *i, int fd, off64_t *o, size_t n, unsigned f), fd, (from, i, fd, o, n, f))

/* Opening a file to read it does not count, because programs read many files when they start. */
#define ON_OPEN(name, args, dir, path, last, call)                                   \
    int name args {                                                                  \
        mode_t mode = 0;                                                             \
        if (flags & (O_CREAT | O_TMPFILE)) {                                         \
            va_list more;                                                            \
            va_start(more, last);                                                    \
            mode = va_arg(more, mode_t);                                             \
            va_end(more);                                                            \
        }                                                                            \
        if ((flags & O_ACCMODE) != O_RDONLY && faulty("open", dir, path)) return -1; \
        return NEXT(name) call;                                                      \
    }

ON_OPEN(open, (const char *a, int flags, ...), AT_FDCWD, a, flags, (a, flags, mode))
ON_OPEN(open64, (const char *a, int flags, ...), AT_FDCWD, a, flags, (a, flags, mode))
ON_OPEN(openat, (int x, const char *a, int flags, ...), x, a, flags, (x, a, flags, mode))
ON_OPEN(openat64, (int x, const char *a, int flags, ...), x, a, flags, (x, a, flags, mode))
