#include "device/cuda/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "device/copy_loop.h"
#include "hvd/error.h"

namespace hvd::device {
namespace {

constexpr int kThreads = 512;
/// Two blocks fit with 64 registers per thread. The launch bounds enforce that limit, because a
/// kernel with more registers would run half of its blocks after the others. Four accesses of 16
/// bytes per thread keep 64 KiB in flight on a multiprocessor. With three blocks most kernels would
/// spill; see docs/benchmarks.md for the compiler's output.
constexpr int kBlocksPerMultiprocessor = 2;

/// Conversions in hardware.
struct DeviceConvert {
  static __device__ float widen(float value) { return value; }
  static __device__ float widen(Float16 value) {
    return __half2float(__ushort_as_half(value.bits));
  }
  static __device__ float widen(BFloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
  }
  static __device__ void narrow(float value, float& result) { result = value; }
  static __device__ void narrow(float value, Float16& result) {
    result.bits = __half_as_ushort(__float2half_rn(value));
  }
  static __device__ void narrow(float value, BFloat16& result) {
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

struct Bytes {
  unsigned element;
  __device__ void operator()(std::byte* to, const std::byte* from, unsigned count,
                             Share share) const {
    copy_bytes(to, from, count * element, share);
  }
};

template <class From, class To, class Map>
struct Elements {
  Map map;
  __device__ void operator()(std::byte* to, const std::byte* from, unsigned count,
                             Share share) const {
    map_elements(reinterpret_cast<To*>(to), reinterpret_cast<const From*>(from), count, share, map);
  }
};

template <bool kToBuffer, class Copy>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    copy_tiles(const __grid_constant__ PieceTable table, std::byte* buffer, const Copy copy) {
  const Share share{threadIdx.x, kThreads};
  for (unsigned i = blockIdx.x; i < table.tiles; i += gridDim.x) {
    const Tile tile = tile_of(table, i);
    std::byte* const place = buffer + tile.offset;
    if constexpr (kToBuffer) {
      copy(place, tile.tensor, tile.count, share);
    } else {
      copy(tile.tensor, place, tile.count, share);
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    fill_elements(Element* to, std::size_t count, Element value) {
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
    to[i] = value;
}

/// Launches without <<<>>>, so that a C++ compiler accepts this file: the tests run the kernels
/// thread by thread.
template <class... Parameters>
cudaError_t start_kernel(unsigned blocks, cudaStream_t stream, void (*kernel)(Parameters...),
                         const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

struct Target {
  const CopyLaunch& launch;
  unsigned blocks;
  cudaStream_t stream;
};

template <bool kToBuffer, class Copy>
cudaError_t start(const Target& target, const Copy& copy) {
  return start_kernel(target.blocks, target.stream, copy_tiles<kToBuffer, Copy>,
                      target.launch.table, target.launch.buffer, copy);
}

template <class Copy>
cudaError_t start(const Target& target, const Copy& copy) {
  return target.launch.to_buffer ? start<true>(target, copy) : start<false>(target, copy);
}

template <class Element>
cudaError_t scale(const Target& target) {
  using Factor = std::conditional_t<std::is_same_v<Element, double>, double, float>;
  using Map = Scale<Element, Element, DeviceConvert>;
  return start(target,
               Elements<Element, Element, Map>{Map{static_cast<Factor>(target.launch.factor)}});
}

template <class From, class To>
cudaError_t cast(const Target& target) {
  if (target.launch.form.scales) {
    using Map = Scale<From, To, DeviceConvert>;
    return start(target, Elements<From, To, Map>{Map{static_cast<float>(target.launch.factor)}});
  }
  return start(target, Elements<From, To, Cast<From, To, DeviceConvert>>{});
}

cudaError_t start_cast(const Target& target) {
  const CopyForm& form = target.launch.form;
  const DataType from = target.launch.to_buffer ? form.tensor : form.buffer;
  const DataType to = target.launch.to_buffer ? form.buffer : form.tensor;
  if (to == DataType::kFloat16) return cast<float, Float16>(target);
  if (to == DataType::kBFloat16) return cast<float, BFloat16>(target);
  return from == DataType::kFloat16 ? cast<Float16, float>(target) : cast<BFloat16, float>(target);
}

unsigned blocks_for(std::size_t work, int multiprocessors) {
  return static_cast<unsigned>(std::min<std::size_t>(
      work, static_cast<std::size_t>(multiprocessors) * kBlocksPerMultiprocessor));
}

template <class Element>
cudaError_t fill(std::byte* to, std::size_t count, std::uint64_t pattern, unsigned blocks,
                 cudaStream_t stream) {
  return start_kernel(blocks, stream, fill_elements<Element>, reinterpret_cast<Element*>(to), count,
                      static_cast<Element>(pattern));
}

}  // namespace

cudaError_t launch_copy(const CopyLaunch& launch, int multiprocessors, cudaStream_t stream) {
  if (launch.table.tiles == 0) return cudaSuccess;
  if (!supported(launch.form)) throw Error("device copy: a form without a kernel was launched");
  const Target target{launch, blocks_for(launch.table.tiles, multiprocessors), stream};
  if (launch.form.casts()) return start_cast(target);
  if (!launch.form.scales)
    return start(target, Bytes{static_cast<unsigned>(size_of(launch.form.tensor))});
  switch (launch.form.tensor) {
    case DataType::kFloat16:
      return scale<Float16>(target);
    case DataType::kBFloat16:
      return scale<BFloat16>(target);
    case DataType::kFloat64:
      return scale<double>(target);
    default:
      return scale<float>(target);
  }
}

cudaError_t launch_fill(std::byte* to, std::size_t count, std::size_t element_bytes,
                        std::uint64_t pattern, int multiprocessors, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned blocks = blocks_for((count + kThreads - 1) / kThreads, multiprocessors);
  switch (element_bytes) {
    case 1:
      return fill<std::uint8_t>(to, count, pattern, blocks, stream);
    case 2:
      return fill<std::uint16_t>(to, count, pattern, blocks, stream);
    case 4:
      return fill<std::uint32_t>(to, count, pattern, blocks, stream);
    default:
      return fill<std::uint64_t>(to, count, pattern, blocks, stream);
  }
}

}  // namespace hvd::device
