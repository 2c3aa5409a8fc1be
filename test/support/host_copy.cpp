#include <type_traits>

#include "device/copy_loop.h"
#include "kernels/half.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

using device::BFloat16;
using device::Float16;

struct HostConvert {
  static float widen(float value) { return value; }
  static float widen(Float16 value) { return half_to_float(value.bits); }
  static float widen(BFloat16 value) { return bfloat16_to_float(value.bits); }
  static void narrow(float value, float& result) { result = value; }
  static void narrow(float value, Float16& result) { result.bits = float_to_half(value); }
  static void narrow(float value, BFloat16& result) { result.bits = float_to_bfloat16(value); }
};

struct Part {
  const device::CopyLaunch& launch;
  std::byte* to;
  const std::byte* from;
  std::uint32_t count;
  device::Share share;
};

template <class From, class To, class Map>
void map(const Part& part, const Map& map) {
  device::map_elements(reinterpret_cast<To*>(part.to), reinterpret_cast<const From*>(part.from),
                       part.count, part.share, map);
}

template <class From, class To>
void convert(const Part& part) {
  if (!part.launch.form.scales) return map<From, To>(part, device::Cast<From, To, HostConvert>{});
  using Factor = std::conditional_t<std::is_same_v<From, double>, double, float>;
  map<From, To>(part,
                device::Scale<From, To, HostConvert>{static_cast<Factor>(part.launch.factor)});
}

void copy_part(const Part& part) {
  const device::CopyForm& form = part.launch.form;
  const DataType from = part.launch.to_buffer ? form.tensor : form.buffer;
  const DataType to = part.launch.to_buffer ? form.buffer : form.tensor;
  if (form.casts()) {
    if (to == DataType::kFloat16) return convert<float, Float16>(part);
    if (to == DataType::kBFloat16) return convert<float, BFloat16>(part);
    return from == DataType::kFloat16 ? convert<Float16, float>(part)
                                      : convert<BFloat16, float>(part);
  }
  if (!form.scales)
    return device::copy_bytes(part.to, part.from,
                              part.count * static_cast<std::uint32_t>(size_of(to)), part.share);
  if (to == DataType::kFloat16) return convert<Float16, Float16>(part);
  if (to == DataType::kBFloat16) return convert<BFloat16, BFloat16>(part);
  if (to == DataType::kFloat32) return convert<float, float>(part);
  const device::Scale<double, double, HostConvert> scale{part.launch.factor};
  map<double, double>(part, scale);
}

}  // namespace

void run_copy_on_host(const device::CopyLaunch& launch, std::uint32_t threads) {
  for (std::uint32_t i = 0; i < launch.table.tiles; ++i) {
    const device::Tile tile = device::tile_of(launch.table, i);
    std::byte* const place = launch.buffer + tile.offset;
    for (std::uint32_t thread = 0; thread < threads; ++thread) {
      copy_part({launch,
                 launch.to_buffer ? place : tile.tensor,
                 launch.to_buffer ? tile.tensor : place,
                 tile.count,
                 {thread, threads}});
    }
  }
}

}  // namespace hvd::testing
