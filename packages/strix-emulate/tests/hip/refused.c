/* SPDX-License-Identifier: BSD-3-Clause */
/* Call an entry point that the emulated device does not support, and ignore the error. All later
   calls have to fail. If the arguments are the path of a code object and the name of an unsupported
   kernel in it, ask for this kernel instead of calling the entry point. */
#include "hip.h"

hipError_t hipCreateTextureObject(void *, const void *, const void *, const void *);
hipError_t hipCtxGetApiVersion(void *, int *);

int main(int count, char **names) {
    hipModule_t module;
    hipFunction_t kernel;
    void *memory;
    if (count == 3) {
        CHECK(hipModuleLoad(&module, names[1]));
        hipModuleGetFunction(&kernel, module, "no such kernel");
        printf("of no kernel: %s\n", hipGetErrorName(hipDeviceSynchronize()));
        hipModuleGetFunction(&kernel, module, names[2]);
    } else {
        hipCtxGetApiVersion(NULL, NULL);
        printf("refused by HIP: %s\n", hipGetErrorName(hipDeviceSynchronize()));
        hipCreateTextureObject(NULL, NULL, NULL, NULL);
    }
    hipGetLastError();
    printf("after: %s, %s\n", hipGetErrorName(hipDeviceSynchronize()),
           hipGetErrorName(hipMalloc(&memory, 4)));
    return 0;
}
