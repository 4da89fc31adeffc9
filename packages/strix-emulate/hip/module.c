/* SPDX-License-Identifier: BSD-3-Clause */
/* Modules, with their kernels and variables, and the arguments of launches. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ihipModule_t {
    uint32_t number;
    void *image;
    hipModule_t next;
};
static hipModule_t modules;
static hipFunction_t functions;

static bool is_loaded(hipModule_t module) { return module && FIND(modules, it == module); }

bool module_knows(hipFunction_t function) { return function && FIND(functions, it == function); }

static uint64_t read_int(const char *at, int size) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)size);
    return value;
}

/* Returns the size in bytes of an ELF file or of clang's offload bundle, plain or compressed. The
   size comes from the headers. Returns 0 for any other data, and for a compressed bundle of version
   1, whose header lacks the size. Sources: ELF-64; ClangOffloadBundler, "Bundled Binary File
   Layout" and "Compressed Bundle". */
size_t module_image_size(const void *image) {
    const char *p = image;
    if (!memcmp(p, "\177ELF\2", 5)) {
        size_t end = read_int(p + 40, 8) + read_int(p + 58, 2) * read_int(p + 60, 2);
        const char *segment = p + read_int(p + 32, 8);
        for (uint64_t i = 0; i < read_int(p + 56, 2); i++, segment += read_int(p + 54, 2)) {
            size_t last = read_int(segment + 8, 8) + read_int(segment + 32, 8);
            end = last > end ? last : end;
        }
        return end;
    }
    if (!memcmp(p, "__CLANG_OFFLOAD_BUNDLE__", 24)) {
        const char *entry = p + 32;
        size_t end = 32;
        for (uint64_t i = 0; i < read_int(p + 24, 8); i++) {
            size_t last = read_int(entry, 8) + read_int(entry + 8, 8);
            entry += 24 + read_int(entry + 16, 8);
            end = last > end ? last : end;
        }
        return (size_t)(entry - p) > end ? (size_t)(entry - p) : end;
    }
    if (!memcmp(p, "CCOB", 4)) {
        uint64_t version = read_int(p + 4, 2);
        return version == 2 ? read_int(p + 8, 4) : version == 3 ? read_int(p + 8, 8) : 0;
    }
    return 0;
}

hipError_t module_load(hipModule_t *module, const void *image, size_t size, const void *owner) {
    struct load_reply *loaded;
    size_t got;
    Dl_info library;
    const char *origin = dladdr(owner, &library) && library.dli_fname ? library.dli_fname : "";
    struct load_request from = {(uint32_t)strlen(origin), 0};
    struct part parts[] = {{&from, sizeof from}, {origin, strlen(origin)}, {image, size}};
    hipError_t error = link_request(OP_LOAD, parts, 3, (void **)&loaded, &got);
    if (error) return error;
    uint32_t number = got == sizeof *loaded ? loaded->module : 0;
    uint64_t length = got == sizeof *loaded ? loaded->size : 0;
    free(loaded);
    void *place = NULL;
    error = pool_allocate(&place, length, KIND_IMAGE);
    if (!error && length) {
        struct place_request where = {number, 0, (uint64_t)place - POOL_BASE};
        struct part part = {&where, sizeof where};
        error = link_request(OP_PLACE, &part, 1, NULL, NULL);
    }
    hipModule_t made = error ? NULL : malloc(sizeof *made);
    if (!made) {
        if (place) pool_free(place, KIND_IMAGE);
        struct module_request which = {number, 0};
        struct part part = {&which, sizeof which};
        link_request(OP_UNLOAD, &part, 1, NULL, NULL);
        return error ? error : hipErrorOutOfMemory;
    }
    *made = (struct ihipModule_t){number, place, modules};
    *module = modules = made;
    return hipSuccess;
}

hipError_t module_unload(hipModule_t module) {
    hipModule_t *at = PLACE(modules, it == module);
    if (!module || !*at) return hipErrorInvalidHandle;
    *at = module->next;
    for (hipFunction_t *at, one; (one = *(at = PLACE(functions, it->module == module)));) {
        *at = one->next;
        free(one->arguments), free(one->name), free(one);
    }
    if (module->image) pool_free(module->image, KIND_IMAGE);
    struct module_request which = {module->number, 0};
    struct part part = {&which, sizeof which};
    free(module);
    return link_request(OP_UNLOAD, &part, 1, NULL, NULL);
}

hipError_t module_function(hipFunction_t *function, hipModule_t module, const char *name) {
    if (!is_loaded(module)) return hipErrorInvalidHandle;
    for (hipFunction_t f = functions; f; f = f->next)
        if (f->module == module && !strcmp(f->name, name)) return *function = f, hipSuccess;
    struct module_request which = {module->number, 0};
    struct part parts[] = {{&which, sizeof which}, {name, strlen(name)}};
    struct function_reply *facts;
    size_t size;
    hipError_t error = link_request(OP_FUNCTION, parts, 2, (void **)&facts, &size);
    if (error) return error;
    hipFunction_t made = calloc(1, sizeof *made);
    size_t rest = size - sizeof *facts;
    if (!made || size < sizeof *facts || rest != facts->arguments * sizeof *made->arguments)
        return free(made), free(facts), hipErrorUnknown;
    *made = (struct ihipModuleSymbol_t){module, *facts, malloc(rest + 1), strdup(name), functions};
    memcpy(made->arguments, facts + 1, rest);
    free(facts);
    *function = functions = made;
    return hipSuccess;
}

hipError_t module_symbol(void **address, size_t *size, hipModule_t module, const char *name) {
    if (!is_loaded(module)) return hipErrorInvalidHandle;
    struct module_request which = {module->number, 0};
    struct part parts[] = {{&which, sizeof which}, {name, strlen(name)}};
    struct symbol_reply *symbol;
    size_t got;
    hipError_t error = link_request(OP_SYMBOL, parts, 2, (void **)&symbol, &got);
    if (error) return error;
    if (address) *address = (char *)module->image + symbol->offset;
    if (size) *size = symbol->size;
    free(symbol);
    return hipSuccess;
}

hipError_t module_kernels(char **names, size_t *size, hipModule_t module) {
    if (!is_loaded(module)) return hipErrorInvalidHandle;
    struct module_request which = {module->number, 0};
    struct part part = {&which, sizeof which};
    return link_request(OP_KERNELS, &part, 1, (void **)names, size);
}

const char *module_name(hipFunction_t function) {
    return module_knows(function) ? function->name : "";
}

hipError_t module_work(struct work *work, hipFunction_t function, dim3 grid, dim3 block, size_t lds,
                       void **values, void **extra, bool cooperative) {
    const struct function_reply *facts = &function->facts;
    struct launch_request launch = {
        facts->function, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},     (uint32_t)lds,
        cooperative,     (uint32_t)device_stack(), (uint32_t)(device_heap() / 4096)};
    *work = (struct work){.kind = WORK_NOTHING};
    if (lds > UINT32_MAX || !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z)
        return hipErrorInvalidConfiguration;
    char *packed = calloc(1, facts->kernarg + 1u);
    if (!packed) return hipErrorOutOfMemory;
    hipError_t error = hipSuccess;
    if (values) {
        for (uint32_t i = 0; i < facts->arguments; i++)
            memcpy(packed + function->arguments[i].offset, values[i], function->arguments[i].size);
    } else if (extra) {
        const void *buffer = NULL;
        size_t size = 0;
        for (; *extra != HIP_LAUNCH_PARAM_END; extra += 2) {
            if (*extra == HIP_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
            else if (*extra == HIP_LAUNCH_PARAM_BUFFER_SIZE) size = *(size_t *)extra[1];
            else error = hipErrorInvalidValue;
            if (error) break;
        }
        if (size && !buffer) error = hipErrorInvalidValue;
        if (!error && size) memcpy(packed, buffer, size < facts->kernarg ? size : facts->kernarg);
    } else if (facts->arguments) {
        error = hipErrorInvalidValue;
    }
    if (error) return free(packed), error;
    *work = (struct work){.kind = WORK_KERNEL, .kernel = {function, launch, packed}};
    return hipSuccess;
}

static hipError_t load(hipModule_t *module, const void *image, size_t size, const void *caller) {
    ENTER();
    REQUIRE(module && image, hipErrorInvalidValue);
    if (!size) size = module_image_size(image);
    REQUIRE(size, hipErrorInvalidImage);
    LEAVE(module_load(module, image, size, caller));
}
hipError_t module_open(hipModule_t *module, const void *image, const void *caller) {
    return load(module, image, 0, caller);
}

#define CALLER __builtin_return_address(0)
API(hipModuleLoadData)(hipModule_t *module, const void *image) {
    return load(module, image, 0, CALLER);
}
API(hipModuleLoadDataEx)(hipModule_t *module, const void *image, unsigned count,
                         hipJitOption *options, void **values) {
    return load(module, image, 0, CALLER);
}
API(hipModuleLoadFatBinary)(hipModule_t *module, const void *image) {
    return load(module, image, 0, CALLER);
}
hipError_t module_read(hipModule_t *module, const char *path, const void *caller) {
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file) return device_enter(), device_leave(hipErrorFileNotFound);
    char *bytes = NULL;
    size_t size = 0, room = 0;
    for (size_t n = 1; n;) {
        if (size == room) {
            char *more = realloc(bytes, room = room * 2 + 65536);
            if (!more) break;
            bytes = more;
        }
        n = fread(bytes + size, 1, room - size, file);
        size += n;
    }
    fclose(file);
    hipError_t error = load(module, bytes, size, caller);
    free(bytes);
    return error;
}
API(hipModuleLoad)(hipModule_t *module, const char *path) {
    return module_read(module, path, CALLER);
}
API(hipModuleUnload)(hipModule_t module) {
    ENTER();
    LEAVE(module_unload(module));
}
API(hipModuleGetFunction)(hipFunction_t *function, hipModule_t module, const char *name) {
    CHECKED(function && name, hipErrorInvalidValue, module_function(function, module, name));
}
API(hipModuleGetGlobal)(hipDeviceptr_t *address, size_t *size, hipModule_t module,
                        const char *name) {
    CHECKED(name && (address || size), hipErrorInvalidValue,
            module_symbol(address, size, module, name));
}
