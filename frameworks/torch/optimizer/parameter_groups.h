#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace hvd::libtorch {

/// Keeps the parameter groups of a wrapper, which have to be copies, equal to those of the wrapped
/// optimizer. If an option was written on one side since the last call, reconcile() copies it to
/// the other side. See decision 30. Keeps references to both optimizers. Not thread-safe.
///
/// Options of the program's own types are compared by their serialized bytes. If they cannot be
/// serialized, the wrapper's groups have no options.
class GroupMirror {
 public:
  /// Copies the wrapped optimizer's groups to the wrapper, which has no groups yet. @pre the
  /// wrapper's defaults are copies already (unchecked: not all options can be compared)
  /// @param who name of the wrapper, which begins messages
  GroupMirror(torch::optim::Optimizer& wrapped, torch::optim::Optimizer& wrapper, const char* who);

  /// @throws UsageError if an option was written on both sides, to different values, or if
  /// parameters or state were added to the wrapper. Neither side changes then.
  void reconcile();
  /// Like reconcile(), but ignores errors.
  void try_to_reconcile() noexcept;
  /// Replaces the wrapper's groups by copies of the wrapped optimizer's.
  void copy_wrapped_groups();

 private:
  using Options = torch::optim::OptimizerOptions;

  /// A group as it was when both sides were last equal.
  struct Last {
    std::vector<torch::Tensor> parameters;
    std::unique_ptr<Options> options;  ///< null if the type is not one of LibTorch's
    std::string description;           ///< bytes of other options; empty: not serializable

    static Last of(const torch::optim::OptimizerParamGroup& group);
  };

  void refuse_changed_wrapper() const;
  bool wrapped_has_other_parameters() const;
  void merge(bool apply);
  void merge_whole(std::size_t group, bool apply);

  torch::optim::Optimizer& wrapped_;
  torch::optim::Optimizer& wrapper_;
  const char* const who_;
  std::vector<Last> last_;
  std::unique_ptr<Options> last_defaults_;
};

/// The options of LibTorch's optimizer types by name: "learning rate 0.1, betas (0.9, 0.999), ...".
/// Two texts are equal if and only if all options are. For other types: the learning rate and a
/// hash of the serialized options. Options without a learning rate, or that cannot be serialized,
/// all have the same text.
std::string text_of(const torch::optim::OptimizerOptions& options);

/// The options of one of LibTorch's optimizer types as numbers, in a fixed order.
/// @throws UsageError for another type
std::vector<double> option_values(const torch::optim::OptimizerOptions& options);
/// The inverse of option_values(). @throws UsageError for another type, or another number of values
void set_option_values(torch::optim::OptimizerOptions& options, const std::vector<double>& values);

/// A line for each parameter group: "parameter group 0 with learning rate 0.1, ...".
std::vector<std::string> group_lines(const torch::optim::Optimizer& optimizer);

}  // namespace hvd::libtorch
