#include "device/event_pool.h"

#include <utility>

#include "base/log.h"

namespace hvd::device {

class RecordedEvent final : public Event {
 public:
  RecordedEvent(std::shared_ptr<EventPool> pool, EventHandle handle)
      : pool_(std::move(pool)), handle_(handle) {}
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;
  ~RecordedEvent() override { pool_->give_back(handle_); }

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
    HVD_LOG(kDebug) << "the events of device " << device_
                    << " were not freed: " << error.what();  // the process ends
  }
}

EventPtr EventPool::record(Stream stream) {
  const DeviceGuard guard(*api_, device_);
  const EventHandle handle = take();
  auto event = std::make_shared<RecordedEvent>(shared_from_this(), handle);
  api_->record(handle, stream);
  return event;
}

EventHandle EventPool::take() {
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      const EventHandle handle = free_.back();
      free_.pop_back();
      return handle;
    }
    ++made_;
    free_.reserve(made_);  // so that give_back() cannot fail
  }
  return api_->create_event();
}

void EventPool::give_back(EventHandle handle) noexcept {
  const MutexLock lock(mutex_);
  free_.push_back(handle);
}

std::size_t EventPool::made() const {
  const MutexLock lock(mutex_);
  return made_;
}

}  // namespace hvd::device
