#include "hvd/torch/c10d_backend.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "base/text.h"
#include "c10d/completions.h"
#include "c10d/flight_record.h"
#include "c10d/group.h"
#include "c10d/work.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/memory.h"
#include "tensors/tensor_adapter.h"
#include "tensors/waits.h"

// Construction and end of a group, and the calls without tensors. The collectives are in
// reductions.cpp and moves.cpp, send and recv in messages.cpp.

namespace hvd {
namespace {

Handle start_barrier(const ProcessSet& set, bool in_sequence, Progress progress) {
  std::vector<Submission> submissions(1);
  submissions[0].parameters = Barrier{};
  submissions[0].process_set = set.id();
  submissions[0].in_sequence = in_sequence;
  return libtorch::with_torch_errors(
      [&] { return libtorch::start(std::move(submissions), {}, progress); });
}

std::string joined(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return list;
}

}  // namespace

C10dBackend::C10dBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         const std::vector<std::int64_t>& ranks, std::chrono::milliseconds timeout)
    : ReconfigurableBackend(rank, size),
      store_(store),
      group_(libtorch::with_torch_errors(
          [&] { return std::make_shared<libtorch::Group>(store, rank, size, ranks, timeout); })),
      completions_(std::make_shared<libtorch::Completions>()),
      timeout_(timeout) {}

C10dBackend::~C10dBackend() { completions_->stop(); }

void C10dBackend::shutdown() {
  group_->leave();
  completions_->stop();
}

c10::intrusive_ptr<c10d::Backend::Options> C10dBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("hvd", timeout_.load());
}

c10d::ErrorType C10dBackend::getError() {
  return is_initialized() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void C10dBackend::abort() {
  if (is_initialized() && group_->is_current())
    fail(text("rank ", rank(), " has called abort() of a group of torch.distributed"));
  shutdown();
}

c10::intrusive_ptr<c10d::Backend> C10dBackend::shrink(
    const std::vector<std::int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& options) {
  if (shrink_flags != 0)
    throw UsageError(text("C10dBackend: shrink: flags ", shrink_flags,
                          "; expected 0, SHRINK_DEFAULT: hvd cannot abort the operations of one "
                          "group; wait for them before"));
  std::vector<std::int64_t> members(group_->ranks().begin(), group_->ranks().end());
  for (const std::int64_t excluded : ranks_to_exclude)
    std::erase(members, group_->world_rank(excluded));
  const auto own = std::ranges::find(members, group_->world_rank(getRank()));
  if (own == members.end())
    throw UsageError(text("C10dBackend: shrink: rank ", getRank(),
                          " is one of those to exclude; only the other ranks make this call"));
  return c10::make_intrusive<C10dBackend>(store_, static_cast<int>(own - members.begin()),
                                          static_cast<int>(members.size()), members,
                                          options ? options->timeout : timeout_.load());
}

bool C10dBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  return index < 0 && shared_allocator_setting() != false && has_shared_memory();
}

at::Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0 || !options.device().is_cpu())
    throw UsageError(text("C10dBackend: allocateTensor: ", size, " elements on ",
                          options.device().str(), "; expected a size of at least 0, and the CPU"));
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  auto memory = allocate_shared(std::max<std::size_t>(bytes, 1));
  std::byte* const data = memory.get();
  return torch::from_blob(data, {size}, [memory = std::move(memory)](void*) {}, options);
}

c10::intrusive_ptr<c10d::Work> C10dBackend::start(libtorch::Launch launch) {
  if (launch.timeout < std::chrono::milliseconds(0)) launch.timeout = timeout_;
  const bool completes_alone = launch.asynchronous && launch.copies;
  // Only collectives are counted, because ranks may send and receive different numbers of messages.
  const std::uint64_t sequence = launch.source ? sequence_.load() : sequence_++;
  libtorch::FlightRecord::Entry entry;
  if (libtorch::FlightRecord* const record = libtorch::FlightRecord::get())
    entry = record->add(launch,
                        {.name = getGroupUid(),
                         .description = getGroupDesc(),
                         .process_set = group_->set().id(),
                         .rank = getRank(),
                         .ranks = group_->ranks()},
                        sequence);
  auto work = c10::make_intrusive<libtorch::PendingWork>(getRank(), std::move(launch), sequence,
                                                         entry, completions_);
  if (completes_alone) work->getFuture();
  libtorch::check_return();
  return work;
}

c10::intrusive_ptr<c10d::Work> C10dBackend::barrier(const c10d::BarrierOptions& options) {
  return start(
      {.type = c10d::OpType::BARRIER,
       .title = "hvd:barrier",
       .asynchronous = options.asyncOp,
       .timeout = options.timeout,
       .handle = start_barrier(group_->set(), /*in_sequence=*/true,
                               options.asyncOp ? Progress::kBackground : Progress::kCaller)});
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  if (!store_)
    throw UsageError(
        "C10dBackend: monitored_barrier: the group has no store, in which ranks record their "
        "calls; pass one to the constructor");
  const std::string call =
      "hvd/monitored_barrier/" + group_->instance() + std::to_string(sequence_++) + "/";
  store_->set(call + std::to_string(getRank()), std::vector<std::uint8_t>{1});
  const auto timeout =
      options.timeout < std::chrono::milliseconds(0) ? timeout_.load() : options.timeout;
  // Not part of the sequence, because this call itself reports ranks that make other calls.
  const Handle handle = start_barrier(group_->set(), /*in_sequence=*/false, Progress::kBackground);
  const bool done = libtorch::wait_in_slices(handle, std::chrono::steady_clock::now() + timeout);
  libtorch::check_return();
  if (done) {
    libtorch::with_torch_errors([&] { handle.wait_all(); });
    return;
  }
  std::vector<int> missing;
  for (int rank = 0; rank < getSize(); ++rank) {
    const bool here = store_->check({call + std::to_string(rank)});
    if (!here && (wait_all_ranks || missing.empty())) missing.push_back(rank);
  }
  TORCH_CHECK_WITH(DistBackendError, false,
                   text("hvd: rank ", getRank(), ": monitored_barrier: the timeout of ",
                        timeout.count(), " ms has passed; ranks that have not made the call: ",
                        missing.empty() ? "none, but not all have ended it" : joined(missing)));
}

std::string flight_record() {
  libtorch::FlightRecord* const record = libtorch::FlightRecord::get();
  return record ? record->dump() : std::string();
}

}  // namespace hvd
