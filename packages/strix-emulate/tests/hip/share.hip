// SPDX-License-Identifier: BSD-3-Clause
// Two processes share an array: the second one gets a handle, adds to the array by its own kernel, and waits
// for an event. With the argument "forked", neither process calls exec: both are forked before the first use of
// the device, and each has a device of its own. Exits with 0 if all numbers are right.
#include "hip.h"
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *, void *);
hipError_t hipIpcOpenMemHandle(void **, hipIpcMemHandle_t, unsigned);
hipError_t hipIpcCloseMemHandle(void *);
hipError_t hipIpcGetEventHandle(hipIpcEventHandle_t *, hipEvent_t);
hipError_t hipIpcOpenEventHandle(hipEvent_t *, hipIpcEventHandle_t);
}

__global__ void add(int *data, const int *more) {
    int t = __builtin_amdgcn_workitem_id_x();
    data[t] += more[t];
}

// Loads and stores single bytes, because the shadow memory then needs the most cells.
__global__ void touch(volatile char *data) {
    int t = __builtin_amdgcn_workitem_id_x();
    data[t] = data[t];
}

static int child() {
    hipIpcMemHandle_t memory;
    hipIpcEventHandle_t when;
    int *shared, *mine, host[64];
    hipEvent_t event;
    if (read(0, &memory, sizeof memory) != 64 || read(0, &when, sizeof when) != 64) return 2;
    CHECK(hipIpcOpenEventHandle(&event, when));
    CHECK(hipStreamWaitEvent(NULL, event, 0));
    CHECK(hipIpcOpenMemHandle((void **)&shared, memory, 1));
    CHECK(hipMalloc((void **)&mine, sizeof host));
    for (int i = 0; i < 64; i++) host[i] = 1000;
    CHECK(hipMemcpy(mine, host, sizeof host, TO_DEVICE));
    add<<<1, 64>>>(shared, mine);
    CHECK(hipMemcpy(host, shared, sizeof host, TO_HOST));
    printf("child %d\n", host[63]);
    CHECK(hipIpcCloseMemHandle(shared));
    add<<<1, 64>>>(shared, mine);
    printf("closed: %s\n", hipGetErrorName(hipDeviceSynchronize()));
    return 0;
}

static int forked(int number, const int *from, const int *to) {
    int *data, *more, host[64];
    hipIpcMemHandle_t memory;
    CHECK(hipSetDevice(number));
    for (int i = 0; i < 64; i++) host[i] = number ? 1000 : i;
    CHECK(hipMalloc((void **)&more, sizeof host));
    CHECK(hipMemcpy(more, host, sizeof host, TO_DEVICE));
    if (number) {
        if (read(from[0], &memory, 64) != 64) return 2;
        CHECK(hipIpcOpenMemHandle((void **)&data, memory, 1));
        add<<<1, 64>>>(data, more);
        touch<<<1, 64>>>((char *)data);
        CHECK(hipDeviceSynchronize());
        return write(to[1], "", 1) != 1;
    }
    CHECK(hipIpcGetMemHandle(&memory, more));
    if (write(to[1], &memory, 64) != 64 || read(from[0], &memory, 1) != 1) return 2;
    add<<<1, 64>>>(more, more);
    CHECK(hipMemcpy(host, more, sizeof host, TO_HOST));
    printf("forked %d\n", host[63]);
    return fflush(stdout) || host[0] != 2000 || host[63] != 2126;
}

static int fork_two() {
    int there[2], back[2], status, wrong = 0;
    if (pipe(there) || pipe(back)) return 2;
    for (int i = 0; i < 2; i++)
        if (!fork()) _exit(forked(i, i ? there : back, i ? back : there));
    while (wait(&status) > 0) wrong |= status;
    return wrong != 0;
}

int main(int count, char **names) {
    int *data, host[64], ends[2], status;
    if (count > 1 && !strcmp(names[1], "forked")) return fork_two();
    hipIpcMemHandle_t memory;
    hipIpcEventHandle_t when;
    hipEvent_t event;
    if (count > 1) return child();
    for (int i = 0; i < 64; i++) host[i] = i;
    CHECK(hipMalloc((void **)&data, 4096 + sizeof host));
    data += 1024;
    CHECK(hipMemcpy(data, host, sizeof host, TO_DEVICE));
    CHECK(hipEventCreateWithFlags(&event, 4 | 2));
    CHECK(hipEventRecord(event, NULL));
    CHECK(hipIpcGetMemHandle(&memory, data));
    CHECK(hipIpcGetEventHandle(&when, event));
    void *same;
    printf("one process: %s\n", hipGetErrorName(hipIpcOpenMemHandle(&same, memory, 1)));
    fflush(stdout);
    if (pipe(ends)) return 2;
    pid_t other = fork();
    if (!other) {
        dup2(ends[0], 0);
        execl(names[0], names[0], "child", NULL);
        _exit(2);
    }
    if (write(ends[1], &memory, 64) != 64 || write(ends[1], &when, 64) != 64) return 2;
    waitpid(other, &status, 0);
    add<<<1, 64>>>(data, data);
    CHECK(hipMemcpy(host, data, sizeof host, TO_HOST));
    printf("parent %d\n", host[63]);
    return status || host[0] != 2000 || host[63] != 2126;
}
