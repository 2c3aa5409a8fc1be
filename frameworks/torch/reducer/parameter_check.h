#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "reducer/fingerprint.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// Compares the parameters of an optimizer between its ranks every few cycles. See
/// docs/decisions/0018-parameters-are-compared.md. Not thread-safe.
///
/// A rank that is due for a check requests it, and a check begins in every cycle in which a rank
/// requests one. Ranks that have joined and returned, whose counts are behind, therefore check in
/// the same cycles as the others. A check is one allreduce of the fingerprints of all parameters,
/// which gives the smallest and the largest of each. A joined rank does not contribute. A check
/// before the first update compares all bits; later ones compare up to roundings.
///
/// A check of all bits, or of parameters in host memory, ends in the cycle in which it begins. A
/// later check of parameters on a GPU copies its result to the host asynchronously, and reads it in
/// the next cycle.
class ParameterCheck {
 public:
  /// @param names the user's names of the trained parameters
  ParameterCheck(const GradientReduction& how, const std::vector<std::string>& names,
                 const std::vector<torch::Tensor>& parameters);

  /// Also compares this frozen parameter before the first update. @pre no cycle has ended
  void add_frozen(const std::string& name, const torch::Tensor& parameter);
  /// Call it if parameters have already been updated, and so may differ by roundings. The next
  /// cycle then has a check. @pre no cycle has ended
  void continue_after_updates();

  /// Whether this rank requests a check in the current cycle.
  bool is_due() const;
  /// Whether a cycle has ended, and parameters may therefore have been updated.
  bool has_updates() const noexcept { return cycles_ > 0; }
  /// Whether the last check's result has not been read yet.
  bool under_way() const noexcept { return received_at_.has_value(); }
  /// Ends the cycle, before its update. Collective if `due`, or if a check is under way.
  /// @param due whether any rank is_due()  @param updated whether any rank has_updates()
  /// @param all_under_way whether every rank but joined ones has a check under_way(). Otherwise
  /// this rank drops the result of its check, and the next cycle has a check.
  /// @throws DivergedError on every rank. It names the first parameter or option that differs.
  void end_cycle(bool due, bool updated, bool all_under_way);

  /// Number of cycles that have ended.
  std::uint64_t cycles() const noexcept { return cycles_; }

 private:
  enum class Role { kTrained, kFrozen, kStatistics };
  struct ComparedTensor {
    std::string name;
    torch::Tensor tensor;
    Role role;
  };

  void begin_check();
  std::vector<torch::Tensor> choose_compared();
  void exchange_on_host();
  void exchange_on_gpu(const std::vector<torch::Tensor>& on_gpu);
  void run(bool wait_for_stream);
  void compare(const std::int64_t* largest, std::size_t count);
  [[noreturn]] void throw_diverged(const std::string& difference) const;
  [[noreturn]] void throw_of_options() const;
  std::string difference_at(std::size_t index);
  void warn_of_nonfinite();
  void warn_of_statistics(const std::string& first, std::size_t others);

  const std::string wrapper_;
  const std::string scope_;
  const int every_;
  const ProcessSet set_;
  const std::function<std::vector<std::string>()> options_;
  std::vector<ComparedTensor> items_;
  std::uint64_t cycles_ = 0;
  int since_ = 0;      ///< cycles since the last check
  bool soon_ = false;  ///< the next cycle has a check

  // The last check.
  Comparison comparison_ = Comparison::kExact;
  std::uint64_t checked_cycle_ = 0;
  std::vector<std::size_t> compared_;  ///< indices into items_
  /// Fingerprints of the options and of compared_, without projections on a GPU.
  std::vector<std::int64_t> values_;
  torch::Tensor gpu_values_;  ///< all values, if there are projections on a GPU
  torch::Tensor message_;     ///< the values, and their complements
  Submission submission_;     ///< of message_
  Operation operation_;
  torch::Tensor received_;                 ///< message_ after the reduction, on the host
  std::optional<c10::Event> received_at_;  ///< while a check on a GPU is under way
  bool warned_of_nonfinite_ = false;
  bool warned_of_statistics_ = false;
};

}  // namespace hvd::libtorch
