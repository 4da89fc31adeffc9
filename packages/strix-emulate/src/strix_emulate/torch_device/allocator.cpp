// SPDX-License-Identifier: BSD-3-Clause
// An allocator for torch's CPU tensors. It calls hipMalloc, so that the tensors are in the memory
// of the emulated device.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

extern "C" int hipMalloc(void **pointer, size_t size);
extern "C" int hipFree(void *pointer);

namespace {

void release(void *pointer) { hipFree(pointer); }

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void *pointer = nullptr;
        TORCH_CHECK(size == 0 || hipMalloc(&pointer, size) == 0, "the device has no ", size,
                    " bytes of free memory");
        return {pointer, pointer, release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return release; }
    void copy_data(void *to, const void *from, size_t size) const override {
        default_copy_data(to, from, size);
    }
};

DeviceAllocator allocator;
const bool registered = (c10::SetCPUAllocator(&allocator, /*priority=*/255), true);

} // namespace
