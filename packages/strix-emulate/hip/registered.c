/* SPDX-License-Identifier: BSD-3-Clause */
/* Kernels and variables that clang compiled into the host program. The program's constructors
   register each of them with the address of a stub or a shadow variable on the host. A fat binary
   is loaded when one of its symbols is first used. */
#define _GNU_SOURCE
#include "device.h"
#include <stdlib.h>
#include <string.h>

#define FAT_MAGIC 0x48495046u /* "HIPF" */
struct fat_wrapper {
    uint32_t magic, version;
    const void *image;
    void *unused;
};
struct fat_binary {
    const void *image;
    hipModule_t module;
};
struct symbol {
    const void *host;
    struct fat_binary *binary;
    char *name;
    struct symbol *next;
    void *managed; /* memory of a managed variable, to which the device's variable points */
};
/* A hash table by the address on the host, because libraries register thousands of symbols. */
#define BUCKETS 4096
static struct symbol *symbols[BUCKETS];

struct call {
    dim3 grid, block;
    size_t lds;
    hipStream_t stream;
};
static _Thread_local struct call calls[16];
static _Thread_local int call_count;

static struct symbol **bucket(const void *host) {
    return symbols + ((uintptr_t)host >> 4) % BUCKETS;
}

static hipError_t load(struct fat_binary *binary) {
    size_t size = binary->image ? module_image_size(binary->image) : 0;
    if (!size) return hipErrorNoBinaryForGpu;
    hipError_t error = module_load(&binary->module, binary->image, size, binary->image);
    for (int i = 0; !error && i < BUCKETS; i++)
        for (struct symbol *s = symbols[i]; !error && s; s = s->next) {
            void *variable;
            if (s->binary != binary || !s->managed) continue;
            error = module_symbol(&variable, NULL, binary->module, s->name);
            if (!error) memcpy(variable, &s->managed, sizeof s->managed);
        }
    return error;
}

static hipError_t find(struct symbol **found, const void *host) {
    struct symbol *s = FIND(*bucket(host), it->host == host);
    if (!s || !host) return hipErrorInvalidDeviceFunction;
    *found = s;
    struct fat_binary *binary = s->binary;
    return binary->module ? hipSuccess : load(binary);
}

hipError_t registered_function(hipFunction_t *function, const void *host) {
    struct symbol *s;
    /* A handle from hipGetFuncBySymbol or hipModuleGetFunction is accepted in place of a symbol. */
    if (module_knows((hipFunction_t)host)) return *function = (hipFunction_t)host, hipSuccess;
    hipError_t error = find(&s, host);
    return error ? error : module_function(function, s->binary->module, s->name);
}

hipError_t registered_variable(void **address, size_t *size, const void *host) {
    struct symbol *s;
    if (find(&s, host)) return hipErrorInvalidSymbol;
    return module_symbol(address, size, s->binary->module, s->name);
}

static void add(void **binary, const void *host, const char *name, void *managed) {
    struct symbol *made = malloc(sizeof *made);
    if (!made || !binary) return;
    device_enter();
    *made =
        (struct symbol){host, (struct fat_binary *)binary, strdup(name), *bucket(host), managed};
    *bucket(host) = made;
    device_leave(hipSuccess);
}

API_OF(void **, __hipRegisterFatBinary)(const void *data) {
    const struct fat_wrapper *wrapper = data;
    struct fat_binary *made = calloc(1, sizeof *made);
    if (made && wrapper->magic == FAT_MAGIC) made->image = wrapper->image;
    return (void **)made;
}
API_OF(void, __hipUnregisterFatBinary)(void **data) {
    struct fat_binary *binary = (struct fat_binary *)data;
    /* This function runs when the program exits. It does nothing if the device has failed. */
    if (!binary || device_enter()) return (void)device_leave(hipSuccess);
    for (int i = 0; i < BUCKETS; i++)
        for (struct symbol **at, *one; (one = *(at = PLACE(symbols[i], it->binary == binary)));) {
            *at = one->next;
            free(one->name), free(one);
        }
    if (binary->module) module_unload(binary->module);
    free(binary);
    device_leave(hipSuccess);
}
API_OF(void, __hipRegisterFunction)(void **binary, const void *host, char *name, const char *device,
                                    unsigned limit, void *a, void *b, void *c, void *d, int *e) {
    add(binary, host, device, NULL);
}
API_OF(void, __hipRegisterVar)(void **binary, void *host, char *name, char *device, int external,
                               size_t size, int constant, int global) {
    add(binary, host, device, NULL);
}

/* Allocates a managed variable. The host accesses it through *pointer, which must therefore be set
   when the program starts. */
API_OF(void, __hipRegisterManagedVar)(void *binary, void **pointer, void *initial, const char *name,
                                      size_t size, unsigned alignment) {
    device_enter();
    if (!pool_allocate(pointer, size, KIND_MANAGED | KIND_IMAGE)) {
        memcpy(*pointer, initial, size);
        add(binary, pointer, name, *pointer);
    }
    device_leave(hipSuccess);
}

/* clang compiles <<<grid, block, lds, stream>>> to this call, which comes before the call of the
   kernel's stub. The stub calls __hipPopCallConfiguration. */
API(__hipPushCallConfiguration)(dim3 grid, dim3 block, size_t lds, hipStream_t stream) {
    if (call_count == sizeof calls / sizeof *calls) return hipErrorInvalidConfiguration;
    calls[call_count++] = (struct call){grid, block, lds, stream};
    return hipSuccess;
}
API(__hipPopCallConfiguration)(dim3 *grid, dim3 *block, size_t *lds, hipStream_t *stream) {
    if (!call_count) return hipErrorInvalidConfiguration;
    struct call call = calls[--call_count];
    *grid = call.grid, *block = call.block, *lds = call.lds, *stream = call.stream;
    return hipSuccess;
}

API(hipGetFuncBySymbol)(hipFunction_t *function, const void *host) {
    CHECKED(function, hipErrorInvalidValue, registered_function(function, host));
}
API(hipGetSymbolAddress)(void **address, const void *host) {
    CHECKED(address, hipErrorInvalidValue, registered_variable(address, NULL, host));
}
API(hipGetSymbolSize)(size_t *size, const void *host) {
    CHECKED(size, hipErrorInvalidValue, registered_variable(NULL, size, host));
}

static hipError_t at_symbol(char **address, const void *host, size_t offset, size_t size) {
    size_t whole;
    ENTER();
    hipError_t error = registered_variable((void **)address, &whole, host);
    REQUIRE(!error, error);
    REQUIRE(offset <= whole && size <= whole - offset, hipErrorInvalidValue);
    *address += offset;
    LEAVE(hipSuccess);
}
API(hipMemcpyToSymbolAsync)(const void *host, const void *from, size_t size, size_t offset,
                            hipMemcpyKind kind, hipStream_t stream) {
    char *to;
    hipError_t error = at_symbol(&to, host, offset, size);
    return error ? error : hipMemcpyAsync(to, from, size, kind, stream);
}
API(hipMemcpyToSymbol)(const void *host, const void *from, size_t size, size_t offset,
                       hipMemcpyKind kind) {
    return hipMemcpyToSymbolAsync(host, from, size, offset, kind, NULL);
}
API(hipMemcpyFromSymbolAsync)(void *to, const void *host, size_t size, size_t offset,
                              hipMemcpyKind kind, hipStream_t stream) {
    char *from;
    hipError_t error = at_symbol(&from, host, offset, size);
    return error ? error : hipMemcpyAsync(to, from, size, kind, stream);
}
API(hipMemcpyFromSymbol)(void *to, const void *host, size_t size, size_t offset,
                         hipMemcpyKind kind) {
    return hipMemcpyFromSymbolAsync(to, host, size, offset, kind, NULL);
}
