#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// Runs the phases of one checkpoint on the ranks of a set, and compares their results after each:
/// a phase that fails on one rank fails on all of them. Names of operations begin with `label`, so
/// checkpoints with different labels may be under way at the same time. Not thread-safe.
class CheckpointVote {
 public:
  CheckpointVote(ProcessSet process_set, std::string label)
      : process_set_(std::move(process_set)), label_(std::move(label)) {}

  const ProcessSet& process_set() const noexcept { return process_set_; }
  int rank() const { return process_set_.rank(); }
  std::size_t ranks() const { return static_cast<std::size_t>(process_set_.size()); }
  bool first() const { return rank() == 0; }

  /// Runs this rank's part and sends its result to all ranks. Collective, also for a rank whose
  /// part throws. @param phase part of the operation's name
  /// @return the results of all ranks, in the order of the set
  /// @throws CheckpointError on every rank when any part has thrown, with that rank and its error;
  /// MismatchError when a rank has called join() and takes no part; StalledError
  std::vector<std::string> run(const std::string& phase,
                               const std::function<std::string()>& part) const;

  /// Compares descriptions that run() has returned. Does not communicate.
  /// @throws MismatchError when one differs from the first rank's
  void require_equal_descriptions(const std::vector<std::string>& descriptions) const;

  /// Sends `bytes` bytes from one rank to the others. Collective.
  /// @param sender the position of a rank in the set
  /// @param data of `bytes` bytes on every rank; only read on the sender
  void broadcast_bytes(const std::string& phase, std::size_t sender, char* data,
                       std::size_t bytes) const;

 private:
  ProcessSet process_set_;
  std::string label_;
};

/// The names and kinds of a state's items, for a comparison between ranks. @param with_contents
/// adds the values that must be equal on all ranks that save the state
std::string description_of(const TrainingState& state, bool with_contents = false);

}  // namespace hvd::libtorch
