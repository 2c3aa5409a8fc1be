#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "transport/control_plane.h"

/// Helpers for tests that run as several ranks. A test runs on every rank at once; use EXPECT_
/// between collectives, so that a failure on one rank does not leave the others waiting.
namespace hvd::testing {

int mpi_rank();
int mpi_size();
/// Waits for all ranks, outside of hvd.
void mpi_barrier();

/// Drives the plane until a message has come. @throws hvd::Error after `timeout`.
control::Message receive(control::ControlPlane&, Duration timeout = std::chrono::seconds(30));
/// Drives a Work to its end. @throws hvd::Error after `timeout`.
void complete(Work&, Duration timeout = std::chrono::seconds(60));
/// Drives works side by side, those that there are. @return whether all have ended before `timeout`
bool complete_all(std::vector<Work*>, Duration timeout = std::chrono::seconds(60));
/// 0, 1, ..., size - 1.
std::vector<int> all_ranks();
/// Names that begin so in /dev/shm, and stay there for seconds.
/// @param prefix host::Node::name_prefix() of the job
std::vector<std::string> shared_memory_left_behind(const std::string& prefix);

}  // namespace hvd::testing
