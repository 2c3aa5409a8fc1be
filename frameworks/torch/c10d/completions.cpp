#include "c10d/completions.h"

#include <thread>
#include <utility>

#include "c10d/work.h"
#include "hvd/background.h"

namespace hvd::libtorch {

void Completions::add(c10::intrusive_ptr<PendingWork> work) {
  const std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (!waiting_) wake_thread();
}

void Completions::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void Completions::wake_thread() {
  if (idle_ > 0) {
    changed_.notify_one();
  } else {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
}

void Completions::run() {
  const BackgroundThread background;
  std::unique_lock lock(mutex_);
  for (;;) {
    while (waiting_ || works_.empty()) {
      if (stopped_ || idle_ > 0) return;  // one spare thread suffices
      ++idle_;
      changed_.wait(lock);
      --idle_;
    }
    waiting_ = true;
    c10::intrusive_ptr<PendingWork> work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work->await_for_future();
    lock.lock();
    waiting_ = false;
    if (!works_.empty()) wake_thread();
    lock.unlock();
    work->complete_future();
    work.reset();
    lock.lock();
  }
}

}  // namespace hvd::libtorch
