#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace hvd::libtorch {

/// The weights of an optimizer's backward passes, and their sum over the ranks. See
/// docs/decisions/0040-weighted-averages.md. Does not depend on LibTorch. Not thread-safe.
///
/// A weight is a number of samples. A pass gets the weight that was set before it, at its first
/// gradient. The weights of a cycle are added on this rank. The sum is sent with the flags of the
/// gradients (see UsedFlags), which are averaged over the ranks: one flag for each rank, which only
/// that rank sets, and the digits of the sum. A digit has so few bits that the average can be
/// turned into the exact sum of all ranks, in each dtype in which flags are sent.
///
/// Gradients are sent in units of a reference weight, the mean weight of a rank in the first
/// weighted cycle in which all ranks took part. With equal weights gradients are then sent as they
/// are, and with any weights they are of the magnitude of unweighted ones.
class GradientWeights {
 public:
  /// The largest sum of the weights of one rank in a cycle.
  static constexpr std::int64_t kMaxSamples = std::int64_t{1} << 40;

  /// @param wrapper name of the user's class, which begins messages
  /// @param ranks the process set, in its order  @param position of this rank in it
  GradientWeights(std::string wrapper, std::string scope, std::vector<int> ranks, int position);

  /// Sets the weight of the next pass. @throws UsageError if it is out of range
  void set(std::int64_t samples);
  /// Sets the weight of a pass that may not reach this optimizer, or declares that it has no
  /// weight. @throws UsageError if the weight is out of range, or set() was called for a pass
  /// without a weight
  void begin_pass(std::optional<std::int64_t> samples);
  /// Ends that pass. If it has not reached the optimizer, its weight is used only if no pass of the
  /// cycle reaches it.
  void end_pass();

  /// Counts the pass, at each of its gradients. @throws UsageError if the cycle also has passes
  /// without a weight, or the sum of its weights is out of range
  void count_pass();
  /// Call it before count_pass() if the program has reset the gradients of earlier passes.
  void forget_earlier_passes();
  /// Whether gradients of the current pass are ignored, because it has no samples.
  bool drops_gradients() const noexcept { return weighted_ && current_ == 0; }
  /// The weight of the current pass; 0 if it has none.
  double current() const noexcept { return static_cast<double>(current_); }

  /// Fixes the weight of this rank for the cycle. Has no effect the second time.
  /// @param precision bits of a number in the flags' dtype
  void close(int precision);
  /// Whether this rank has a weight in the cycle. Final after close().
  bool weighted() const noexcept { return weighted_; }
  /// Whether the ranks have agreed on the reference.
  bool agreed() const noexcept { return agreed_; }
  double reference() const noexcept { return reference_; }
  /// Uses a reference on which all ranks have agreed before.
  void adopt_reference(double reference) {
    reference_ = reference;
    agreed_ = true;
  }

  /// Number of flags. Final after close().
  std::size_t flags() const;
  float flag(std::size_t index) const;
  /// Reads the averages of all ranks' flags in the closed cycle.
  void read(const std::function<float(std::size_t)>& average);
  /// Uses a reference of 1 for a cycle that will fail.
  void use_no_reference() noexcept { reference_ = 1; }
  /// Why the cycle of the last read() has no mean, the same text on every rank; empty if it has
  /// one.
  std::string error() const;
  /// The same as an exception: MismatchError if only some ranks have a weight, UsageError if the
  /// sum is 0.
  void raise_if_error() const;
  /// @throws UsageError if the weight was set after the cycle's backward pass
  void refuse_late() const;
  /// The factor that turns the average of the gradients into the mean over the samples, for the
  /// cycle of the last read(); 1 before the first.
  double factor() const noexcept;
  /// This rank's weight in the last cycle that was read, divided by the mean weight of the ranks; 1
  /// if it had no weight.
  double share() const noexcept { return share_; }
  /// The sum of all ranks' weights in the cycle of the last read(); 0 before the first.
  std::int64_t sum() const noexcept { return sum_; }

  void end_cycle();

 private:
  /// The source of the weight of the next pass.
  enum class Next { kAsBefore, kSet, kOffered, kUnweighted };

  void check_range(std::int64_t samples) const;
  std::string title() const;
  int digit_bits() const;
  std::size_t digits() const;
  std::size_t blocks() const;
  bool mixed() const { return !with_weight_.empty() && !without_weight_.empty(); }

  std::string wrapper_, scope_;
  std::vector<int> ranks_;
  std::size_t position_;

  Next next_ = Next::kAsBefore;
  std::int64_t next_samples_ = 0;
  bool in_pass_ = false;  ///< between begin_pass() and end_pass()
  // These describe the current cycle.
  bool weighted_ = false;
  bool plain_ = false;  ///< a pass without a weight has run
  bool closed_ = false;
  std::int64_t earlier_ = 0;  ///< sum of the weights of earlier passes
  std::int64_t current_ = 0;  ///< weight of the current pass
  int precision_ = 24;
  bool was_weighted_ = false;  ///< the last cycle with a pass or a reduction

  // The last read() sets these.
  std::vector<int> with_weight_, without_weight_;  ///< ranks
  std::int64_t sum_ = 0;
  double share_ = 1;

  double reference_ = 1;
  bool agreed_ = false;
};

}  // namespace hvd::libtorch
