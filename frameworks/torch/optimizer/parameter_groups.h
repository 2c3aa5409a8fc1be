#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace hvd::libtorch {

/// Keeps the parameter groups of a wrapper, which LibTorch makes copies, and those of the optimizer
/// that it wraps one: reconcile() brings an option that was written on one side since the last time
/// to the other. See decision 30. Refers to both. Not thread-safe.
///
/// Of options of the program's own types bytes are compared, as they are serialized; those that
/// cannot be serialized the wrapper's groups do not have.
class GroupMirror {
 public:
  /// The wrapper gets copies of the wrapped one's groups. It has none. @pre its defaults are copies
  /// already (unchecked: not all options can be compared)  @param who begins messages
  GroupMirror(torch::optim::Optimizer& wrapped, torch::optim::Optimizer& wrapper, const char* who);

  /// @throws UsageError when one option was written on both sides, to different values, or when the
  /// wrapper's groups have got other parameters, or it has got state. Nothing has changed then.
  void reconcile();
  /// The same, but without the error it leaves everything as it is.
  void try_to_reconcile() noexcept;
  /// The wrapper's groups become what the wrapped one's are, whatever they were.
  void take_over();

 private:
  using Options = torch::optim::OptimizerOptions;

  /// How it was when both sides were the same.
  struct Last {
    std::vector<torch::Tensor> parameters;
    std::unique_ptr<Options> options;  ///< null: of no type of LibTorch's
    std::string description;           ///< instead of them; empty: not serialized

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
/// Two texts are equal if and only if all options are. Of another type the learning rate and a
/// number for what it serializes; a type that cannot be serialized, or has no learning rate, says
/// so and is equal to itself.
std::string text_of(const torch::optim::OptimizerOptions& options);

/// A line for each parameter group: "parameter group 0 with learning rate 0.1, ...".
std::vector<std::string> group_lines(const torch::optim::Optimizer& optimizer);

}  // namespace hvd::libtorch
