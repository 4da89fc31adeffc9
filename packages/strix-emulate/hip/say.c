/* SPDX-License-Identifier: BSD-3-Clause */
/* What the runtime has to say. */
#include "device.h"
#include <stdarg.h>
#include <stdio.h>

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
