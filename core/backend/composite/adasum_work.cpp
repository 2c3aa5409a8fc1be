#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "backend/composite/composite_work.h"
#include "base/process_exit.h"
#include "base/text.h"
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
      throw Error(text("adasum of ", to_string(type), "; expected a floating type"));
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

// Returns a vector's factor in the sum of a pair, from its inner product with the other vector and
// its own square. A zero vector has no direction, so its factor is 1. The other vector's factor is
// then 1 too, because the product is 0.
double factor_of(double product, double own_square) {
  // The square root of the smallest normal number. For a smaller `own_square` the quotient has no
  // significant digits.
  constexpr double kTiny = 1.5e-154;
  return own_square < kTiny ? 1.0 : 1.0 - product / (2.0 * own_square);
}

// A call of progress() handles at most this many elements, about 1 MiB of doubles.
constexpr std::size_t kElementsPerCall = std::size_t{1} << 17;

// The stages: exchange slices, read them as doubles, then for each level of the tree compute the
// inner products of each pair, sum them over the ranks and combine the pairs; then write the result
// and gather the slices. Each computation is cut into calls of kElementsPerCall.
class AdasumWork final : public Work {
 public:
  AdasumWork(Launch launch, const Collective& collective, const ChannelSpec& spec,
             std::span<const std::byte> in, std::span<std::byte> out)
      : launch_(std::move(launch)), collective_(collective), size_(spec.ranks.size()), out_(out) {
    for (int rank = 0; rank < static_cast<int>(size_); ++rank)
      slices_.push_back(rows_of_member(collective.count, static_cast<int>(size_), rank));
    const std::int64_t own = slices_[static_cast<std::size_t>(spec.set_rank)];
    length_ = static_cast<std::size_t>(own);
    own_counts_.assign(size_, own);
    const std::size_t bytes = length_ * size_ * size_of(collective.dtype);
    buffers_->received = std::make_unique_for_overwrite<std::byte[]>(bytes);
    Collective exchange;
    exchange.kind = OpKind::kAlltoall;
    exchange.dtype = collective.dtype;
    exchange.counts = own_counts_;
    exchange.send_counts = slices_;
    work_ = launch_(exchange, in, {buffers_->received.get(), bytes});
  }

  AdasumWork(const AdasumWork&) = delete;
  AdasumWork& operator=(const AdasumWork&) = delete;
  ~AdasumWork() override {
    if (!done_) keep_until_exit(buffers_);
  }

  bool progress() override {
    computed_ = 0;
    while (computed_ < kElementsPerCall) {
      if (work_) {
        if (!work_->progress()) return false;
        if (stage_ == Stage::kGather) return done_ = true;
        work_.reset();
        ++launched_;
        enter(stage_ == Stage::kExchange ? Stage::kRead : Stage::kCombine);
      }
      compute();
    }
    return false;
  }
  bool moved() const noexcept override { return computed_ > 0 || (work_ && work_->moved()); }
  std::optional<ProgressCount> progress_count() const noexcept override {
    // A computation does not wait for a peer.
    if (!work_) return std::nullopt;
    return progress_count_of(launched_, work_->progress_count());
  }

 private:
  enum class Stage { kExchange, kRead, kMultiply, kSum, kCombine, kWrite, kGather };
  struct AdasumBuffers {
    std::unique_ptr<std::byte[]> received = {};
    std::vector<double> products = {};  // for each pair: a.b, a.a, b.b
  };

  std::size_t pairs() const { return vectors_.size() / 2; }

  void enter(Stage stage) {
    stage_ = stage;
    at_ = 0;
    if (stage == Stage::kRead) {
      vectors_.resize(size_);
      for (auto& vector : vectors_) vector.reserve(length_);
    } else if (stage == Stage::kMultiply) {
      buffers_->products.assign(3 * pairs(), 0.0);
    } else if (stage == Stage::kSum) {
      sum();
    } else if (stage == Stage::kGather) {
      gather();
    }
  }

  // Handles the next elements of one of the stage's vectors. Enters the next stage when this one is
  // complete.
  void compute() {
    const std::size_t count = stage_ == Stage::kRead    ? size_
                              : stage_ == Stage::kWrite ? 1
                                                        : pairs();
    const std::size_t total = count * length_;
    if (at_ < total) {
      const std::size_t vector = at_ / length_;
      const std::size_t begin = at_ % length_;
      const std::size_t end = std::min(length_, begin + kElementsPerCall - computed_);
      handle(vector, begin, end);
      at_ += end - begin;
      computed_ += end - begin;
    }
    if (at_ == total) enter(after_computation());
  }

  void handle(std::size_t vector, std::size_t begin, std::size_t end) {
    switch (stage_) {
      case Stage::kRead:
        return read(vector, begin, end);
      case Stage::kMultiply:
        return multiply(vector, begin, end);
      case Stage::kCombine:
        return combine(vector, begin, end);
      default:
        return write(begin, end);
    }
  }

  Stage after_computation() {
    if (stage_ == Stage::kMultiply) return Stage::kSum;
    if (stage_ == Stage::kWrite) return Stage::kGather;
    if (stage_ == Stage::kCombine) {
      for (std::size_t i = 1; i < vectors_.size(); ++i)
        if (i % 2 == 0) vectors_[i / 2] = std::move(vectors_[i]);
      vectors_.resize((vectors_.size() + 1) / 2);
    }
    return vectors_.size() == 1 ? Stage::kWrite : Stage::kMultiply;
  }

  void read(std::size_t vector, std::size_t begin, std::size_t end) {
    const std::size_t element = size_of(collective_.dtype);
    const std::byte* at = buffers_->received.get() + (vector * length_ + begin) * element;
    for (std::size_t k = begin; k < end; ++k, at += element)
      vectors_[vector].push_back(to_double(at, collective_.dtype) * collective_.scale.prescale);
  }

  void multiply(std::size_t pair, std::size_t begin, std::size_t end) {
    double* const products = &buffers_->products[3 * pair];
    for (std::size_t k = begin; k < end; ++k) {
      const double a = vectors_[2 * pair][k];
      const double b = vectors_[2 * pair + 1][k];
      products[0] += a * b;
      products[1] += a * a;
      products[2] += b * b;
    }
  }

  void sum() {
    Collective sum;
    sum.kind = OpKind::kAllreduce;
    sum.dtype = DataType::kFloat64;
    sum.count = static_cast<std::int64_t>(buffers_->products.size());
    const auto bytes = std::as_writable_bytes(std::span(buffers_->products));
    work_ = launch_(sum, bytes, bytes);
  }

  void combine(std::size_t pair, std::size_t begin, std::size_t end) {
    const double* const products = &buffers_->products[3 * pair];
    const double first = factor_of(products[0], products[1]);
    const double second = factor_of(products[0], products[2]);
    auto& a = vectors_[2 * pair];
    const auto& b = vectors_[2 * pair + 1];
    for (std::size_t k = begin; k < end; ++k) a[k] = first * a[k] + second * b[k];
  }

  // Writes the result over the received slices, which are no longer needed.
  void write(std::size_t begin, std::size_t end) {
    const std::size_t element = size_of(collective_.dtype);
    std::byte* at = buffers_->received.get() + begin * element;
    for (std::size_t k = begin; k < end; ++k, at += element)
      from_double(vectors_.front()[k] * collective_.scale.postscale, at, collective_.dtype);
  }

  void gather() {
    Collective gathered;
    gathered.kind = OpKind::kAllgather;
    gathered.dtype = collective_.dtype;
    gathered.count = collective_.count;
    gathered.counts = slices_;
    work_ =
        launch_(gathered, {buffers_->received.get(), length_ * size_of(collective_.dtype)}, out_);
  }

  Launch launch_;
  const std::shared_ptr<AdasumBuffers> buffers_ = std::make_shared<AdasumBuffers>();
  const Collective collective_;
  const std::size_t size_;
  const std::span<std::byte> out_;
  std::size_t length_ = 0;                    // elements of this rank's slice
  std::vector<std::int64_t> slices_;          // elements of each rank's slice
  std::vector<std::int64_t> own_counts_;      // elements received from each rank: length_
  std::vector<std::vector<double>> vectors_;  // this rank's slices of the vectors of this level
  Stage stage_ = Stage::kExchange;
  std::size_t at_ = 0;          // elements that this computation has handled
  std::size_t computed_ = 0;    // elements that the last call of progress() handled
  std::uint64_t launched_ = 1;  // collectives
  bool done_ = false;
  std::unique_ptr<Work> work_;  // null: computing. Last, because it uses the members above
};

}  // namespace

std::unique_ptr<Work> make_adasum(Launch launch, const Collective& collective,
                                  const ChannelSpec& spec, std::span<const std::byte> in,
                                  std::span<std::byte> out) {
  return std::make_unique<AdasumWork>(std::move(launch), collective, spec, in, out);
}

}  // namespace hvd::composite
