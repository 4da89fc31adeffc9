/* SPDX-License-Identifier: BSD-3-Clause */
/* The interface hipLibrary. A library is a module here. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

/* The options are for a compiler, which this runtime does not have, so they have no effect. HIP 7.1
   declares them with one more level of pointers. */
#if defined(HIP_VERSION) && HIP_VERSION < 70200000
typedef hipJitOption **jit_options;
typedef hipLibraryOption **library_options;
#else
typedef hipJitOption *jit_options;
typedef hipLibraryOption *library_options;
#endif

#define CALLER __builtin_return_address(0)
API(hipLibraryLoadData)(hipLibrary_t *library, const void *image, jit_options a, void **b,
                        unsigned c, library_options d, void **e, unsigned f) {
    return module_open((hipModule_t *)library, image, CALLER);
}
API(hipLibraryLoadFromFile)(hipLibrary_t *library, const char *path, jit_options a, void **b,
                            unsigned c, library_options d, void **e, unsigned f) {
    return module_read((hipModule_t *)library, path, CALLER);
}
API(hipLibraryUnload)(hipLibrary_t library) {
    ENTER();
    LEAVE(module_unload((hipModule_t)library));
}
API(hipLibraryGetKernel)(hipKernel_t *kernel, hipLibrary_t library, const char *name) {
    CHECKED(kernel && name, hipErrorInvalidValue,
            module_function((hipFunction_t *)kernel, (hipModule_t)library, name));
}

/* Writes the handles of at most `room` kernels, in the order of their names. Sets count to the
   number of kernels in the module. */
static hipError_t enumerate(hipModule_t module, hipFunction_t *kernels, unsigned room,
                            unsigned *count) {
    char *names;
    size_t size;
    hipError_t error = module_kernels(&names, &size, module);
    if (error) return error;
    *count = 0;
    for (const char *name = names; !error && name < names + size; name += strlen(name) + 1) {
        if (*count < room) error = module_function(kernels + *count, module, name);
        ++*count;
    }
    free(names);
    return error;
}
API(hipModuleGetFunctionCount)(unsigned *count, hipModule_t module) {
    CHECKED(count, hipErrorInvalidValue, enumerate(module, NULL, 0, count));
}
API(hipLibraryGetKernelCount)(unsigned *count, hipLibrary_t library) {
    return hipModuleGetFunctionCount(count, (hipModule_t)library);
}
API(hipLibraryEnumerateKernels)(hipKernel_t *kernels, unsigned room, hipLibrary_t library) {
    unsigned count;
    ENTER();
    REQUIRE(kernels, hipErrorInvalidValue);
    LEAVE(enumerate((hipModule_t)library, (hipFunction_t *)kernels, room, &count));
}
API(hipKernelGetLibrary)(hipLibrary_t *library, hipKernel_t kernel) {
    CHECKED(library && module_knows((hipFunction_t)kernel), hipErrorInvalidValue,
            (*library = (hipLibrary_t)((hipFunction_t)kernel)->module, hipSuccess));
}
API(hipKernelGetName)(const char **name, hipKernel_t kernel) {
    CHECKED(name && module_knows((hipFunction_t)kernel), hipErrorInvalidValue,
            (*name = module_name((hipFunction_t)kernel), hipSuccess));
}
