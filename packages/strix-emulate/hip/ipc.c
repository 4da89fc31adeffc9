/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory and events of other processes on the emulated device. Allocations in the pool of another
   process are mapped at addresses above our own pool, both in this process and in its server. */
#define _GNU_SOURCE
#include "device.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC "strix-1"
/* The content of the 64 bytes of a memory handle: an allocation in the pool of the process with the
   number `process`. That process has the pool open as the file descriptor `file`. */
struct shared {
    char magic[8];
    int32_t process, file;
    uint64_t offset, size, from_start;
};
_Static_assert(sizeof(struct shared) <= sizeof(hipIpcMemHandle_t), "a handle of HIP");

struct opened {
    struct shared what;
    char *address;
    unsigned users;
    struct opened *next;
};
static struct opened *all;

API(hipIpcGetMemHandle)(hipIpcMemHandle_t *handle, void *p) {
    ENTER();
    const struct pool_entry *entry = pool_find(p);
    REQUIRE(handle && entry && entry->kind & (KIND_DEVICE | KIND_MANAGED), hipErrorInvalidValue);
    struct shared what = {MAGIC,         getpid(),    pool_file(),
                          entry->offset, entry->size, (uint64_t)p - POOL_BASE - entry->offset};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &what, sizeof what);
    LEAVE(hipSuccess);
}

static hipError_t import(struct opened *one) {
    struct import_request request = {0, one->what.size, one->what.offset};
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", one->what.process, one->what.file);
    void *place;
    hipError_t error = pool_import(&place, path, one->what.offset, one->what.size);
    if (error) return error;
    request.offset = (uint64_t)place - POOL_BASE;
    struct part parts[] = {{&request, sizeof request}, {path, strlen(path)}};
    error = link_request(OP_IMPORT, parts, 2, NULL, NULL);
    if (error) return pool_drop(place), error;
    one->address = place;
    return hipSuccess;
}

API(hipIpcOpenMemHandle)(void **p, hipIpcMemHandle_t handle, unsigned flags) {
    struct shared what;
    ENTER();
    memcpy(&what, &handle, sizeof what);
    REQUIRE(p && !memcmp(what.magic, MAGIC, sizeof what.magic), hipErrorInvalidValue);
    REQUIRE(what.process != getpid(), hipErrorInvalidContext);
    struct opened *one =
        FIND(all, it->what.process == what.process && it->what.offset == what.offset);
    if (!one) {
        one = calloc(1, sizeof *one);
        REQUIRE(one, hipErrorOutOfMemory);
        one->what = what;
        hipError_t error = import(one);
        if (error) free(one);
        REQUIRE(!error, error);
        one->next = all;
        all = one;
    }
    one->users++;
    *p = one->address + what.from_start;
    LEAVE(hipSuccess);
}
API(hipIpcCloseMemHandle)(void *p) {
    ENTER();
    struct opened **at = PLACE(all,
                               (char *)p >= it->address && (char *)p < it->address + it->what.size),
                  *one = *at;
    REQUIRE(one, hipErrorInvalidValue);
    if (!--one->users) {
        pool_drop(one->address);
        *at = one->next;
        free(one);
    }
    LEAVE(hipSuccess);
}

/* A handle has no reference to its event, because an event that was recorded has already
   happened. */
API(hipIpcGetEventHandle)(hipIpcEventHandle_t *handle, hipEvent_t event) {
    ENTER();
    REQUIRE(handle && event_is_valid(event) && event->flags & hipEventInterprocess,
            hipErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, MAGIC, sizeof MAGIC);
    LEAVE(hipSuccess);
}
API(hipIpcOpenEventHandle)(hipEvent_t *event, hipIpcEventHandle_t handle) {
    ENTER();
    REQUIRE(event && !memcmp(&handle, MAGIC, sizeof MAGIC), hipErrorInvalidValue);
    hipError_t error = hipEventCreateWithFlags(event, hipEventInterprocess | hipEventDisableTiming);
    LEAVE(error ? error : event_record(*event));
}
