#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "reducer/gradient_reduction.h"

namespace hvd::libtorch {

/// Finds out whether the ranks of an optimizer still have the same parameters. See
/// docs/decisions/0018-parameters-are-compared.md. Not thread-safe.
///
/// In a few cycles each rank has a checksum of its parameters reduced along with something that is
/// sent anyway: every rank has places of its own in it, which the others leave at zero, so that
/// afterwards each rank sees all checksums and all ranks come to the same verdict. In the first
/// cycle, before anything has been updated, every bit counts; later what is compared is a
/// projection, and roundings may differ.
///
/// A cycle in which not all ranks have written theirs decides nothing: one has joined, or its count
/// of cycles is another since it had. All who see it write in the next cycle, once, and then count
/// alike.
class ParameterCheck {
 public:
  /// @param names of the parameters that are trained, as the user calls them
  ParameterCheck(const GradientReduction& how, std::vector<std::string> names,
                 std::vector<torch::Tensor> parameters);

  /// Compares this one, too, before the first update: a frozen parameter, which the optimizer may
  /// not have. @pre no cycle has ended
  void add(const std::string& name, const torch::Tensor& parameter);

  /// Parameters have been updated before, and so may differ by roundings. Checks in the next cycle.
  /// @pre no cycle has ended
  void go_on_after_updates();

  /// How many numbers the ranks need, the same in every cycle. @param like what they travel with
  std::size_t room(const torch::Tensor& like);
  /// This rank's checksum if it is due, else zeros.
  void write(std::span<float> room) const;
  /// Ends the cycle. @param reduced what write() has written, after the reduction
  /// @throws DivergedError that names the first difference, also of the options that ranks compare.
  /// Every rank sees the same checksums, and so throws, or none.
  void compare(std::span<const float> reduced);

  /// Cycles that have ended.
  std::uint64_t cycles() const noexcept { return cycles_; }

 private:
  enum class Mode { kExact = 1, kProjection = 2 };

  bool due() const;
  Mode mode() const { return cycles_ == 0 ? Mode::kExact : Mode::kProjection; }
  std::size_t codes() const { return options_ ? 2 : 1; }
  std::size_t places() const { return 2 + codes() * (32 / bits_); }
  void write_code(std::span<float> place, std::uint32_t code) const;
  std::uint32_t decode(float reduced) const;
  std::uint32_t decode_code(std::span<const float> place) const;
  bool differs(std::span<const float> reduced);
  bool codes_differ(std::span<const float> reduced);
  bool options_differ(std::span<const float> reduced) const;
  [[noreturn]] void throw_of_options() const;
  void warn_of_nonfinite();
  std::string first_difference() const;

  const std::string who_;
  const std::string scope_;
  const int every_;
  const ProcessSet set_;
  const bool average_;
  const bool compressed_;
  const std::function<std::vector<std::string>()> options_;
  std::vector<std::string> names_;
  std::vector<torch::Tensor> parameters_;
  const std::size_t trained_;  ///< as many of the first ones
  std::size_t bits_ = 16;      ///< of a checksum in one number
  std::uint64_t cycles_ = 0;
  int since_ = 0;  ///< cycles since the last check
  bool retry_ = false;
  Mode last_ = Mode::kExact;  ///< of the last check
  bool nonfinite_ = false;    ///< in the last check the parameters of all ranks
  bool warned_ = false;
  bool options_apart_ = false;  ///< at the last check
};

}  // namespace hvd::libtorch
