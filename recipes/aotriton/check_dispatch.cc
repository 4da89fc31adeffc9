// SPDX-License-Identifier: BSD-3-Clause
// Check which kernels AOTriton's dispatch code selects for head dimensions and dtypes.
//
// Usage: check_dispatch core|full|sample|upstream. The program is linked with only two object files of AOTriton: the
// generated shim of attn_fwd, and util.
#include <aotriton/_internal/util.h>
#include <aotriton/config.h>

#include <cstdio>
#include <cstring>

#include "flash/iface.op_attn_fwd.h"
#include "flash/shim.attn_fwd.h"

using AOTRITON_NS::DType;
using AOTRITON_NS::TensorView;
namespace flash = AOTRITON_NS::v3::flash;

// Return the head dimension of the kernel that would be launched, or -1 if the call would be refused with
// hipErrorNotSupported.
static int select_kernel(int head_dim, DType dtype) {
  const auto& compiled = flash::AttnFwdMetadata::get_BLOCK_DMODEL_choices();
  const int rounded = AOTRITON_NS::round_value(head_dim, compiled);
  TensorView<4> tensor(0, {1, 1, 1, static_cast<uint64_t>(head_dim)}, {1, 1, 1, 1}, dtype);
  flash::OpAttnFwdParams params = {};
  params.Q = &tensor;
  params.BLOCK_DMODEL = static_cast<int16_t>(rounded);
  params.PADDED_HEAD = rounded != head_dim;
  flash::AttnFwdContext context;
  context.params = &params;
  return context.godel_number() < 0 ? -1 : rounded;
}

static bool check_kernel(int head_dim, DType dtype, const char* name, int expected) {
  const int selected = select_kernel(head_dim, dtype);
  std::printf("head dimension %3d %s: %d\n", head_dim, name, selected);
  if (selected != expected) std::printf("  expected %d\n", expected);
  return selected == expected;
}

int main(int argc, char** argv) {
  const bool core = argc > 1 && std::strcmp(argv[1], "core") == 0;
  const bool sample = argc > 1 && std::strcmp(argv[1], "sample") == 0;
  bool good = true;
  const int dims[][4] = {
      // head dimension; head dimension of the kernel in the sets core, sample and full
      {16, 64, 64, 16},     {64, 64, 64, 64},     {72, 96, 128, 80},   {80, 96, 128, 80},
      {96, 96, 128, 96},    {128, 128, 128, 128}, {160, 256, -1, 160}, {256, 256, -1, 256},
      {257, -1, -1, 512},   {600, -1, -1, -1},
  };
  for (const auto& [dim, in_core, in_sample, in_full] : dims) {
    const int expected = core ? in_core : sample ? in_sample : in_full;
    good &= check_kernel(dim, DType::kFloat16, "fp16", expected);
    good &= check_kernel(dim, DType::kBFloat16, "bf16", expected);
    good &= check_kernel(dim, DType::kFloat32, "fp32", core || sample ? -1 : expected);
  }
  return good ? 0 : 1;
}
