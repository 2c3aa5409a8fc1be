#include "layers/batch_statistics.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace hvd::libtorch {
namespace {

/// A count is sent as count % kCountUnit and count / kCountUnit, which is exact up to 2^44.
constexpr std::int64_t kCountUnit = std::int64_t{1} << 20;
constexpr std::int64_t kCounts = 2;  // columns of a row

torch::Tensor inverse_deviation(const Normalization& by) { return (by.var + by.eps).rsqrt(); }

torch::Tensor weight_or_ones(const Normalization& by) {
  return by.weight.defined() ? by.weight.detach().to(by.mean.scalar_type())
                             : torch::ones_like(by.mean);
}

/// result = (gradient - shift - (input - mean) * slope) * scale, with one of each per channel.
template <class T>
struct ChannelMap {
  const T* shift;
  const T* slope;
  const T* mean;
  const T* scale;
};

/// Maps `planes` planes of `size` values; a plane belongs to one channel.
template <class T>
void map_planes(const ChannelMap<T>& map, std::int64_t channels, std::int64_t planes,
                std::int64_t size, const T* gradient, const T* input, T* result) {
  const std::int64_t grain = std::max<std::int64_t>(1, at::internal::GRAIN_SIZE / size);
  at::parallel_for(0, planes, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t plane = begin; plane < end; ++plane) {
      const std::int64_t c = plane % channels;
      const T shift = map.shift[c], slope = map.slope[c], mean = map.mean[c], scale = map.scale[c];
      const T* const __restrict dy = gradient + plane * size;
      const T* const __restrict x = input + plane * size;
      T* const __restrict dx = result + plane * size;
      for (std::int64_t i = 0; i < size; ++i)
        dx[i] = (dy[i] - shift - (x[i] - mean) * slope) * scale;
    }
  });
}

/// Maps `rows` rows with one value of each channel.
template <class T>
void map_rows(const ChannelMap<T>& map, std::int64_t channels, std::int64_t rows, const T* gradient,
              const T* input, T* result) {
  const std::int64_t grain = std::max<std::int64_t>(1, at::internal::GRAIN_SIZE / channels);
  at::parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    const T* const __restrict shift = map.shift;
    const T* const __restrict slope = map.slope;
    const T* const __restrict mean = map.mean;
    const T* const __restrict scale = map.scale;
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const __restrict dy = gradient + row * channels;
      const T* const __restrict x = input + row * channels;
      T* const __restrict dx = result + row * channels;
      for (std::int64_t c = 0; c < channels; ++c)
        dx[c] = (dy[c] - shift[c] - (x[c] - mean[c]) * slope[c]) * scale[c];
    }
  });
}

/// Both tensors have the dtype of the statistics and the same memory format.
template <class T>
torch::Tensor map_channels(const ChannelMap<T>& map, const torch::Tensor& gradient,
                           const torch::Tensor& input) {
  torch::Tensor result = torch::empty_like(input);
  const std::int64_t channels = input.size(1);
  const std::int64_t samples = input.size(0);
  const std::int64_t size = input.numel() / (samples * channels);
  const T* const dy = gradient.const_data_ptr<T>();
  const T* const x = input.const_data_ptr<T>();
  T* const dx = result.mutable_data_ptr<T>();
  if (size > 1 && input.is_contiguous()) {
    map_planes(map, channels, samples * channels, size, dy, x, dx);
  } else {
    map_rows(map, channels, samples * size, dy, x, dx);
  }
  return result;
}

torch::Tensor input_gradient_on_host(const torch::Tensor& gradient, const torch::Tensor& input,
                                     const Normalization& by, const torch::Tensor& sums,
                                     const torch::Tensor& count) {
  const torch::ScalarType type = by.mean.scalar_type();
  const torch::Tensor invstd = inverse_deviation(by);
  const torch::Tensor means = (sums / count).to(type);
  const torch::Tensor shift = means[0].contiguous();
  const torch::Tensor slope = (means[1] * invstd).contiguous();
  const torch::Tensor mean = by.mean.contiguous();
  const torch::Tensor scale = (weight_or_ones(by) * invstd).contiguous();
  // 16-bit types are widened, since LibTorch's own loops for them are not public.
  const torch::Tensor dy = gradient.to(type), x = input.to(type);
  const auto map = [&]<class T>(T) {
    return map_channels<T>({shift.const_data_ptr<T>(), slope.const_data_ptr<T>(),
                            mean.const_data_ptr<T>(), scale.const_data_ptr<T>()},
                           dy, x);
  };
  return (type == torch::kFloat64 ? map(double{}) : map(float{})).to(input.scalar_type());
}

torch::Tensor like_input(const torch::Tensor& gradient, const torch::Tensor& input) {
  return gradient.contiguous(input.suggest_memory_format());
}

}  // namespace

torch::ScalarType statistics_type(torch::ScalarType input) noexcept {
  return input == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

torch::Tensor batch_moments(const torch::Tensor& input) {
  const std::int64_t channels = input.size(1);
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  torch::Tensor row = torch::zeros({1, kCounts + 2 * channels}, options);
  if (input.numel() == 0) return row;
  const std::int64_t count = input.numel() / channels;
  // The dtype of the unused running statistics selects the dtype in which the statistics of a
  // 16-bit input are computed.
  const torch::Tensor unused = torch::zeros({2, channels}, options);
  const auto [mean, var] = at::batch_norm_update_stats(input, unused[0], unused[1], /*momentum=*/0);
  const torch::Tensor values = row[0];
  values[0].fill_(static_cast<double>(count % kCountUnit));
  values[1].fill_(static_cast<double>(count / kCountUnit));
  values.narrow(0, kCounts, channels).copy_(mean);
  torch::Tensor deviations = values.narrow(0, kCounts + channels, channels);
  deviations.copy_(var).mul_(static_cast<double>(count));
  return row;
}

JoinedMoments join_moments(const torch::Tensor& rows) {
  const std::int64_t channels = (rows.size(1) - kCounts) / 2;
  const torch::Tensor wide = rows.to(torch::kFloat64);
  const torch::Tensor counts =
      wide.narrow(1, 0, 1) + wide.narrow(1, 1, 1) * static_cast<double>(kCountUnit);
  const torch::Tensor means = wide.narrow(1, kCounts, channels);
  const torch::Tensor deviations = wide.narrow(1, kCounts + channels, channels);
  const torch::Tensor count = counts.sum();
  const torch::Tensor mean = (means * (counts / count)).sum(0);
  const torch::Tensor deviation = (deviations + (means - mean).square() * counts).sum(0);
  const auto type = rows.scalar_type();
  return {.count = count,
          .mean = mean.to(type),
          .var = (deviation / count).to(type),
          .unbiased_var = (deviation / (count - 1)).to(type)};
}

torch::Tensor normalize(const torch::Tensor& input, const Normalization& by,
                        const torch::Tensor& bias) {
  if (input.numel() == 0) return torch::empty_like(input);
  const torch::Tensor offset = bias.defined() ? bias.detach().to(by.mean.scalar_type()) : bias;
  return std::get<0>(at::native_batch_norm(input, weight_or_ones(by), offset, by.mean, by.var,
                                           /*training=*/false, /*momentum=*/0, by.eps));
}

torch::Tensor gradient_sums(const torch::Tensor& gradient, const torch::Tensor& input,
                            const Normalization& by) {
  if (input.numel() == 0) return torch::zeros({2, input.size(1)}, by.mean.options());
  // With train=false the statistics are constants, and the gradients of weight and bias are the
  // sums.
  const auto [unused, of_weight, of_bias] = at::native_batch_norm_backward(
      like_input(gradient, input), input, weight_or_ones(by), by.mean, by.var, {}, {},
      /*train=*/false, by.eps, {false, true, true});
  return torch::stack({of_bias, of_weight});
}

torch::Tensor input_gradient(const torch::Tensor& gradient, const torch::Tensor& input,
                             const Normalization& by, const torch::Tensor& sums,
                             const torch::Tensor& count) {
  if (input.numel() == 0) return torch::zeros_like(input);
  const torch::Tensor dy = like_input(gradient, input);
  if (!input.is_cuda()) return input_gradient_on_host(dy, input, by, sums, count);
  const torch::Tensor invstd = inverse_deviation(by);
  return at::batch_norm_backward_elemt(dy, input, by.mean, invstd, weight_or_ones(by), sums[0],
                                       sums[1] / invstd, count.to(torch::kInt32).reshape({1}));
}

}  // namespace hvd::libtorch
