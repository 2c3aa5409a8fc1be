#pragma once

#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"

namespace hvd {

/// @addtogroup errors
/// @{

/// Results that must have the same bits are different: a processor or memory is faulty
/// (TrainingArguments::replay_every). Raised on every rank; the runtime remains usable.
class CorruptionError : public Error {
 public:
  CorruptionError(const std::string& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}
  /// The ranks at fault, ascending. If the comparison cannot show which rank is at fault, contains
  /// all candidates.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// @}

}  // namespace hvd
