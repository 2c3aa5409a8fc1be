#include "backend/nccl/comm_teardown.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "base/thread.h"

namespace hvd::nccl {

/// Whether a thread that ends communicators is done. Shared with that thread, which may outlive
/// every other object.
struct CommTeardown::Ending {
  Mutex mutex;
  Condition changed;
  bool over HVD_GUARDED_BY(mutex) = false;

  void end() {
    const MutexLock lock(mutex);
    over = true;
    changed.notify_all();
  }
  bool wait_until(TimePoint deadline) {
    const MutexLock lock(mutex);
    while (!over && SteadyClock().now() < deadline) changed.wait_until(mutex, deadline);
    return over;
  }
};

CommTeardown::CommTeardown(std::shared_ptr<Library> library,
                           std::shared_ptr<device::Context> device, Duration limit)
    : library_(std::move(library)), device_(std::move(device)), limit_(limit) {}

CommTeardown::~CommTeardown() { wait(); }

void CommTeardown::add(Comm comm) { comms_.push_back(comm); }

void CommTeardown::abort_all() noexcept { begin(std::exchange(comms_, {}), true); }

void CommTeardown::abort(Comm comm) noexcept {
  if (std::erase(comms_, comm) > 0) begin({comm}, true);
}

void CommTeardown::destroy(Comm comm) noexcept {
  if (std::erase(comms_, comm) > 0) begin({comm}, false);
}

void CommTeardown::begin(std::vector<Comm> comms, bool aborts) noexcept {
  if (comms.empty()) return;
  try {
    auto ending = std::make_shared<Ending>();
    endings_.push_back(ending);
    start_thread("hvd-nccl-end", [library = library_, device = device_, comms = std::move(comms),
                                  aborts, ending = std::move(ending)]() mutable {
      try {
        const device::DeviceGuard guard(device->api(), device->device());
        aborts ? library->abort(comms) : library->destroy(comms.front());
      } catch (const std::exception& error) {
        HVD_LOG(kError) << "NCCL communicators were not freed: " << error.what();
      }
      // Release both before the notification: after it the owner may destroy the objects that they
      // depend on.
      library.reset();
      device.reset();
      ending->end();
    }).detach();
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

bool CommTeardown::wait() noexcept {
  if (device_->api().given_up()) return false;
  const TimePoint deadline = SteadyClock().now() + limit_;
  for (const auto& ending : endings_) {
    if (ending->wait_until(deadline)) continue;
    give_up("some work on the GPU does not end");
    return false;
  }
  endings_.clear();
  return true;
}

void CommTeardown::give_up(const char* why) noexcept {
  device_->api().give_up();
  try {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(limit_);
    const std::string device = text("device ", device_->device());
    HVD_LOG(kError) << "NCCL has not freed its communicators on " << device << " within "
                    << limit.count() << " ms: " << why << ". hvd gives up " << device
                    << ": its memory stays allocated until the process ends, and hvd does not "
                       "use it again";
    limit_exit(limit, text("the process's exit handlers have not returned within ", limit.count(),
                           " ms, and ", device,
                           " had been given up, and CUDA's handlers may wait for it; ended the "
                           "process without them"));
  } catch (const std::exception&) {  // no memory for the texts
  }
}

}  // namespace hvd::nccl
