/* SPDX-License-Identifier: BSD-3-Clause */
/* How an entry point begins and ends: it holds one lock from ENTER to LEAVE. */
#pragma once
#include "abi.h"

/* Entry points by state (build.py reads these words): API does what HIP does; HINT is accepted
   and has no effect here. */
#define API_OF(type, name) __attribute__((visibility("default"))) type name
#define API(name) API_OF(hipError_t, name)
#define HINT(name) API(name)

/* Takes the lock; the error of a device that can no longer be used, if any. */
hipError_t device_enter(void);
/* From here on the device is this process's: what it forked before may have one of its own. */
void device_own(void);
/* Releases the lock, remembers an error for hipGetLastError, and returns it. */
hipError_t device_leave(hipError_t error);
/* Makes all later calls fail with this error. */
void device_fail(hipError_t error);
/* Refuses what a GPU would do: says so, and no later call succeeds, so that a caller who ignores
   the error does not compute with what was not done. */
__attribute__((format(printf, 1, 2))) hipError_t device_lacks(const char *format, ...);
#define ENTER()                                  \
    do {                                         \
        hipError_t error_ = device_enter();      \
        if (error_) return device_leave(error_); \
    } while (0)
#define LEAVE(error) return device_leave(error)
#define REQUIRE(condition, error)                     \
    do {                                              \
        if (!(condition)) return device_leave(error); \
    } while (0)
/* All that an entry point does which answers at once. */
#define CHECKED(condition, error, result) \
    do {                                  \
        ENTER();                          \
        REQUIRE(condition, error);        \
        LEAVE(result);                    \
    } while (0)
__attribute__((format(printf, 1, 2))) void device_say(const char *format, ...);

/* For what needs no memory and no server: the error, remembered. */
hipError_t device_answer(hipError_t error);
#define ANSWER(condition, error)                       \
    do {                                               \
        if (!(condition)) return device_answer(error); \
    } while (0)
