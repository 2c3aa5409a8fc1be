#include "device/context.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {

Context::Context(std::shared_ptr<Api> api, int device)
    : api_(std::move(api)), device_(device), events_(EventPool::create(api_, device)) {}

Context::~Context() {
  if (!plans_) return;
  try {
    const DeviceGuard guard(*api_, device_);
    plans_.reset();
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "device " << device_ << " was not left in order: " << error.what();
  }
}

PlanCache& Context::plans() {
  if (!plans_) plans_ = std::make_unique<PlanCache>(*api_, events_);
  return *plans_;
}

void Context::wait(Stream stream, const EventPtr& event) {
  if (event == nullptr) return;
  void* const handle = event->native();
  if (handle == nullptr) {
    throw Error("device " + std::to_string(device_) +
                ": an input_ready event without a handle of the device; expected one whose "
                "native() is a CUDA event");
  }
  api_->wait(stream, {handle});
}

Allocator Context::plain_memory() {
  return {[this](std::size_t bytes) { return api_->allocate(bytes); },
          [this](std::byte* memory) { api_->release(memory); }};
}

OwnedStream::OwnedStream(Context& context) : context_(context) {
  const DeviceGuard guard(context_.api(), context_.device());
  stream_ = context_.api().create_stream();
}

OwnedStream::~OwnedStream() {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    context_.api().destroy_stream(stream_);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a stream of device " << context_.device()
                    << " was not freed: " << error.what();
  }
}

}  // namespace hvd::device
