#include "device/probe.h"

#include <exception>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "base/thread.h"

namespace hvd::device {
namespace {

/// Shared with the thread, which may outlive the caller.
struct Answer {
  Mutex mutex;
  Condition changed;
  bool over HVD_GUARDED_BY(mutex) = false;
  std::string failure HVD_GUARDED_BY(mutex);

  void give(std::string text) {
    const MutexLock lock(mutex);
    over = true;
    failure = std::move(text);
    changed.notify_all();
  }
};

/// Makes calls that fail if an earlier error has broken the context.
std::string try_calls(const std::shared_ptr<Context>& context) {
  try {
    const OwnedStream stream(*context);
    const DeviceGuard guard(context->api(), context->device());
    const EventPtr event = context->events()->record(stream.get());
    event->query();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace

std::string find_failure(const std::shared_ptr<Context>& context, Duration limit) {
  const auto answer = std::make_shared<Answer>();
  start_thread("hvd-probe", [held = context, answer]() mutable {
    std::string failure = try_calls(held);
    held.reset();  // before the caller continues, which may end the use of the device
    answer->give(std::move(failure));
  }).detach();
  const TimePoint deadline = SteadyClock().now() + limit;
  const MutexLock lock(answer->mutex);
  while (!answer->over && SteadyClock().now() < deadline)
    answer->changed.wait_until(answer->mutex, deadline);
  if (answer->over) return answer->failure;
  context->api().give_up();
  return text("device ", context->device(), " has not answered for ", limit);
}

}  // namespace hvd::device
