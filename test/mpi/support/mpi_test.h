#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "transport/control_plane.h"
#include "transport/mpi/mpi_world.h"

/// Helpers for tests that run as several ranks. A test runs on every rank at once; use EXPECT_
/// between collectives, so that a failure on one rank does not leave the others waiting.
namespace hvd::testing {

int mpi_rank();
int mpi_size();
/// Waits for all ranks with MPI_Barrier, without hvd.
void mpi_barrier();

/// The control plane of a job over MPI. @param use_mail_rings see message::ControlPlaneOptions
inline std::unique_ptr<control::ControlPlane> mpi_control_plane(
    const std::shared_ptr<mpi::MpiWorld>& world, bool use_mail_rings = true) {
  return message::make_control_plane(mpi::make_mpi_carrier(world), world->node(),
                                     {.use_mail_rings = use_mail_rings});
}

/// Drives the plane until a message arrives. @throws hvd::Error after `timeout`.
control::Message receive(control::ControlPlane&, Duration timeout = std::chrono::seconds(30));
/// Drives a Work to its end. @throws hvd::Error after `timeout`.
void complete(Work&, Duration timeout = std::chrono::seconds(60));
/// Drives several Works at the same time; skips null entries. @return whether all ended before
/// `timeout`
bool complete_all(std::vector<Work*>, Duration timeout = std::chrono::seconds(60));
/// 0, 1, ..., size - 1.
std::vector<int> all_ranks();
/// Returns the names in /dev/shm that begin with `prefix` and are still there after some seconds.
/// @param prefix host::Node::name_prefix() of the job
std::vector<std::string> shared_memory_left_behind(const std::string& prefix);

}  // namespace hvd::testing
