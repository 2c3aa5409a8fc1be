#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// How the ranks of a set, in the middle of one checkpoint, find out that each of them has done its
/// part. The names of its operations begin with `label`, so that two of them can be under way at a
/// time. One thread at a time.
class RankTalk {
 public:
  RankTalk(ProcessSet process_set, std::string label)
      : process_set_(std::move(process_set)), label_(std::move(label)) {}

  const ProcessSet& process_set() const noexcept { return process_set_; }
  int rank() const { return process_set_.rank(); }
  bool first() const { return rank() == 0; }

  /// Does this rank's part, which returns what it has to say to the others. Collective: a rank
  /// whose part has failed takes part too. @param phase what is done, in the names of operations
  /// @return what all ranks return, in the order of the set
  /// @throws CheckpointError on every rank when the part of any has failed, naming it;
  /// MismatchError when a rank is in join(), so that it takes no part; StalledError
  std::vector<std::string> after(const std::string& phase,
                                 const std::function<std::string()>& part) const;

  /// The first rank's bytes, on every rank. The others' `bytes` are replaced. Collective.
  void broadcast_bytes(const std::string& phase, std::string& bytes) const;

 private:
  ProcessSet process_set_;
  std::string label_;
};

/// What a state names, for a comparison between ranks. @param with_contents also what ranks that
/// save it must have in common
std::string description_of(const TrainingState& state, bool with_contents = false);

/// @param descriptions one per rank of the set
/// @throws MismatchError when a rank's is not that of the first
void require_equal(const std::vector<std::string>& descriptions, const ProcessSet& process_set,
                   const std::string& who);

}  // namespace hvd::libtorch
