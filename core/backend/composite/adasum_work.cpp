#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "backend/composite/composite_work.h"
#include "base/process_exit.h"
#include "hvd/error.h"
#include "kernels/half.h"

namespace hvd::composite {
namespace {

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

double to_double(const std::byte* at, DataType type) {
  switch (type) {
    case DataType::kFloat64:
      return load<double>(at);
    case DataType::kFloat32:
      return load<float>(at);
    case DataType::kFloat16:
      return half_to_float(load<std::uint16_t>(at));
    case DataType::kBFloat16:
      return bfloat16_to_float(load<std::uint16_t>(at));
    default:
      throw Error("adasum of " + std::string(to_string(type)) + "; expected a floating type");
  }
}

void from_double(double value, std::byte* at, DataType type) {
  const auto single = static_cast<float>(value);
  const auto put = [at](auto stored) { std::memcpy(at, &stored, sizeof(stored)); };
  switch (type) {
    case DataType::kFloat64:
      return put(value);
    case DataType::kFloat32:
      return put(single);
    case DataType::kFloat16:
      return put(float_to_half(single));
    default:
      return put(float_to_bfloat16(single));
  }
}

// The factor of a vector in the sum of a pair, from its inner product with the other vector and its
// own square. A vector of zeros has no direction, so its factor is 1, and so is the other's.
double factor_of(double product, double own_square) {
  // The root of the smallest normal number. Below it the quotient has no significant digits.
  constexpr double kTiny = 1.5e-154;
  return own_square < kTiny ? 1.0 : 1.0 - product / (2.0 * own_square);
}

class AdasumWork final : public Work {
 public:
  AdasumWork(Launch launch, const Collective& collective, const ChannelSpec& spec,
             std::span<const std::byte> in, std::span<std::byte> out)
      : launch_(std::move(launch)),
        collective_(collective),
        size_(static_cast<int>(spec.ranks.size())),
        out_(out) {
    for (int rank = 0; rank < size_; ++rank)
      slices_.push_back(rows_of_member(collective.count, size_, rank));
    const std::int64_t own = slices_[static_cast<std::size_t>(spec.set_rank)];
    own_counts_.assign(spec.ranks.size(), own);
    buffers_->received.resize(static_cast<std::size_t>(own * size_) * size_of(collective.dtype));
    Collective exchange;
    exchange.kind = OpKind::kAlltoall;
    exchange.dtype = collective.dtype;
    exchange.counts = own_counts_;
    exchange.send_counts = slices_;
    work_ = launch_(exchange, in, buffers_->received);
  }

  AdasumWork(const AdasumWork&) = delete;
  AdasumWork& operator=(const AdasumWork&) = delete;
  ~AdasumWork() override {
    if (!done_) keep_until_exit(buffers_);
  }

  bool progress() override {
    while (work_->progress()) {
      switch (stage_) {
        case Stage::kExchange:
          read_vectors();
          break;
        case Stage::kCombine:
          combine();
          break;
        case Stage::kGather:
          return done_ = true;
      }
      launch_next();
    }
    return false;
  }
  bool moved() const noexcept override { return work_->moved(); }
  std::optional<Headway> headway() const noexcept override {
    return headway_of(launched_, work_->headway());
  }

 private:
  enum class Stage { kExchange, kCombine, kGather };
  struct Buffers {
    std::vector<std::byte> received = {};
    std::vector<double> products = {};  // for each pair: a.b, a.a, b.b
  };

  void read_vectors() {
    const std::size_t element = size_of(collective_.dtype);
    const auto length = static_cast<std::size_t>(own_counts_.front());
    vectors_.assign(static_cast<std::size_t>(size_), std::vector<double>(length));
    const std::byte* at = buffers_->received.data();
    for (auto& vector : vectors_) {
      for (double& value : vector) {
        value = to_double(at, collective_.dtype) * collective_.scale.prescale;
        at += element;
      }
    }
  }

  void launch_next() {
    ++launched_;
    if (vectors_.size() == 1) return gather();
    stage_ = Stage::kCombine;
    buffers_->products.clear();
    for (std::size_t i = 0; i + 1 < vectors_.size(); i += 2) {
      double product = 0;
      double first = 0;
      double second = 0;
      for (std::size_t k = 0; k < vectors_[i].size(); ++k) {
        const double a = vectors_[i][k];
        const double b = vectors_[i + 1][k];
        product += a * b;
        first += a * a;
        second += b * b;
      }
      buffers_->products.insert(buffers_->products.end(), {product, first, second});
    }
    Collective sum;
    sum.kind = OpKind::kAllreduce;
    sum.dtype = DataType::kFloat64;
    sum.count = static_cast<std::int64_t>(buffers_->products.size());
    const auto bytes = std::as_writable_bytes(std::span(buffers_->products));
    work_ = launch_(sum, bytes, bytes);
  }

  void combine() {
    std::vector<std::vector<double>> combined;
    for (std::size_t i = 0; i < vectors_.size(); i += 2) {
      combined.push_back(std::move(vectors_[i]));
      if (i + 1 == vectors_.size()) break;
      const double* of_pair = &buffers_->products[i / 2 * 3];
      const double first = factor_of(of_pair[0], of_pair[1]);
      const double second = factor_of(of_pair[0], of_pair[2]);
      for (std::size_t k = 0; k < vectors_[i + 1].size(); ++k) {
        combined.back()[k] = first * combined.back()[k] + second * vectors_[i + 1][k];
      }
    }
    vectors_ = std::move(combined);
  }

  void gather() {
    stage_ = Stage::kGather;
    const std::size_t element = size_of(collective_.dtype);
    buffers_->received.resize(vectors_.front().size() * element);
    std::byte* at = buffers_->received.data();
    for (const double value : vectors_.front()) {
      from_double(value * collective_.scale.postscale, at, collective_.dtype);
      at += element;
    }
    Collective gathered;
    gathered.kind = OpKind::kAllgather;
    gathered.dtype = collective_.dtype;
    gathered.count = collective_.count;
    gathered.counts = slices_;
    work_ = launch_(gathered, buffers_->received, out_);
  }

  Launch launch_;
  const std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
  const Collective collective_;
  const int size_;
  const std::span<std::byte> out_;
  std::vector<std::int64_t> slices_;          // elements of each rank's slice
  std::vector<std::int64_t> own_counts_;      // elements of this rank's slice, from each rank
  std::vector<std::vector<double>> vectors_;  // this rank's slices of the vectors of this level
  Stage stage_ = Stage::kExchange;
  std::uint64_t launched_ = 1;  // collectives
  bool done_ = false;
  std::unique_ptr<Work> work_;  // last, because it uses the members above
};

}  // namespace

std::unique_ptr<Work> make_adasum(Launch launch, const Collective& collective,
                                  const ChannelSpec& spec, std::span<const std::byte> in,
                                  std::span<std::byte> out) {
  return std::make_unique<AdasumWork>(std::move(launch), collective, spec, in, out);
}

}  // namespace hvd::composite
