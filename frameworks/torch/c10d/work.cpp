#include "c10d/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/c10d_backend.h"
#include "tensors/device_order.h"
#include "tensors/waits.h"

namespace hvd {
namespace libtorch {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// The time that a wait, after its timeout, leaves the other ranks to reply about the operation.
constexpr milliseconds kReplyLimit(300);
std::atomic<void (*)() noexcept> return_check = nullptr;

/// Time after the timeout of an operation in which the runtime's error, which names the missing
/// ranks, may still arrive. The coordinator counts from the time when it receives the first report
/// of the operation. A rank delays its report by at most an eighth of the timeout and a second.
milliseconds grace_of(milliseconds timeout) {
  return std::clamp(timeout / 5, milliseconds(300), milliseconds(2000));
}

std::exception_ptr backend_error(const std::string& message) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message));
}

std::optional<c10::Device> device_of(const Launch& launch) {
  const std::optional<c10::Device> gpu = gpu_of(launch.outputs);
  return gpu || !launch.inputs ? gpu : gpu_of(*launch.inputs);
}

}  // namespace

std::exception_ptr torch_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    return error;
  } catch (const StalledError& stalled) {
    return backend_error(text("hvd: the timeout of an operation has passed: ", stalled.what()));
  } catch (const Error& other) {
    const std::string_view what = other.what();
    return backend_error(text(what.starts_with("hvd::") ? "" : "hvd: ", what));
  } catch (...) {
    return error;
  }
}

void check_return() noexcept {
  if (const auto check = return_check.load()) check();
}

PendingWork::PendingWork(int rank, Launch launch, std::uint64_t sequence, FlightRecord::Entry entry,
                         std::shared_ptr<Completions> completions)
    : Work(rank, launch.type, launch.title),
      launch_(std::move(launch)),
      gpu_(device_of(launch_)),
      sequence_(sequence),
      entry_(entry),
      completions_(std::move(completions)) {}

void PendingWork::settle() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(launch_.handle.done(), "the operation is done");
  const std::lock_guard lock(settle_mutex_);
  if (std::exchange(settled_, true)) return;
  std::exception_ptr error;
  try {
    const std::vector<at::Tensor> results = launch_.handle.wait_all();
    if (launch_.finish) launch_.finish(results);
    if (gpu_ && is_initialized()) {
      for (const at::Tensor& output : launch_.outputs) used_by_current_stream(output);
      on_device_ = record_current_stream();
    }
  } catch (...) {
    error = torch_error(std::current_exception());
  }
  launch_.finish = nullptr;  // releases the tensors that the function holds
  if (FlightRecord* const record = FlightRecord::get()) {
    if (error) {
      record->write_after_failure();
    } else {
      record->complete(entry_);
    }
  }
  finish(error);
}

EventPtr PendingWork::current_stream_follows() {
  if (!gpu_) return nullptr;
  EventPtr results;
  {
    const std::lock_guard lock(settle_mutex_);
    results = on_device_;
  }
  current_stream_waits(results);
  for (const at::Tensor& output : launch_.outputs) used_by_current_stream(output);
  return results;
}

bool PendingWork::isCompleted() {
  if (!launch_.handle.wait_for(milliseconds(0))) return false;
  settle();
  const std::lock_guard lock(settle_mutex_);
  return on_device_ == nullptr || on_device_->query();
}

PendingWork::TimePoint PendingWork::deadline() const {
  constexpr std::chrono::hours kLongest(24 * 365);  // a much longer time overflows the clock
  const milliseconds timeout = std::min<milliseconds>(launch_.timeout, kLongest);
  return started_ + timeout + grace_of(timeout);
}

std::exception_ptr PendingWork::timeout_error(milliseconds timeout) const {
  const std::string waits = launch_.handle.describe_wait(kReplyLimit);
  if (launch_.handle.done()) return nullptr;
  if (FlightRecord* const record = FlightRecord::get()) record->write_after_failure();
  return backend_error(text("hvd: rank ", rank_, ": the timeout of ", timeout.count(),
                            " ms has passed while ", launch_.title, ", operation ", sequence_,
                            " of its group, waited for other ranks; ", waits,
                            "; see whether all ranks make this call"));
}

std::exception_ptr PendingWork::device_timeout_error(milliseconds timeout) const {
  return backend_error(text("hvd: rank ", rank_, ": the timeout of ", timeout.count(),
                            " ms has passed while ", launch_.title, ", operation ", sequence_,
                            " of its group, ran on ", gpu_->str(),
                            "; the work in its streams takes longer, or the GPU hangs"));
}

bool PendingWork::wait(milliseconds timeout) {
  const bool own_timeout = timeout <= kNoTimeout;
  const TimePoint until = own_timeout ? deadline() : steady_clock::now() + timeout;
  const bool done = launch_.handle.done() || wait_in_slices(launch_.handle, until);
  const std::exception_ptr late =
      done ? nullptr : timeout_error(own_timeout ? launch_.timeout : timeout);
  check_return();
  if (late) std::rethrow_exception(late);
  settle();
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  const EventPtr results = current_stream_follows();
  if (!own_timeout && !wait_in_slices(results, until))
    std::rethrow_exception(device_timeout_error(timeout));
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        gpu_ ? std::vector{*gpu_} : std::vector<c10::Device>{});
    completions_->add(c10::intrusive_ptr<PendingWork>::unsafe_reclaim_from_nonowning(this));
  }
  return future_;
}

void PendingWork::await_for_future() {
  while (!launch_.handle.wait_for(std::chrono::seconds(1)))
    if (steady_clock::now() >= deadline()) return;
  // Uses another stream, so that the program's streams wait for the operation only when the program
  // does.
  const c10::OptionalStreamGuard apart(pool_stream_of(gpu_));
  settle();
}

void PendingWork::complete_future() {
  check_return();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    future = future_;
  }
  const std::exception_ptr late = launch_.handle.done() ? nullptr : timeout_error(launch_.timeout);
  const c10::OptionalStreamGuard apart(pool_stream_of(gpu_));
  if (!late) settle();
  if (late) {
    future->setError(late);
  } else if (const std::exception_ptr error = exception()) {
    future->setError(error);
  } else {
    current_stream_follows();
    future->markCompleted(c10::IValue(launch_.outputs));
  }
}

}  // namespace libtorch

void set_return_check(void (*check)() noexcept) noexcept { libtorch::return_check = check; }

}  // namespace hvd
