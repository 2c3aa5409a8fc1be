#include <pybind11/stl.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "hvd/background.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "hvd/torch/handle.h"

namespace hvd::python {
namespace {

/// Waits; an exception from a Python signal handler ends the wait.
template <class Result>
void wait_with_signals(const std::shared_future<Result>& done) {
  constexpr std::chrono::milliseconds kSlice(50);
  while (done.wait_for(kSlice) != std::future_status::ready) raise_signals();
}

/// Runs init() and shutdown() on one thread, one after the other, so that Python's signals can end
/// the wait of the caller. Thread-safe. Never destroyed.
class JobThread {
 public:
  static JobThread& instance() {
    static std::atomic<JobThread*> current = nullptr;
    JobThread* known = current.load();
    if (known != nullptr && known->process_ == ::getpid()) return *known;
    // The first use in this process: a child of fork() has no thread.
    auto* const made = new JobThread;
    if (current.compare_exchange_strong(known, made)) {
      std::thread([made] { made->serve(); }).detach();
      return *made;
    }
    delete made;
    return *known;
  }

  /// @throws the task's exception, or that of a signal handler, in which case the task continues
  void run(std::function<void()> task) {
    const std::shared_future<void> done = start(std::move(task));
    wait_with_signals(done);
    done.get();
  }
  /// Waits for the last task.
  void finish() {
    if (const auto last = last_task(); last.valid()) wait_with_signals(last);
  }

 private:
  std::shared_future<void> start(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    last_ = tasks_.emplace_back(std::move(task)).get_future().share();
    begun_.notify_one();
    return last_;
  }
  std::shared_future<void> last_task() {
    const std::lock_guard lock(mutex_);
    return last_;
  }
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      begun_.wait(lock, [this] { return !tasks_.empty(); });
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable begun_;
  std::deque<std::packaged_task<void()>> tasks_;
  std::shared_future<void> last_;
};

/// Like the calls of <hvd/hvd.h>, but Python's signals end the wait.
std::int64_t run(Submission submission) {
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  wait_with_check(operation);
  operation.status().raise_if_error();
  end_wait();
  return operation.result();
}

/// Changes of the process sets, on separate threads. If a signal ends the wait for a change, the
/// other ranks may still take part in it, so a repeated call waits for the same change.
/// Thread-safe.
class SetChanges {
 public:
  using Made = std::shared_future<ProcessSet>;

  ProcessSet run(const OperationParameters& change, std::function<ProcessSet()> task) {
    const Made made = resume_or_start(change, std::move(task));
    try {
      wait_with_signals(made);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      interrupted_.emplace_back(change, made);
      throw;
    }
    end_wait();
    return made.get();
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    interrupted_.clear();
  }

 private:
  Made resume_or_start(const OperationParameters& change, std::function<ProcessSet()> task) {
    const std::lock_guard lock(mutex_);
    for (auto entry = interrupted_.begin(); entry != interrupted_.end(); ++entry) {
      if (entry->first != change) continue;
      Made made = entry->second;
      interrupted_.erase(entry);
      return made;
    }
    std::packaged_task<ProcessSet()> packaged(std::move(task));
    Made made = packaged.get_future().share();
    std::thread(std::move(packaged)).detach();
    return made;
  }

  std::mutex mutex_;
  std::vector<std::pair<OperationParameters, Made>> interrupted_;
};
SetChanges& set_changes() {
  static auto* const instance = new SetChanges;
  return *instance;
}

ProcessSet add_process_set(const std::vector<int>& ranks) {
  return set_changes().run(AddProcessSet{.ranks = ranks},
                           [ranks] { return hvd::add_process_set(ranks); });
}

void remove_process_set(const ProcessSet& set) {
  set_changes().run(RemoveProcessSet{.process_set = set.id()}, [set] {
    hvd::remove_process_set(set);
    return ProcessSet();
  });
}

int join() {
  BackgroundExchange::wait_for_all();
  return static_cast<int>(run({.parameters = Join{}}));
}

void barrier(const ProcessSet& set) { run({.parameters = Barrier{}, .process_set = set.id()}); }

void add_process_sets(py::module_& module) {
  py::class_<ProcessSet>(module, "ProcessSet")
      .def(py::init<>())
      .def_property_readonly("id", &ProcessSet::id)
      .def("rank", &ProcessSet::rank, Unlocked())
      .def("size", &ProcessSet::size, Unlocked())
      .def("ranks", &ProcessSet::ranks, Unlocked());
  module.def("add_process_set", &add_process_set, py::arg("ranks"), Unlocked());
  module.def("remove_process_set", &remove_process_set, py::arg("process_set"), Unlocked());
}

}  // namespace

void join_job() {
  JobThread::instance().run([] { hvd::init(); });
}

void leave_job() {
  JobThread::instance().run([] {
    hvd::shutdown();
    set_changes().forget();
    forget_operations();
  });
}

void finish_start_or_end() { JobThread::instance().finish(); }

void add_job(py::module_& module) {
  add_process_sets(module);
  module.def("cross_rank", &hvd::cross_rank, Unlocked());
  module.def("cross_size", &hvd::cross_size, Unlocked());
  module.def("is_homogeneous", &hvd::is_homogeneous, Unlocked());
  module.def("mpi_threads_supported", &hvd::mpi_threads_supported, Unlocked());
  module.def("mpi_built", &hvd::mpi_built, Unlocked());
  module.def("nccl_built", &hvd::nccl_built, Unlocked());
  module.def("cuda_built", &hvd::cuda_built, Unlocked());
  module.def("start_timeline", &hvd::start_timeline, py::arg("path"), Unlocked());
  module.def("stop_timeline", &hvd::stop_timeline, Unlocked());
  module.def("barrier", &barrier, py::arg("process_set"), Unlocked());
  module.def("join", &join, Unlocked());
}

}  // namespace hvd::python
