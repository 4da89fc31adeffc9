// SPDX-License-Identifier: BSD-3-Clause
// Copies and fills of 2D and 3D regions, libraries and their kernels, memory pools, stream priorities, and a
// reset. The argument is this program's code object. Exits with 0 if all numbers are right.
#include "hip.h"
#include <string.h>

extern "C" {
hipError_t hipMalloc3D(hipPitchedPtr *, hipExtent);
hipError_t hipMemcpy3D(const hipMemcpy3DParms *);
hipError_t hipDrvMemcpy3D(const HIP_MEMCPY3D *);
hipError_t hipMemset3D(hipPitchedPtr, int, hipExtent);
hipError_t hipMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
hipError_t hipLibraryLoadFromFile(void **, const char *, void *, void **, unsigned, void *, void **, unsigned);
hipError_t hipLibraryGetKernel(void **, void *, const char *);
hipError_t hipLibraryGetKernelCount(unsigned *, void *);
hipError_t hipLibraryEnumerateKernels(void **, unsigned, void *);
hipError_t hipKernelGetName(const char **, void *);
hipError_t hipKernelGetLibrary(void **, void *);
hipError_t hipLibraryUnload(void *);
hipError_t hipMemPoolCreate(void **, const hipMemPoolProps *);
hipError_t hipMemPoolDestroy(void *);
hipError_t hipDeviceGetDefaultMemPool(void **, int);
hipError_t hipDeviceGetMemPool(void **, int);
hipError_t hipDeviceSetMemPool(int, void *);
hipError_t hipMemPoolGetAttribute(void *, int, void *);
hipError_t hipMemPoolSetAttribute(void *, int, void *);
hipError_t hipMallocFromPoolAsync(void **, size_t, void *, hipStream_t);
hipError_t hipStreamCreateWithPriority(hipStream_t *, unsigned, int);
hipError_t hipStreamGetPriority(hipStream_t, int *);
hipError_t hipDeviceReset(void);
}

extern "C" __global__ void add(int *data, int more) { data[__builtin_amdgcn_workitem_id_x()] += more; }
extern "C" __global__ void again(int *data) { data[__builtin_amdgcn_workitem_id_x()] *= 2; }

static int boxes() {
    enum { W = 40, H = 5, D = 4 };
    unsigned char host[D][H][W], back[D][H][W];
    hipPitchedPtr there, here = {host, W, W, H}, again = {back, W, W, H};
    for (int i = 0; i < W * H * D; i++) (&host[0][0][0])[i] = (unsigned char)i;
    CHECK(hipMalloc3D(&there, {W, H, D}));
    if (there.pitch < W || there.ysize != H) return printf("pitch %zu\n", there.pitch), 1;
    CHECK(hipMemset3D(there, 7, {W, H, D}));
    /* copy a box from the middle of the host's array to the middle of the device's */
    hipMemcpy3DParms to = {NULL, {3, 1, 2}, here, NULL, {8, 2, 1}, there, {20, 3, 2}, TO_DEVICE};
    hipMemcpy3DParms from = {NULL, {0, 0, 0}, there, NULL, {0, 0, 0}, again, {W, H, D}, TO_HOST};
    CHECK(hipMemcpy3D(&to));
    CHECK(hipMemcpy3D(&from));
    for (int z = 0; z < D; z++)
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x++) {
                bool in = x >= 8 && x < 28 && y >= 2 && z >= 1 && z < 3;
                int expected = in ? host[z + 1][y - 1][x - 5] : 7;
                if (back[z][y][x] != expected) return printf("(%d %d %d) %d\n", x, y, z, back[z][y][x]), 1;
            }
    HIP_MEMCPY3D other = {1, 1, 1, 0, hipMemoryTypeDevice, NULL, there.ptr, NULL, there.pitch, H,
                          0, 0, 0, 0, hipMemoryTypeHost, back, NULL, NULL, W, H, 30, 2, 2};
    CHECK(hipDrvMemcpy3D(&other));
    if (back[1][1][29] != 7 || back[0][1][7] != host[2][1][3]) return printf("driver %d\n", back[0][1][7]), 1;
    hipMemcpy3DParms narrow = to;
    narrow.dstPtr.pitch = 19;
    printf("pitch: %s, %s\n", NAME(hipMemcpy3D(&narrow)),
           NAME(hipMemcpy2D(there.ptr, there.pitch, host, 9, 10, 1, TO_DEVICE)));
    return 0;
}

static int library(const char *path) {
    void *loaded, *kernels[4] = {NULL}, *one, *owner;
    unsigned count;
    const char *first, *second;
    int *data, more = 5, host[4];
    CHECK(hipLibraryLoadFromFile(&loaded, path, NULL, NULL, 0, NULL, NULL, 0));
    CHECK(hipLibraryGetKernelCount(&count, loaded));
    CHECK(hipLibraryEnumerateKernels(kernels, 4, loaded));
    CHECK(hipKernelGetName(&first, kernels[0]));
    CHECK(hipKernelGetName(&second, kernels[1]));
    CHECK(hipLibraryGetKernel(&one, loaded, "add"));
    CHECK(hipKernelGetLibrary(&owner, one));
    if (count != 2 || kernels[2] || one != kernels[0] || owner != loaded)
        return printf("%u kernels\n", count), 1;
    CHECK(hipMalloc((void **)&data, 16));
    CHECK(hipMemset(data, 0, 16));
    void *values[] = {&data, &more};
    CHECK(hipLaunchKernel(one, 1, 4, values, 0, NULL));
    CHECK(hipMemcpy(host, data, 16, TO_HOST));
    if (host[3] != 5) return printf("added %d\n", host[3]), 1;
    printf("library: %s, %s; not there: %s\n", first, second, NAME(hipLibraryGetKernel(&one, loaded, "none")));
    CHECK(hipLibraryUnload(loaded));
    return hipLibraryUnload(loaded) == 0;
}

enum { THRESHOLD = 4, USED = 7, HIGH = 8 };
static size_t get(void *pool, int attribute) {
    size_t value;
    return hipMemPoolGetAttribute(pool, attribute, &value) ? (size_t)-1 : value;
}
static int pools() {
    hipMemPoolProps p = {hipMemAllocationTypePinned, {}, {hipMemLocationTypeDevice, 0}, NULL, 0, {0}};
    void *ours, *first, *now, *a, *b, *c;
    size_t threshold = 1 << 20, zero = 0;
    CHECK(hipMemPoolCreate(&ours, &p));
    CHECK(hipDeviceGetDefaultMemPool(&first, 0));
    CHECK(hipMemPoolSetAttribute(ours, THRESHOLD, &threshold));
    CHECK(hipMallocFromPoolAsync(&a, 1000, ours, NULL));
    CHECK(hipMallocAsync(&b, 300, NULL));
    CHECK(hipDeviceSetMemPool(0, ours));
    CHECK(hipMallocAsync(&c, 500, NULL));
    if (get(ours, USED) != 1500 || get(first, USED) != 300)
        return printf("used %zu\n", get(ours, USED)), 1;
    CHECK(hipFree(a));
    CHECK(hipDeviceGetMemPool(&now, 0));
    if (now != ours || get(ours, USED) != 500 || get(ours, HIGH) != 1500 ||
        get(ours, THRESHOLD) != threshold || get(first, THRESHOLD) != 0)
        return printf("high %zu\n", get(ours, HIGH)), 1;
    CHECK(hipMemPoolSetAttribute(ours, HIGH, &zero));
    if (get(ours, HIGH) != 500 || !hipMemPoolSetAttribute(ours, USED, &zero)) return printf("set\n"), 1;
    CHECK(hipFreeAsync(c, NULL));
    CHECK(hipMemPoolDestroy(ours));
    CHECK(hipDeviceGetMemPool(&now, 0));
    return now != first;
}

static int priorities() {
    for (int requested = -3; requested < 4; requested++) {
        hipStream_t stream;
        int granted;
        CHECK(hipStreamCreateWithPriority(&stream, 0, requested));
        CHECK(hipStreamGetPriority(stream, &granted));
        const int expected = requested < -1 ? -1 : requested > 1 ? 1 : requested;
        if (granted != expected) return printf("priority %d\n", granted), 1;
        CHECK(hipStreamDestroy(stream));
    }
    return 0;
}

static int reset() {
    hipStream_t stream;
    int *data, host[4];
    CHECK(hipStreamCreate(&stream));
    CHECK(hipMalloc((void **)&data, 16));
    CHECK(hipDeviceReset());
    printf("reset: %s, %s\n", NAME(hipStreamSynchronize(stream)), NAME(hipFree(data)));
    CHECK(hipMalloc((void **)&data, 16));
    CHECK(hipMemset(data, 0, 16));
    add<<<1, 4>>>(data, 2);
    CHECK(hipMemcpy(host, data, 16, TO_HOST));
    return host[3] != 2;
}

int main(int, char **names) { return boxes() || library(names[1]) || pools() || priorities() || reset(); }
