/* SPDX-License-Identifier: BSD-3-Clause */
/* Ignore the error of an entry point that the emulated device does not support. If the arguments
   are a code object and the name of a kernel that it does not support, ignore the error of this
   kernel instead. All later calls have to fail. */
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
