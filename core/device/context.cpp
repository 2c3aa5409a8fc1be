#include "device/context.h"

#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {

class RecordedEvent final : public Event {
 public:
  RecordedEvent(std::shared_ptr<EventPool> pool, EventHandle handle)
      : pool_(std::move(pool)), handle_(handle) {}
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;
  ~RecordedEvent() override { pool_->release(handle_); }

  bool query() const override {
    const DeviceGuard guard(*pool_->api_, pool_->device_);
    return pool_->api_->reached(handle_);
  }
  void* native() const noexcept override { return handle_.handle; }

 private:
  const std::shared_ptr<EventPool> pool_;
  const EventHandle handle_;
};

std::shared_ptr<EventPool> EventPool::create(std::shared_ptr<Api> api, int device) {
  return std::shared_ptr<EventPool>(new EventPool(std::move(api), device));
}

EventPool::~EventPool() {
  try {
    const DeviceGuard guard(*api_, device_);
    for (const EventHandle handle : free_) api_->destroy_event(handle);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the events of device " << device_ << " were not freed: " << error.what();
  }
}

EventPtr EventPool::record(Stream stream) {
  const DeviceGuard guard(*api_, device_);
  const EventHandle handle = acquire();
  auto event = std::make_shared<RecordedEvent>(shared_from_this(), handle);
  api_->record(handle, stream);
  return event;
}

EventHandle EventPool::acquire() {
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      const EventHandle handle = free_.back();
      free_.pop_back();
      return handle;
    }
    ++created_;
    free_.reserve(created_);  // so that release() cannot fail
  }
  return api_->create_event();
}

void EventPool::release(EventHandle handle) noexcept {
  const MutexLock lock(mutex_);
  free_.push_back(handle);
}

std::size_t EventPool::created() const {
  const MutexLock lock(mutex_);
  return created_;
}

MemorySource::MemorySource(std::shared_ptr<Api> api, int device, std::shared_ptr<EventPool> events,
                           DeviceMemory framework)
    : api_(std::move(api)),
      device_(device),
      events_(std::move(events)),
      framework_(std::move(framework)) {}

OwnedMemory MemorySource::allocate(std::size_t bytes) {
  OwnedMemory allocated;
  with_room(bytes, [&] { allocated = allocate_once(bytes); });
  return allocated;
}

void MemorySource::with_room(std::size_t bytes, const std::function<void()>& allocate) {
  const DeviceGuard guard(*api_, device_);
  std::string reason;
  try {
    return allocate();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  try {
    if (framework_.empty_cache) {
      HVD_LOG(kDebug) << "device " << device_ << " is short of memory for " << bytes
                      << " bytes, emptying the framework's cache: " << reason;
      framework_.empty_cache(device_);
      return allocate();
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  throw Error(text("device ", device_, " has no memory for a buffer of ", bytes, " bytes (",
                   bytes >> 20, " MiB): ", reason,
                   "; make room with a smaller batch or model, or a smaller HVD_FUSION_THRESHOLD"));
}

// Note [When a buffer is usable]: a stream-ordered allocator may return memory that earlier work of
// its stream still uses, because it expects the caller to use that stream too. hvd uses its own
// streams, so these first wait for the work that was queued on the allocator's stream at the
// allocation. Freeing needs no such wait, because hvd frees memory only after the host has observed
// that the device is done with it.
OwnedMemory MemorySource::allocate_once(std::size_t bytes) {
  if (framework_.allocate) {
    DeviceBlock block = framework_.allocate(device_, bytes);
    if (block.memory != nullptr) return {std::move(block.memory), events_->record({block.stream})};
  }
  return {owned(api_->allocate(bytes), [api = api_](std::byte* memory) { api->release(memory); })};
}

std::shared_ptr<std::byte> MemorySource::owned(std::byte* memory,
                                               std::function<void(std::byte*)> free) {
  return {memory, [source = shared_from_this(), free = std::move(free)](std::byte* last) {
            try {
              const DeviceGuard guard(*source->api_, source->device_);
              free(last);
            } catch (const std::exception& error) {
              // The device has failed; its operations report that.
              HVD_LOG(kDebug) << "memory of device " << source->device_
                              << " was not freed: " << error.what();
            }
          }};
}

Context::Context(std::shared_ptr<Api> api, int device, ContextDeps deps)
    : api_(std::move(api)),
      device_(device),
      events_(EventPool::create(api_, device)),
      memory_(std::make_shared<MemorySource>(api_, device, events_, std::move(deps.memory))),
      run_on_helper_(std::move(deps.run_on_helper)) {}

void Context::copy_pieces(std::span<const Piece> pieces, const CopyForm& form, std::byte* buffer,
                          bool to_buffer, double factor, Stream stream) {
  CopyLaunch launch{.buffer = buffer, .form = form, .to_buffer = to_buffer, .factor = factor};
  PieceCutter cutter(pieces, form);
  while (cutter.next(launch.table)) api_->run(launch, stream);
}

void Context::wait(Stream stream, const EventPtr& event) {
  if (event == nullptr) return;
  void* const handle = event->native();
  if (handle == nullptr) {
    throw Error(text("device ", device_,
                     ": an input_ready event without a handle of the device; expected one whose "
                     "native() is a CUDA event"));
  }
  api_->wait(stream, {handle});
}

void Context::run_on_helper(std::function<void()> function) {
  run_on_helper_ ? run_on_helper_(std::move(function)) : function();
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
