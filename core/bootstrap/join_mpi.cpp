// The only file of core/bootstrap that uses core/transport/mpi.
#include <chrono>
#include <utility>

#include "bootstrap/mpi_module.h"
#include "transport/mpi/environment.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::runtime {
namespace {

class JobOverMpi final : public World {
 public:
  JobOverMpi(std::shared_ptr<mpi::MpiWorld> world, std::chrono::milliseconds timeout)
      : world_(std::move(world)), carrier_(mpi::make_mpi_carrier(world_)), timeout_(timeout) {}

  const std::string& init_method() const noexcept override { return init_method_; }
  const std::shared_ptr<host::Node>& node() const noexcept override { return world_->node(); }
  const std::shared_ptr<message::Carrier>& carrier() const noexcept override { return carrier_; }
  void allgather(const void* mine, void* all, std::size_t bytes) override {
    world_->allgather(mine, all, static_cast<int>(bytes), timeout_);
  }
  void begun() override {}
  void abandon(const std::exception&) noexcept override {}  // the others wait until their deadlines

 private:
  const std::string init_method_ = "mpi://";
  const std::shared_ptr<mpi::MpiWorld> world_;
  const std::shared_ptr<message::Carrier> carrier_;
  const std::chrono::milliseconds timeout_;
};

class LinkedMpi final : public MpiModule {
 public:
  bool active() const noexcept override { return mpi::is_active(); }
  bool threads_multiple() const noexcept override { return mpi::threads_multiple(); }
  std::string library_version() const override { return mpi::library_version(); }
  void forget_peers() noexcept override { mpi::mark_failed(); }
  std::shared_ptr<World> join(std::chrono::milliseconds start_timeout,
                              std::chrono::milliseconds call_timeout) override {
    auto world =
        mpi::MpiWorld::join({.start_timeout = start_timeout, .call_timeout = call_timeout});
    return std::make_shared<JobOverMpi>(std::move(world), start_timeout);
  }
};

MpiModule* linked_mpi() {
  static LinkedMpi module;
  return &module;
}

}  // namespace
}  // namespace hvd::runtime

const hvd::runtime::MpiModuleEntry hvd_mpi_module_entry = {HVD_VERSION, hvd::runtime::linked_mpi};
