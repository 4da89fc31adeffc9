/* SPDX-License-Identifier: BSD-3-Clause */
/* What the files of the library share. Every entry point holds one lock from ENTER to LEAVE. */
#pragma once
#include "abi.h"
#include "protocol.h"
#include <stdbool.h>

/* Entry points by state (build.py reads these words): API does what HIP does; HINT is accepted
   and has no effect here. */
#define API_OF(type, name) __attribute__((visibility("default"))) type name
#define API(name) API_OF(hipError_t, name)
#define HINT(name) API(name)

/* Takes the lock; the error of a device that can no longer be used, if any. */
hipError_t device_enter(void);
/* Releases the lock, remembers an error for hipGetLastError, and returns it. */
hipError_t device_leave(hipError_t error);
/* Makes all later calls fail with this error. */
void device_fail(hipError_t error);
/* Refuses what a GPU would do: says so, and no later call succeeds, so that a caller who ignores
   the error does not compute with what was not done. */
__attribute__((format(printf, 1, 2))) hipError_t device_lacks(const char *format, ...);
#define ENTER()                                          \
    do {                                                 \
        hipError_t error_ = device_enter();              \
        if (error_) return device_leave(error_);         \
    } while (0)
#define LEAVE(error) return device_leave(error)
#define REQUIRE(condition, error)                        \
    do {                                                 \
        if (!(condition)) return device_leave(error);    \
    } while (0)
__attribute__((format(printf, 1, 2))) void device_say(const char *format, ...);

/* pool.c: device memory. map creates it at the first use. */
hipError_t pool_map(void);
int pool_file(void);
size_t pool_size(void);
size_t pool_used(void);
size_t pool_peak(void);
hipError_t pool_allocate(void **address, size_t size, enum pool_kind kind);
/* Frees the allocation that starts at the address, if it is of one of the kinds (bits). */
hipError_t pool_free(void *address, unsigned kinds);
const struct pool_entry *pool_find(const void *address);
/* Whether the bytes are host memory or lie in one allocation. */
bool pool_holds(const void *address, size_t size);
bool pool_is_device(const void *address);

/* link.c: the emulator's process. Sends a request; *reply is to be freed. A failure's message goes
   to standard error. */
struct part {
    const void *data;
    size_t size;
};
hipError_t link_request(uint32_t operation, const struct part *parts, int count, void **reply,
                        size_t *reply_size);

/* module.c */
struct ihipModuleSymbol_t {
    hipModule_t module;
    struct function_reply facts;
    struct function_argument *arguments;
    char *name;
    hipFunction_t next;
};
/* owner: an address in the library or program that has the image */
hipError_t module_load(hipModule_t *module, const void *image, size_t size, const void *owner);
size_t module_image_size(const void *image);
hipError_t module_unload(hipModule_t module);
hipError_t module_function(hipFunction_t *function, hipModule_t module, const char *name);
hipError_t module_symbol(void **address, size_t *size, hipModule_t module, const char *name);
hipError_t module_launch(hipFunction_t function, dim3 grid, dim3 block, size_t lds, void **values,
                         void **extra, bool cooperative);
bool module_knows(hipFunction_t function);

/* registered.c: the kernel or variable behind a symbol of the host program. */
hipError_t registered_function(hipFunction_t *function, const void *host);
hipError_t registered_variable(void **address, size_t *size, const void *host);

/* launch.c: sizes in threads, as one kind of launch has them */
hipError_t hipExtModuleLaunchKernel(hipFunction_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                                    uint32_t, size_t, hipStream_t, void **, void **, hipEvent_t,
                                    hipEvent_t, uint32_t);

/* stream.c */
bool stream_is_valid(hipStream_t stream);
