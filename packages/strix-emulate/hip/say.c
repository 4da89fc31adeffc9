/* SPDX-License-Identifier: BSD-3-Clause */
/* What the runtime has to say. */
#include "device.h"
#include <stdarg.h>
#include <stdio.h>

void device_say(const char *format, ...) {
    char text[4096];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    fprintf(stderr, "strix-emulate: %s\n", text);
}
