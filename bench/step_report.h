#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "bench/report.h"

namespace hvd::bench {

struct StepSamples {
  std::string contender;
  std::vector<double> seconds;  ///< the slowest rank's, in the order of the repetitions
  // Above what the process held without the contender, of the larger rank; NaN when that is not
  // known.
  double first_peak_bytes = 0;  ///< until the third step is done
  double peak_bytes = 0;        ///< in later steps
};

/// {"repetitions": ..., "contenders": {name: {...}}}: times, what they add to "alone" and to "one",
/// and hvd's ratios to each.
/// @pre all have as many samples as the others, and one of them is "alone"
Json compare_steps(const std::vector<StepSamples>& samples);

/// Adds to a row what gloo_peers.py measured of the same parameter set, if it did.
void add_gloo_steps(Json& row, const Json& gloo);

void print_step(const Json& row, std::ostream& out);

}  // namespace hvd::bench
