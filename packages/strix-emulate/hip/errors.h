/* SPDX-License-Identifier: BSD-3-Clause */
/* Macros for entry points, and the handling of errors. An entry point holds the library's only lock
   from ENTER to LEAVE. */
#pragma once
#include "abi.h"

/* An entry point that is defined with API does what HIP does. An entry point that is defined with
   HINT succeeds without an effect. build.py finds both kinds by these names in the sources. */
#define API_OF(type, name) __attribute__((visibility("default"))) type name
#define API(name) API_OF(hipError_t, name)
#define HINT(name) API(name)

/* Takes the lock. Returns the error that all calls return since the device failed,
   hipErrorNotInitialized in a forked child that cannot use the device, or hipSuccess. */
hipError_t device_enter(void);
/* Makes this process the owner of the device. A child that is forked from now on cannot use the
   device. A child that was forked earlier may create a device of its own. */
void device_own(void);
/* Releases the lock, remembers an error for hipGetLastError unless it is hipErrorNotReady, and
   returns it. */
hipError_t device_leave(hipError_t error);
/* Makes all later calls fail with this error. */
void device_fail(hipError_t error);
/* Refuses an operation that a GPU supports and this library does not. Prints a message, and makes
   all later calls fail, so that a program that ignores the error gets no wrong results. */
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
/* The body of an entry point that only checks a condition and returns a result. */
#define CHECKED(condition, error, result) \
    do {                                  \
        ENTER();                          \
        REQUIRE(condition, error);        \
        LEAVE(result);                    \
    } while (0)
__attribute__((format(printf, 1, 2))) void device_say(const char *format, ...);

/* For entry points that use neither device memory nor the server: remembers the error for
   hipGetLastError, and returns it. */
hipError_t device_answer(hipError_t error);
#define ANSWER(condition, error)                       \
    do {                                               \
        if (!(condition)) return device_answer(error); \
    } while (0)
