#pragma once

#include <vector>

#include "kernels/kernels_loop.h"

namespace hvd::kernels {

/// The instruction sets that this processor supports.
inline std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const InstructionSet set :
       {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (supports(set)) sets.push_back(set);
  }
  return sets;
}

}  // namespace hvd::kernels
