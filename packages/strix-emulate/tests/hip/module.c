/* SPDX-License-Identifier: BSD-3-Clause */
/* Load a code object, whose path is the argument, and launch its kernel with hipModuleLaunchKernel.
   Pass the kernel's arguments in both ways: as an array of pointers, and as packed bytes. The
   program needs no HIP compiler. */
#include "hip.h"

int main(int count, char **names) {
    enum { N = 300 };
    hipModule_t module;
    hipFunction_t add;
    float a[N], c[N], *data;
    int n = N, launches;
    void *variable;
    size_t size;
    if (count != 2) return 2;
    for (int i = 0; i < N; i++) a[i] = (float)i;
    CHECK(hipModuleLoad(&module, names[1]));
    CHECK(hipModuleGetFunction(&add, module, "_Z3addPKfS0_Pfi"));
    CHECK(hipMalloc((void **)&data, sizeof a));
    CHECK(hipMemcpy(data, a, sizeof a, TO_DEVICE));
    void *values[] = {&data, &data, &data, &n};
    CHECK(hipModuleLaunchKernel(add, 2, 1, 1, 256, 1, 1, 0, NULL, values, NULL));
    struct {
        float *a, *b, *c;
        int n;
    } packed = {data, data, data, n};
    size_t bytes = sizeof packed;
    void *extra[] = {(void *)1, &packed, (void *)2, &bytes, (void *)3};
    CHECK(hipModuleLaunchKernel(add, 2, 1, 1, 256, 1, 1, 0, NULL, NULL, extra));
    CHECK(hipDeviceSynchronize());
    CHECK(hipMemcpy(c, data, sizeof c, TO_HOST));
    CHECK(hipModuleGetGlobal(&variable, &size, module, "launches"));
    CHECK(hipMemcpy(&launches, variable, sizeof launches, TO_HOST));
    CHECK(hipModuleUnload(module));
    CHECK(hipFree(data));
    printf("c[299] %g, launches %d\n", c[N - 1], launches);
    return !(c[N - 1] == 4.0f * (N - 1) && launches == 2 && size == 4);
}
