#pragma once

#include <algorithm>
#include <memory>

#include "conformance/conformance_suite.h"
#include "mpi/support/mpi_test.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::conformance {

/// A rank with a channel in its own MPI world, of all ranks or of all but rank 0.
class MpiHarness final : public Harness {
 public:
  /// @param make_backend makes the backend from the world and its carrier
  MpiHarness(const auto& make_backend, bool without_rank_0)
      : world_(mpi::MpiWorld::join({.start_timeout = std::chrono::seconds(30)})),
        plane_(testing::mpi_control_plane(world_)),
        backend_(make_backend(*world_, mpi::make_mpi_carrier(world_))) {
    ChannelSpec spec{.process_set = without_rank_0 ? 1 : 0, .ranks = testing::all_ranks()};
    if (without_rank_0) spec.ranks.erase(spec.ranks.begin());
    const auto own = std::find(spec.ranks.begin(), spec.ranks.end(), testing::mpi_rank());
    size_ = static_cast<int>(spec.ranks.size());
    if (own == spec.ranks.end()) return;
    spec.set_rank = rank_ = static_cast<int>(own - spec.ranks.begin());
    channel_ = backend_->open(spec, *plane_);
  }
  ~MpiHarness() override {
    testing::mpi_barrier();
    plane_->farewell();
  }

  bool member() const { return channel_ != nullptr; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Channel& channel() override { return *channel_; }
  void run(Work& work) override { testing::complete(work); }

 private:
  std::shared_ptr<mpi::MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Channel> channel_;
  int rank_ = -1;
  int size_ = 0;
};

}  // namespace hvd::conformance
