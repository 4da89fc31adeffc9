// SPDX-License-Identifier: BSD-3-Clause
// Two devices: each thread has a current device, memory and streams belong to a device, and peers read each
// other's memory. Exits with 0 if everything is right.
#include "hip.h"
#include <pthread.h>

extern "C" {
hipError_t hipGetDeviceCount(int *);
hipError_t hipGetDevice(int *);
hipError_t hipStreamGetDevice(hipStream_t, int *);
hipError_t hipPointerGetAttribute(void *, int, void *);
hipError_t hipDeviceCanAccessPeer(int *, int, int);
hipError_t hipDeviceEnablePeerAccess(int, unsigned);
hipError_t hipDeviceDisablePeerAccess(int);
hipError_t hipMemcpyPeer(void *, int, const void *, int, size_t);
hipError_t hipDeviceGetPCIBusId(char *, int, int);
}

__global__ void add(int *data, const int *more) {
    int t = __builtin_amdgcn_workitem_id_x();
    data[t] += more[t];
}
static void *read_device(void *device) { return hipGetDevice((int *)device), (void *)0; }
#define SAY(call) printf("%s: %s\n", #call, hipGetErrorName(call))

int main() {
    int devices, can, other = -1, host[32], of_memory = -1, of_stream = -1;
    int *first, *second;
    hipStream_t stream;
    char place[32];
    pthread_t thread;
    CHECK(hipGetDeviceCount(&devices));
    if (devices == 1) {
        SAY(hipSetDevice(1));
        SAY(hipDeviceEnablePeerAccess(0, 0));
        return 0;
    }
    CHECK(hipMalloc((void **)&first, 128));
    CHECK(hipSetDevice(1));
    CHECK(hipMalloc((void **)&second, 128));
    CHECK(hipStreamCreate(&stream));
    pthread_create(&thread, NULL, read_device, &other);
    pthread_join(thread, NULL);
    CHECK(hipPointerGetAttribute(&of_memory, 9, second));
    CHECK(hipStreamGetDevice(stream, &of_stream));
    CHECK(hipDeviceGetPCIBusId(place, 32, 1));
    printf("%d devices, thread %d, memory %d, stream %d, %s\n", devices, other, of_memory, of_stream,
           place);
    CHECK(hipDeviceCanAccessPeer(&can, 1, 0));
    SAY(hipDeviceDisablePeerAccess(0));
    SAY(hipDeviceEnablePeerAccess(0, 0));
    SAY(hipDeviceEnablePeerAccess(0, 0));
    SAY(hipDeviceEnablePeerAccess(1, 0));
    for (int i = 0; i < 32; i++) host[i] = i;
    CHECK(hipMemcpy(first, host, 128, TO_DEVICE));
    CHECK(hipMemcpyPeer(second, 1, first, 0, 128));
    SAY(hipMemcpyPeer(second, 2, first, 0, 128));
    add<<<1, 32, 0, stream>>>(second, first);
    CHECK(hipMemcpy(host, second, 128, TO_HOST));
    return !can || host[31] != 62;
}
