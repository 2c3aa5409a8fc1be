#include "device/marks.h"

#include <utility>

#include "base/log.h"

namespace hvd::device {

class RecordedEvent final : public Event {
 public:
  RecordedEvent(std::shared_ptr<MarkPool> pool, Mark mark) : pool_(std::move(pool)), mark_(mark) {}
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;
  ~RecordedEvent() override { pool_->give_back(mark_); }

  bool query() const override {
    const DeviceGuard guard(*pool_->api_, pool_->device_);
    return pool_->api_->reached(mark_);
  }
  void* native() const noexcept override { return mark_.handle; }

 private:
  const std::shared_ptr<MarkPool> pool_;
  const Mark mark_;
};

std::shared_ptr<MarkPool> MarkPool::create(std::shared_ptr<Api> api, int device) {
  return std::shared_ptr<MarkPool>(new MarkPool(std::move(api), device));
}

MarkPool::~MarkPool() {
  try {
    const DeviceGuard guard(*api_, device_);
    for (const Mark mark : free_) api_->destroy_mark(mark);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the events of device " << device_
                    << " were not freed: " << error.what();  // the process ends
  }
}

EventPtr MarkPool::record(Stream stream) {
  const DeviceGuard guard(*api_, device_);
  const Mark mark = take();
  auto event = std::make_shared<RecordedEvent>(shared_from_this(), mark);
  api_->record(mark, stream);
  return event;
}

Mark MarkPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const Mark mark = free_.back();
      free_.pop_back();
      return mark;
    }
    ++made_;
    free_.reserve(made_);  // so that give_back() cannot fail
  }
  return api_->create_mark();
}

void MarkPool::give_back(Mark mark) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(mark);
}

std::size_t MarkPool::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

}  // namespace hvd::device
