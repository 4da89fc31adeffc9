// SPDX-License-Identifier: BSD-3-Clause
// Package test: compare the results of AOTriton's C++ API, forward and backward, with float64; and check the
// number of workgroups of the persistent forward kernel.
//
// The program is linked with libaotriton_v2 and the HIP runtime. It runs on the GPU that the library is for, or without
// a GPU with `strix-emulate device -- ./check_api`. The exit status is 0 if everything is right, and 1 otherwise.
// AOTRITON_GRID_BY_OCCUPANCY=0 turns patch 0002 off. In that case, only the number of workgroups is checked.
#include <aotriton/flash.h>
#include <hip/hip_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

namespace flash = AOTRITON_NS::v3::flash;
using AOTRITON_NS::DType;
using Half = _Float16;

constexpr int kWidth = 64;
constexpr float kScale = 0.125f;
// A correct result in fp16 has errors of about 1e-3. A wrong row, scale or mask gives errors of 0.1 or more.
constexpr double kBound = 5e-3;
// The values of AOTriton's OpAttnBwdContext::BackendEnum; -1 lets AOTriton choose.
constexpr int kChosen = -1, kSplit = 0, kFused = 1;

struct Case {
  const char* name;
  int heads, key_heads, queries, keys;
  bool causal;
  int backend;
};

static void require(hipError_t error, const char* what) {
  if (error == hipSuccess) return;
  std::printf("%s: %s\n", what, hipGetErrorString(error));
  std::exit(1);
}

// An array in device memory. Elements that no kernel writes stay NaN.
template <class T>
struct Array {
  explicit Array(size_t count) : size(count) {
    require(hipMalloc(reinterpret_cast<void**>(&data), bytes()), "hipMalloc");
    require(hipMemset(data, 0xff, bytes()), "hipMemset");
  }
  explicit Array(const std::vector<T>& from) : Array(from.size()) {
    require(hipMemcpy(data, from.data(), bytes(), hipMemcpyHostToDevice), "hipMemcpy");
  }
  Array(const Array&) = delete;
  ~Array() { (void)hipFree(data); }
  size_t bytes() const { return size * sizeof(T); }
  std::vector<T> host() const {
    std::vector<T> out(size);
    require(hipMemcpy(out.data(), data, bytes(), hipMemcpyDeviceToHost), "hipMemcpy");
    return out;
  }
  intptr_t address() const { return reinterpret_cast<intptr_t>(data); }
  size_t size;
  T* data = nullptr;
};

// Return the index of an element in an array (row, head, column), the layout of a linear layer's output.
static size_t at(int heads, int row, int head, int column = 0) {
  return (static_cast<size_t>(row) * heads + head) * kWidth + column;
}

static flash::T4 view(const Array<Half>& array, int heads) {
  const uint64_t row = static_cast<uint64_t>(heads) * kWidth, rows = array.size / row;
  return {array.address(), {1, static_cast<uint64_t>(heads), rows, kWidth},
          {array.size, kWidth, row, 1}, DType::kFloat16};
}

struct Reference {
  std::vector<double> out, lse, dq, dk, dv;
};

static Reference reference(const Case& c, const std::vector<Half>& q, const std::vector<Half>& k,
                           const std::vector<Half>& v, const std::vector<Half>& grad) {
  Reference r{std::vector<double>(q.size()), {}, std::vector<double>(q.size()),
              std::vector<double>(k.size()), std::vector<double>(k.size())};
  auto dot = [](const auto* a, const auto* b) {
    double sum = 0;
    for (int d = 0; d < kWidth; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
    return sum;
  };
  for (int h = 0; h < c.heads; ++h) {
    const int g = h / (c.heads / c.key_heads);
    for (int i = 0; i < c.queries; ++i) {
      const size_t query = at(c.heads, i, h);
      const int seen = c.causal ? std::min(i + 1, c.keys) : c.keys;
      std::vector<double> p(seen);
      double sum = 0;
      for (int j = 0; j < seen; ++j)
        sum += p[j] = std::exp(kScale * dot(&q[query], &k[at(c.key_heads, j, g)]));
      r.lse.push_back(std::log(sum));
      for (int j = 0; j < seen; ++j)
        for (int d = 0; d < kWidth; ++d)
          r.out[query + d] += (p[j] / sum) * v[at(c.key_heads, j, g, d)];
      const double delta = dot(&r.out[query], &grad[query]);
      for (int j = 0; j < seen; ++j) {
        const size_t key = at(c.key_heads, j, g);
        const double ds = kScale * (p[j] / sum) * (dot(&grad[query], &v[key]) - delta);
        for (int d = 0; d < kWidth; ++d) {
          r.dq[query + d] += ds * k[key + d];
          r.dk[key + d] += ds * q[query + d];
          r.dv[key + d] += (p[j] / sum) * grad[query + d];
        }
      }
    }
  }
  return r;
}

// Return the largest difference; infinity if an element is NaN.
template <class T>
static double error(const Array<T>& found, const std::vector<double>& right) {
  double worst = 0;
  const std::vector<T> values = found.host();
  for (size_t i = 0; i < right.size(); ++i) {
    const double off = std::abs(static_cast<double>(values[i]) - right[i]);
    worst = std::max(worst, std::isnan(off) ? INFINITY : off);
  }
  return worst;
}

// Return the parameters that forward and backward have in common.
template <class Params>
static Params parameters(const Case& c) {
  Params p;
  // get_null_tensor() is not used, because a library that is compiled without optimization does not export it.
  p.B = flash::T4(0, {}, {}, DType::kFloat16);
  p.Sm_scale = kScale;
  p.dropout_p = 0;
  p.philox_offset2 = 0;
  p.cu_seqlens_q = p.cu_seqlens_k = flash::T1(0, {}, {}, DType::kInt32);
  p.seq_strides_q = p.seq_strides_k = p.cu_seqlens_q;
  p.causal_type = c.causal ? flash::CausalType::WindowedAttention : flash::CausalType::None;
  p.window_left = p.window_right = flash::WindowValue::TopLeftAligned;
  return p;
}

static std::vector<Half> numbers(std::mt19937& random, int rows, int heads) {
  std::normal_distribution<float> normal;
  std::vector<Half> values(at(heads, rows, 0));
  for (Half& x : values) x = static_cast<Half>(normal(random));
  return values;
}

static bool run(const Case& c, hipStream_t stream) {
  std::mt19937 random(1);
  const auto hq = numbers(random, c.queries, c.heads), hk = numbers(random, c.keys, c.key_heads);
  const auto hv = numbers(random, c.keys, c.key_heads);
  const auto hgrad = numbers(random, c.queries, c.heads);
  const Array<Half> q(hq), k(hk), v(hv), grad(hgrad);
  const Array<Half> out(q.size), dq(q.size), dk(k.size), dv(v.size);
  const size_t rows = static_cast<size_t>(c.heads) * c.queries;
  const Array<float> lse(rows), delta(rows);
  const Array<int> counter(std::vector<int>{0});
  auto rank2 = [&](const Array<float>& array) -> flash::T2 {
    const uint64_t queries = c.queries;
    return {array.address(), {rows / queries, queries}, {queries, 1}, DType::kFloat32};
  };

  auto fwd = parameters<flash::attn_fwd_params>(c);
  fwd.Q = view(q, c.heads), fwd.K = view(k, c.key_heads), fwd.V = view(v, c.key_heads);
  fwd.Out = view(out, c.heads), fwd.L = rank2(lse);
  fwd.A = flash::T2(0, {}, {}, DType::kFloat32), fwd.encoded_softmax = fwd.B;
  fwd.persistent_atomic_counter = {counter.address(), DType::kInt32};
  require(flash::attn_fwd(fwd, fwd.kVersion, stream), "attn_fwd");

  auto bwd = parameters<flash::attn_bwd_params>(c);
  bwd.Q = fwd.Q, bwd.K = fwd.K, bwd.V = fwd.V, bwd.Out = fwd.Out, bwd.L = fwd.L;
  bwd.DO = view(grad, c.heads), bwd.DQ = view(dq, c.heads);
  bwd.DK = view(dk, c.key_heads), bwd.DV = view(dv, c.key_heads), bwd.DB = bwd.B;
  bwd.D.eager = rank2(delta);
  flash::attn_options options;
  options.force_backend_index = c.backend;
  require(flash::attn_bwd(bwd, bwd.kVersion, stream, &options), "attn_bwd");
  require(hipStreamSynchronize(stream), "hipStreamSynchronize");

  const Reference right = reference(c, hq, hk, hv, hgrad);
  const double errors[] = {error(out, right.out), error(lse, right.lse), error(dq, right.dq),
                           error(dk, right.dk), error(dv, right.dv)};
  std::printf("%s: errors of out, lse, dq, dk, dv", c.name);
  for (const double e : errors) std::printf(" %.1e", e);
  const bool good = *std::max_element(std::begin(errors), std::end(errors)) <= kBound;
  std::printf(good ? "\n" : ": more than %.0e\n", kBound);
  return good;
}

// Return the number of workgroups that the grid of a causal forward kernel must have. With patch 0002, workgroups
// fill the GPU: each of a workgroup's four waves is on a different SIMD, and the registers of a SIMD are enough for
// five waves with 248 to 256 registers each (four waves on smaller GPUs). Without the patch, there are two workgroups
// for each of HIP's multiprocessors.
static int expected_workgroups(bool by_occupancy, int tiles) {
  hipDeviceProp_t device;
  require(hipGetDeviceProperties(&device, 0), "hipGetDeviceProperties");
  const int waves = std::strncmp(device.gcnArchName, "gfx1151", 7) ? 4 : 5;
  return std::min(tiles, device.multiProcessorCount * (by_occupancy ? waves : 2));
}

// Launch a causal forward kernel with one tile for each head, and check the number of workgroups. Each workgroup
// increments a counter to get a tile, until no tile is left. So the final value of the counter is the number of tiles
// plus the number of workgroups.
static bool check_grid(bool v2, bool by_occupancy, int heads, hipStream_t stream) {
  const Case c = {"", heads, 1, 16, 16, true, kChosen};
  std::mt19937 random(1);
  const auto hq = numbers(random, c.queries, c.heads);
  const auto hk = numbers(random, c.keys, 1), hv = numbers(random, c.keys, 1);
  const Array<Half> q(hq), k(hk), v(hv), out(q.size);
  const Array<int> counter(std::vector<int>{0});
  auto fwd = parameters<flash::attn_fwd_params>(c);
  fwd.Q = view(q, c.heads), fwd.K = view(k, 1), fwd.V = view(v, 1), fwd.Out = view(out, c.heads);
  fwd.L = flash::T2(0, {}, {}, DType::kFloat32), fwd.A = fwd.L, fwd.encoded_softmax = fwd.B;
  fwd.persistent_atomic_counter = {counter.address(), DType::kInt32};
  if (v2) {
    require(AOTRITON_NS::v2::flash::attn_fwd(fwd.Q, fwd.K, fwd.V, fwd.B, fwd.Sm_scale, fwd.L,
                                             fwd.Out, 0, {}, {}, 0, {}, {}, fwd.encoded_softmax,
                                             true, fwd.persistent_atomic_counter, stream),
            "v2 attn_fwd");
  } else {
    require(flash::attn_fwd(fwd, fwd.kVersion, stream), "attn_fwd");
  }
  require(hipStreamSynchronize(stream), "hipStreamSynchronize");
  const int workgroups = counter.host()[0] - heads;
  const int expected = expected_workgroups(by_occupancy, heads);
  const double off = error(out, reference(c, hq, hk, hv, hq).out);
  const bool good = workgroups == expected && off <= kBound;
  std::printf("v%d, %d tiles: %d workgroups, error %.1e", v2 ? 2 : 3, heads, workgroups, off);
  std::printf(good ? "\n" : ": expected %d workgroups, and %.0e\n", expected, kBound);
  return good;
}

int main() {
  hipStream_t stream;
  require(hipStreamCreate(&stream), "hipStreamCreate");
  require(AOTRITON_NS::v2::flash::check_gpu(stream), "check_gpu");
  const Case cases[] = {
      // name, query heads, key heads, queries, keys, causal, backend
      {"all keys", 2, 2, 100, 100, false, kChosen},
      // long enough that some blocks have no masked element
      {"causal", 2, 2, 150, 150, true, kChosen},
      {"causal, backward in two kernels", 2, 2, 150, 150, true, kSplit},
      {"causal, backward in one kernel", 2, 2, 70, 70, true, kFused},
      {"heads share keys", 4, 2, 64, 96, false, kChosen},
      {"heads share keys, backward in two kernels", 4, 2, 64, 96, false, kSplit},
  };
  const char* set = std::getenv("AOTRITON_GRID_BY_OCCUPANCY");
  const bool by_occupancy = !set || std::strcmp(set, "0") != 0;
  bool good = true;
  for (const int heads : {7, 128})
    for (const bool v2 : {false, true}) good &= check_grid(v2, by_occupancy, heads, stream);
  if (by_occupancy)
    for (const Case& c : cases) good &= run(c, stream);
  require(hipStreamDestroy(stream), "hipStreamDestroy");
  return good ? 0 : 1;
}
