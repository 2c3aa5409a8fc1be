#include "hvd/device.h"

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "bootstrap/gpu.h"
#include "device/context.h"
#include "engine/runtime.h"
#include "hvd/error.h"
#include "public/process.h"

namespace hvd {
namespace {

device::Context& usable_device(const runtime::Runtime& runtime, const char* function,
                               void* stream) {
  if (!runtime.device())
    throw UsageError(std::string("hvd::") + function +
                     ": this rank has no GPU to use; see hvd::build_info()");
  device::Context& context = *runtime.device();
  const device::DeviceGuard guard(context.api(), context.device());
  if (context.api().capturing({stream})) {
    throw UsageError(std::string("hvd::") + function +
                     ": the stream is being captured into a CUDA graph, and an operation of hvd "
                     "cannot be part of one; expected a stream that "
                     "works; capture forward and backward under no_sync(), and call operations, "
                     "wait() and step() outside of the capture");
  }
  return context;
}

}  // namespace

std::optional<int> gpu_index() {
  const auto runtime = runtime::current_runtime();
  if (!runtime->device()) return std::nullopt;
  return runtime->device()->device();
}

EventPtr record_event(void* stream) {
  const auto runtime = runtime::current_runtime();
  return usable_device(*runtime, "record_event", stream).events()->record({stream});
}

void use_device_memory(DeviceMemory memory) { runtime::use_device_memory(std::move(memory)); }

void wait_for_event(void* stream, const EventPtr& event) {
  const auto runtime = runtime::current_runtime();
  device::Context& context = usable_device(*runtime, "wait_for_event", stream);
  const device::DeviceGuard guard(context.api(), context.device());
  context.wait({stream}, event);
}

void wait_on_host(const EventPtr& event) {
  if (event == nullptr) return;
  const auto runtime = runtime::current_runtime();
  // Meanwhile the engine checks the communicators, on its own thread.
  while (!runtime->failed() && !event->query())
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  // The engine records a failure before it ends the collectives on the device.
  if (runtime->failed()) runtime->failure().raise_if_error();
}

}  // namespace hvd
