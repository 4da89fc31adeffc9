/* SPDX-License-Identifier: BSD-3-Clause */
/* The lock of all entry points, the last error of each thread, the names and texts of errors, and
   the output of the runtime's messages. */
#define _GNU_SOURCE
#include "errors.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static hipError_t broken;
static pid_t owner;
static _Thread_local hipError_t last;

void device_own(void) { owner = getpid(); }

hipError_t device_enter(void) {
    pthread_mutex_lock(&lock);
    /* A forked child must not use the device: it shares the memory and the socket with its parent,
       and would corrupt both. */
    return owner && owner != getpid() ? hipErrorNotInitialized : broken;
}

hipError_t device_leave(hipError_t error) {
    pthread_mutex_unlock(&lock);
    if (error && error != hipErrorNotReady) last = error;
    return error;
}

void device_fail(hipError_t error) { broken = error; }

static const struct {
    hipError_t error;
    const char *name, *text;
} errors[] = {
#define NAMED(name, text) {name, #name, text}
    NAMED(hipSuccess, "no error"),
    NAMED(hipErrorInvalidValue, "invalid argument"),
    NAMED(hipErrorOutOfMemory, "out of memory"),
    NAMED(hipErrorNotInitialized, "initialization error"),
    NAMED(hipErrorInvalidConfiguration, "invalid configuration argument"),
    NAMED(hipErrorInvalidPitchValue, "invalid pitch argument"),
    NAMED(hipErrorInvalidSymbol, "invalid device symbol"),
    NAMED(hipErrorInvalidDeviceFunction, "invalid device function"),
    NAMED(hipErrorNoDevice, "no ROCm-capable device is detected"),
    NAMED(hipErrorInvalidDevice, "invalid device ordinal"),
    NAMED(hipErrorInvalidImage, "device kernel image is invalid"),
    NAMED(hipErrorInvalidContext, "invalid device context"),
    NAMED(hipErrorNoBinaryForGpu, "no kernel image is available for execution on the device"),
    NAMED(hipErrorFileNotFound, "file not found"),
    NAMED(hipErrorInvalidHandle, "invalid resource handle"),
    NAMED(hipErrorNotFound, "named symbol not found"),
    NAMED(hipErrorNotReady, "device not ready"),
    NAMED(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    NAMED(hipErrorUnsupportedLimit, "limit is not supported on this architecture"),
    NAMED(hipErrorIllegalState, "the operation cannot be performed in the present state"),
    NAMED(hipErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    NAMED(hipErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    NAMED(hipErrorAssert, "device-side assert triggered"),
    NAMED(hipErrorHostMemoryAlreadyRegistered,
          "part or all of the requested memory range is already mapped"),
    NAMED(hipErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    NAMED(hipErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    NAMED(hipErrorStreamCaptureMerge,
          "operation would result in a merge of separate capture sequences"),
    NAMED(hipErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    NAMED(hipErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    NAMED(hipErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    NAMED(hipErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
    NAMED(hipErrorGraphExecUpdateFailure,
          "the graph update was not performed because it included changes which violated "
          "constraints specific to instantiated graph update"),
    NAMED(hipErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region"),
    NAMED(hipErrorLaunchFailure, "unspecified launch failure"),
    NAMED(hipErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"),
    NAMED(hipErrorNotSupported, "operation not supported"),
    NAMED(hipErrorUnknown, "unknown error"),
};

API_OF(const char *, hipGetErrorName)(hipError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "hipErrorUnknown";
}
API_OF(const char *, hipGetErrorString)(hipError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "unknown error";
}
API(hipDrvGetErrorName)(hipError_t error, const char **name) {
    return name ? (*name = hipGetErrorName(error), hipSuccess) : hipErrorInvalidValue;
}
API(hipDrvGetErrorString)(hipError_t error, const char **text) {
    return text ? (*text = hipGetErrorString(error), hipSuccess) : hipErrorInvalidValue;
}
API(hipGetLastError)(void) {
    hipError_t error = last;
    last = hipSuccess;
    return error;
}
API(hipExtGetLastError)(void) { return hipGetLastError(); }
API(hipPeekAtLastError)(void) { return last; }

hipError_t device_answer(hipError_t error) { return last = error; }

static void say(const char *format, va_list rest, const char *more) {
    char text[4096];
    vsnprintf(text, sizeof text, format, rest);
    fprintf(stderr, "strix-emulate: %s%s\n", text, more);
}

void device_say(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    say(format, rest, "");
    va_end(rest);
}

hipError_t device_lacks(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    say(format, rest, " is not supported; all later calls fail");
    va_end(rest);
    device_fail(hipErrorNotSupported);
    return hipErrorNotSupported;
}
