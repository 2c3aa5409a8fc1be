#pragma once

#include <chrono>
#include <vector>

#include "doctor/facts.h"

namespace hvd::launcher::doctor {

/// Measures the job that this process is a rank of, and adds the results to its report. Collective:
/// every rank of the job calls it once, after hvd::init(). Takes a few seconds at most on a network
/// of 100 Mbit/s or more. A measurement is in the report of the first of its ranks.
/// @throws hvd::Error when an operation fails
void measure_job(RankReport& report);

}  // namespace hvd::launcher::doctor
