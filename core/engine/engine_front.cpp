#include "engine/engine_front.h"

#include <utility>

#include "base/expect.h"

namespace hvd::runtime {

void EngineFront::enqueue(std::span<const OperationPtr> operations) {
  const MutexLock lock(mutex_);
  submitted_.insert(submitted_.end(), operations.begin(), operations.end());
  for (const OperationPtr& operation : operations)
    callbacks_submitted_ = callbacks_submitted_ || operation->calls_back();
  has_submissions_.store(true, std::memory_order_release);
}

std::vector<OperationPtr> EngineFront::submissions() const {
  const MutexLock lock(mutex_);
  return submitted_;
}

void EngineFront::take(std::vector<OperationPtr>& operations, Callbacks callbacks) {
  const MutexLock lock(mutex_);
  if (callbacks_submitted_ && callbacks == Callbacks::kNone) return;
  callbacks_submitted_ = false;
  operations.swap(submitted_);
  has_submissions_.store(false, std::memory_order_relaxed);
}

void EngineFront::fail_from_outside(Status cause) {
  const MutexLock lock(mutex_);
  if (!outside_failure_) outside_failure_ = std::move(cause);
  has_outside_failure_.store(true, std::memory_order_release);
}

std::optional<Status> EngineFront::outside_failure() const {
  if (!has_outside_failure_.load(std::memory_order_acquire)) return std::nullopt;
  const MutexLock lock(mutex_);
  return outside_failure_;
}

void EngineFront::set_failed(const Status& cause) {
  {
    const MutexLock lock(mutex_);
    failure_ = cause;
  }
  failed_.store(true, std::memory_order_release);
}

Status EngineFront::failure() const {
  HVD_EXPECT(failed(), "the engine has failed");
  const MutexLock lock(mutex_);
  return failure_;
}

void EngineFront::set_process_sets(control::ProcessSetTable sets) {
  auto copy = std::make_shared<const control::ProcessSetTable>(std::move(sets));
  const MutexLock lock(mutex_);
  sets_ = std::move(copy);
}

std::shared_ptr<const control::ProcessSetTable> EngineFront::process_sets() const {
  const MutexLock lock(mutex_);
  return sets_;
}

}  // namespace hvd::runtime
