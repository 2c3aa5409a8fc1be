#pragma once

#include <string>

#include "bench/report.h"

namespace hvd::bench {

/// Bandwidth against size, both logarithmic, one line per contender: a picture in SVG.
/// @param document what `hvd-bench collectives --json` wrote
/// @throws std::invalid_argument when it holds nothing of that kind
std::string bandwidth_svg(const Json& document, const std::string& kind);

}  // namespace hvd::bench
