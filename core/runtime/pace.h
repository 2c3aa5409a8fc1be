#pragma once

#include <string>

#include "hvd/options.h"

namespace hvd::runtime {

/// How a rank uses the cores it has.
struct Pace {
  bool inline_progress = false;  ///< submitting threads do at once what can be done at once
  bool spins = false;            ///< a thread that waits keeps its core for a moment before it gives it away
};

/// @param ranks of this host
Pace choose_pace(ProgressMode, int ranks);

/// For people: "inline progress, 1 core per rank".
std::string describe(const Pace&, int ranks);

}  // namespace hvd::runtime
