// SPDX-License-Identifier: BSD-3-Clause
#include <torch/torch.h>

int main() {
  const auto x = torch::arange(1, 4, torch::kDouble);
  return torch::dot(x, x).item<double>() == 14 ? 0 : 1;
}
