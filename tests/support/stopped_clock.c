// SPDX-License-Identifier: BSD-3-Clause
// A library for LD_PRELOAD that stops the time of day, so that two builds of the same content are
// equal byte for byte. Clocks that measure durations are not changed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#define NOW 1767225600 // 2026-01-01

int clock_gettime(clockid_t id, struct timespec *result) {
    static int (*real)(clockid_t, struct timespec *);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) {
        *result = (struct timespec){NOW, 0};
        return 0;
    }
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(id, result);
}

time_t time(time_t *result) {
    if (result) *result = NOW;
    return NOW;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    (void)zone;
    *result = (struct timeval){NOW, 0};
    return 0;
}
