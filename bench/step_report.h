#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "bench/report.h"

namespace hvd::bench {

struct StepSamples {
  std::string contender;
  std::vector<double> seconds;  ///< the slowest rank's, in the order of the repetitions
  // Peak memory above that of the process without the contender, the largest of all ranks; NaN if
  // unknown.
  double first_peak_bytes = 0;  ///< until the third step is done
  double peak_bytes = 0;        ///< in later steps
};

/// Returns {"repetitions": ..., "contenders": {name: {...}}}: the times, the time added to "alone"
/// and to "one", and hvd's ratio to each contender.
/// @pre all have as many samples as the others, and one of them is "alone"
Json compare_steps(const std::vector<StepSamples>& samples);

/// Adds to a row the results of gloo_peers.py for the same parameter set, if there are any.
void add_gloo_steps(Json& row, const Json& gloo);

void print_step(const Json& row, std::ostream& out);

}  // namespace hvd::bench
