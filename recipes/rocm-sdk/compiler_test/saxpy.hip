// SPDX-License-Identifier: BSD-3-Clause
// A program that uses the same parts as a user's extension: HIP's headers, device code, and conda's C++ library.
#include <hip/hip_runtime.h>

#include <cmath>
#include <vector>

__global__ void saxpy(int n, float a, const float *x, float *y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = std::fma(a, x[i], y[i]);
}

int main() {
    std::vector<float> host(256, 1.0f);
    float *x = nullptr, *y = nullptr;
    const size_t size = host.size() * sizeof(float);
    if (hipMalloc(&x, size) != hipSuccess || hipMalloc(&y, size) != hipSuccess) return 1;
    saxpy<<<1, 256>>>(256, 2.0f, x, y);
    return hipDeviceSynchronize() == hipSuccess ? 0 : 1;
}
