#include "reducer/gradient_weights.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::libtorch {
namespace {

// Ranks are divided into blocks of this size, and each block has its own digits. A digit of a
// 16-bit dtype therefore has at least one bit for any number of ranks.
constexpr std::size_t kBlock = 32;
// kMaxSamples has 41 bits.
constexpr int kBits = 41;

// The codes of the ranks' own flags.
constexpr float kWeighted = 1, kUnweighted = 2;

constexpr const char* kExpected =
    "expected set_weight(), or the weight of Accelerator::backward(), before each backward pass on "
    "every rank (0 on a rank without samples), or on no rank";

}  // namespace

GradientWeights::GradientWeights(std::string wrapper, std::string scope, std::vector<int> ranks,
                                 int position)
    : wrapper_(std::move(wrapper)),
      scope_(std::move(scope)),
      ranks_(std::move(ranks)),
      position_(static_cast<std::size_t>(position)) {}

std::string GradientWeights::title() const { return text(wrapper_, " (", scope_, "): "); }

void GradientWeights::check_range(std::int64_t samples) const {
  if (samples >= 0 && samples <= kMaxSamples) return;
  throw UsageError(text(title(), "weight: expected a number of samples from 0 to 2^40, got ",
                        samples, " on rank ", ranks_[position_]));
}

void GradientWeights::set(std::int64_t samples) {
  check_range(samples);
  next_ = Next::kSet;
  next_samples_ = samples;
}

void GradientWeights::begin_pass(std::optional<std::int64_t> samples) {
  if (samples) {
    set(*samples);
    next_ = Next::kOffered;
    in_pass_ = true;
    return;
  }
  if (next_ == Next::kSet) {
    throw UsageError(text(title(),
                          "set_weight() was called before Accelerator::backward() on rank ",
                          ranks_[position_],
                          ", which takes the weight itself; expected backward(loss, {.weight = n}) "
                          "and no call of set_weight()"));
  }
  next_ = Next::kUnweighted;
  in_pass_ = true;
}

void GradientWeights::end_pass() {
  in_pass_ = false;
  const bool reached = weighted_ || plain_;
  if (next_ == Next::kUnweighted || (next_ == Next::kOffered && reached)) next_ = Next::kAsBefore;
}

void GradientWeights::count_pass() {
  if (next_ == Next::kAsBefore || next_ == Next::kUnweighted) {
    if (next_ == Next::kUnweighted && weighted_) {
      throw UsageError(text(title(),
                            "a backward pass without a weight follows one with a weight in "
                            "the same step on rank ",
                            ranks_[position_], "; ", kExpected,
                            "; add up the losses of one batch before backward()"));
    }
    plain_ = plain_ || !weighted_;
    return;
  }
  if (plain_) {
    throw UsageError(text(title(),
                          "a weight was set after a backward pass without one in the same "
                          "step on rank ",
                          ranks_[position_], "; ", kExpected));
  }
  check_range(earlier_ + current_ + next_samples_);
  earlier_ += current_;
  current_ = next_samples_;
  weighted_ = true;
  next_ = Next::kAsBefore;
}

void GradientWeights::forget_earlier_passes() {
  earlier_ = 0;
  if (next_ == Next::kAsBefore) return;
  current_ = 0;
  weighted_ = plain_ = false;
}

void GradientWeights::close(int precision) {
  if (closed_) return;
  closed_ = true;
  precision_ = precision;
  if (weighted_ || plain_) return;
  // No pass has reached the optimizer on this rank, but the rank may still have samples.
  if (next_ == Next::kSet || next_ == Next::kOffered) {
    current_ = next_samples_;
    weighted_ = true;
    next_ = Next::kAsBefore;
  } else if (next_ == Next::kAsBefore) {
    weighted_ = was_weighted_;  // a rank without a batch
  }
}

/// Every digit, summed over a block, must be exact after the roundings of an average: 16-bit types
/// round the digit and the result, float32 each addition too.
int GradientWeights::digit_bits() const {
  const auto most = std::int64_t{1} << (precision_ >= 24 ? 17 : precision_ - 3);
  const auto block = static_cast<std::int64_t>(std::min(ranks_.size(), kBlock));
  int bits = 1;
  while (block * ((std::int64_t{2} << bits) - 1) <= most) ++bits;
  return bits;
}

std::size_t GradientWeights::digits() const {
  const int bits = digit_bits();
  return static_cast<std::size_t>((kBits + bits - 1) / bits);
}

std::size_t GradientWeights::blocks() const { return (ranks_.size() + kBlock - 1) / kBlock; }

std::size_t GradientWeights::flags() const {
  return weighted_ || agreed_ ? ranks_.size() + blocks() * digits() : 0;
}

float GradientWeights::flag(std::size_t index) const {
  if (index < ranks_.size()) {
    if (index != position_) return 0;
    return weighted_ ? kWeighted : kUnweighted;
  }
  const std::size_t digit = index - ranks_.size();
  if (!weighted_ || digit / digits() != position_ / kBlock) return 0;
  const int bits = digit_bits();
  const std::int64_t mask = (std::int64_t{1} << bits) - 1;
  const auto shift = static_cast<int>(digit % digits()) * bits;
  return static_cast<float>(((earlier_ + current_) >> shift) & mask);
}

void GradientWeights::read(const std::function<float(std::size_t)>& average) {
  with_weight_.clear();
  without_weight_.clear();
  sum_ = 0;
  share_ = 1;
  if (flags() == 0) return;
  std::int64_t present = 0;  // ranks that have not joined
  for (std::size_t r = 0; r < ranks_.size(); ++r) present += average(r) > 0 ? 1 : 0;
  const auto total = [&](std::size_t index) {
    return std::llround(static_cast<double>(average(index)) * static_cast<double>(present));
  };
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (const auto code = static_cast<float>(total(r)); code > 0)
      (code == kWeighted ? with_weight_ : without_weight_).push_back(ranks_[r]);
  }
  const int bits = digit_bits();
  for (std::size_t block = 0; block < blocks(); ++block) {
    for (std::size_t digit = 0; digit < digits(); ++digit)
      sum_ += total(ranks_.size() + block * digits() + digit) << (static_cast<int>(digit) * bits);
  }
  if (!weighted_ || sum_ == 0 || mixed()) return;
  const double mean = static_cast<double>(sum_) / static_cast<double>(present);
  share_ = static_cast<double>(earlier_ + current_) / mean;
  if (agreed_) return;
  reference_ = std::max(1.0, std::round(mean));
  agreed_ = static_cast<std::size_t>(present) == ranks_.size();
}

std::string GradientWeights::error() const {
  if (mixed()) {
    return text(title(), rank_list(without_weight_), without_weight_.size() == 1 ? " has" : " have",
                " set no weight for this step, and ", rank_list(with_weight_),
                with_weight_.size() == 1 ? " has; " : " have; ", kExpected);
  }
  if (!weighted_ || sum_ > 0) return {};
  return text(
      title(),
      "the weights of all ranks are 0 in this step, so that there is no mean over samples; "
      "expected at least one sample on some rank; if no rank has any, leave the step out on "
      "every rank");
}

void GradientWeights::raise_if_error() const {
  const std::string found = error();
  if (found.empty()) return;
  if (mixed()) throw MismatchError(found);
  throw UsageError(found);
}

void GradientWeights::refuse_late() const {
  if (next_ != Next::kSet || !plain_) return;
  throw UsageError(text(title(),
                        "set_weight() was called after the backward pass of this step on rank ",
                        ranks_[position_],
                        ", so that the gradients were reduced without the weight; expected "
                        "set_weight() before backward()"));
}

double GradientWeights::factor() const noexcept {
  if (!weighted_ || sum_ == 0) return 1;
  return static_cast<double>(with_weight_.size()) * reference_ / static_cast<double>(sum_);
}

void GradientWeights::end_cycle() {
  if (closed_ || weighted_ || plain_) was_weighted_ = weighted_;
  weighted_ = plain_ = closed_ = false;
  earlier_ = current_ = 0;
  if (next_ != Next::kSet && !in_pass_) next_ = Next::kAsBefore;
}

}  // namespace hvd::libtorch
