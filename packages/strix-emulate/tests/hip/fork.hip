// SPDX-License-Identifier: BSD-3-Clause
// A process and two children. One is forked before the first use of the device and has its own device, the other is
// forked later and has none. Exits with 0 if only the parent and the first child get the right numbers.
#include "hip.h"
#include <sys/wait.h>
#include <unistd.h>

extern "C" hipError_t hipGetDeviceCount(int *);

__device__ int of_the_file = 5;
__global__ void add(int *data, int more) {
    data[__builtin_amdgcn_workitem_id_x()] += more + of_the_file;
}

static int use(int more) {
    int *data, host[64];
    for (int i = 0; i < 64; i++) host[i] = i;
    CHECK(hipMalloc((void **)&data, sizeof host));
    CHECK(hipMemcpy(data, host, sizeof host, TO_DEVICE));
    add<<<1, 64>>>(data, more);
    CHECK(hipMemcpy(host, data, sizeof host, TO_HOST));
    printf("%d\n", host[63]);
    fflush(stdout);
    return host[0] != more + 5 || host[63] != more + 68;
}

static int forked(int more) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        int wrong = use(more);
        fflush(stdout);
        _exit(wrong);
    }
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

int main() {
    int count;
    CHECK(hipGetDeviceCount(&count));
    int before = forked(100), own = use(200);
    return before || own || forked(300) != 1 || use(400);
}
