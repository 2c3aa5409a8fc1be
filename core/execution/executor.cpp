#include "execution/executor.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

constexpr std::string_view kDeviceBackend = "nccl";

const char* phase_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return "ALLREDUCE";
    case OpKind::kAllgather:
      return "ALLGATHER";
    case OpKind::kBroadcast:
      return "BROADCAST";
    case OpKind::kReducescatter:
      return "REDUCESCATTER";
    case OpKind::kAlltoall:
      return "ALLTOALL";
    case OpKind::kBarrier:
      return "BARRIER";
    case OpKind::kJoin:
      return "JOIN";
    case OpKind::kGather:
      return "GATHER";
    case OpKind::kAddProcessSet:
      return "ADD_PROCESS_SET";
    case OpKind::kRemoveProcessSet:
      return "REMOVE_PROCESS_SET";
  }
  return "?";
}

}  // namespace

Executor::Executor(Environment environment, std::vector<std::shared_ptr<Backend>> backends,
                   std::optional<std::string> forced_backend, Finish finish)
    : environment_(environment),
      backends_(std::move(backends)),
      forced_backend_(std::move(forced_backend)),
      finish_(std::move(finish)),
      buffers_(environment_.arena),
      device_queue_(environment_.clock, environment_.device_limit) {}

// What a device may still be at work on outlives this.
Executor::~Executor() { device_queue_.abandon(); }

void JobQueue::push(std::shared_ptr<Job> job) {
  if (head_ > 0 && (empty() || jobs_.size() == jobs_.capacity())) {
    jobs_.erase(jobs_.begin(), jobs_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  jobs_.push_back(std::move(job));
}

std::shared_ptr<Job> JobQueue::pop() noexcept { return std::move(jobs_[head_++]); }

void Executor::start(control::AgreedBatch batch, std::vector<OperationPtr> operations) {
  if (!wire::only_agrees(batch.operations.front().request.kind)) {
    const auto job =
        std::make_shared<Job>(std::move(batch), std::move(operations), environment_.topology.rank);
    job->lane = job->on_device() ? &device_lane_for(*job) : &lane_for(*job);
    return start(job);
  }
  for (std::size_t i = 0; i < operations.size(); ++i) {
    operations[i]->set_result(batch.operations[i].result);
    finish_(operations[i], {}, nullptr, false);
  }
}

std::shared_ptr<Job> Executor::prepare(control::AgreedBatch batch) {
  auto job = std::make_shared<Job>(std::move(batch), environment_.topology.rank);
  if (!wire::only_agrees(job->request().kind))
    job->lane = job->on_device() ? &device_lane_for(*job) : &lane_for(*job);
  return job;
}

void Executor::keep_buffers_for(std::span<const std::shared_ptr<Job>> jobs) {
  std::size_t largest = 0;
  for (const auto& job : jobs) {
    if (job->lane == nullptr || job->on_device() || !job->buffered()) continue;
    largest = std::max({largest, job->in_bytes(), job->out_bytes()});
  }
  // A pool's buffer has at least a cache line.
  buffers_.trim(std::max<std::size_t>(largest, 64));
}

void Executor::start(const std::shared_ptr<Job>& job) {
  if (job->lane == nullptr) {  // nothing is to be moved
    for (const OperationPtr& operation : job->operations()) finish_(operation, {}, nullptr, false);
    return job->let_go();
  }
  if (job->lane->ordered) job->device_order = device_jobs_++;
  job->lane->queue.push(job);
  job->agreed_at = environment_.timeline.on() ? environment_.clock.now() : TimePoint{};
  job->launched_at = {};
  job->started = true;
  ++in_flight_;
}

void Executor::retire(int process_set) {
  for (auto& [key, lane] : lanes_) lane.retired = lane.retired || key.first == process_set;
  close_retired();
}

void Executor::close_retired() {
  std::erase_if(lanes_, [this](const auto& entry) {
    const Lane& lane = entry.second;
    return lane.retired && lane.queue.empty() && !(lane.device && device_queue_.has(*lane.channel));
  });
}

Backend& Executor::choose_backend(const ChannelSpec& spec, const Collective& collective) const {
  Backend* best = nullptr;
  int best_score = 0;
  // A choice of transport cannot concern a rank alone: the transports leave that to the local
  // backend. NCCL is a choice for GPUs only.
  const bool choice_counts =
      forced_backend_ && spec.ranks.size() > 1 && *forced_backend_ != kDeviceBackend;
  for (const auto& backend : backends_) {
    if (choice_counts && backend->name() != *forced_backend_) continue;
    const int score = backend->score(environment_.topology, spec, collective);
    if (score <= best_score) continue;
    best = backend.get();
    best_score = score;
  }
  if (best == nullptr) {
    throw Error("no backend can run " + std::string(to_string(collective.kind)) + " of " +
                std::string(to_string(collective.dtype)) + " on " +
                std::string(to_string(spec.device.type)) +
                (choice_counts ? "; HVD_BACKEND allows only '" + *forced_backend_ + "'" : ""));
  }
  return *best;
}

Executor::Lane& Executor::lane_for(const Job& job) {
  Collective collective = job.collective();
  if (collective.op == ReduceOp::kAdasum) {
    // It is made of what backends have, all on one channel: alltoall, allreduce and allgather. What
    // has the first has the others.
    collective.op = ReduceOp::kSum;
    collective.kind = OpKind::kAlltoall;
  }
  Backend& backend = choose_backend(job.spec(), collective);
  Lane& lane = lanes_[{job.spec().process_set, std::string(backend.name())}];
  if (!lane.channel) {
    lane.channel = backend.open(job.spec(), environment_.peers);
    lane.backend = backend.name();
  }
  return lane;
}

bool Executor::progress() {
  bool moved = false;
  if (!device_queue_.empty()) {
    device_queue_.look();
    close_retired();
  }
  if (in_flight_ == 0) return moved;
  bool retired = false;
  for (auto& [key, lane] : lanes_) {
    moved = progress(lane) || moved;
    retired = retired || lane.retired;
  }
  if (retired) close_retired();
  return moved;
}

bool Executor::progress(Lane& lane) {
  bool moved = false;
  while (!lane.queue.empty()) {
    Job& job = lane.queue.front();
    try {
      if (!job.launched) {
        if (lane.device && !device_may_launch(lane, job)) return moved;
        launch(lane, job);
        moved = true;
      }
      if (job.work && !job.work->progress()) return moved || job.work->moved();
      complete(lane, job);
    } catch (const PeerLostError& error) {
      throw PeerLostError(job.title() + ": " + error.what(), error.rank());
    } catch (const std::exception& error) {
      throw Error(job.title() + ": " + error.what());
    }
    lane.queue.pop();
    --in_flight_;
    moved = true;
  }
  return moved;
}

void Executor::launch(Lane& lane, Job& job) {
  job.launched = true;
  if (environment_.timeline.on()) job.launched_at = environment_.clock.now();
  if (lane.device) {
    job.work = launch_on_device(lane, job);
    return;
  }
  job.prepare(buffers_);
  if (job.nothing_to_move()) return;
  if (job.last_work && job.last_work->again(job.in(), job.out())) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    job.work = std::move(job.last_work);
    return;
  }
  const composite::Launch launch = [this, &lane](const Collective& collective,
                                                 std::span<const std::byte> in,
                                                 std::span<std::byte> out) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    return lane.channel->launch(collective, in, out);
  };
  if (job.request().kind == OpKind::kAlltoall) {
    job.work = composite::make_alltoall(launch, launch, job.operations().front()->submission);
  } else if (job.collective().op == ReduceOp::kAdasum) {
    job.work = composite::make_adasum(launch, job.collective(), job.spec(), job.in(), job.out());
  } else {
    job.work = launch(job.collective(), job.in(), job.out());
  }
}

void Executor::complete(Lane& lane, Job& job) {
  if (!lane.device) job.unpack();
  const EventPtr output_ready = job.work ? job.work->output_ready() : nullptr;
  if (output_ready) device_queue_.add(*lane.channel, job, output_ready);
  if (lane.ordered) ++device_completed_;
  if (job.repeated() && !lane.device && job.work && job.work->repeats()) {
    job.last_work = std::move(job.work);
  } else {
    job.work.reset();
  }
  if (environment_.timeline.on() && job.launched_at != TimePoint{}) record(lane, job);
  for (const OperationPtr& operation : job.operations())
    finish_(operation, {}, output_ready, false);
  job.started = job.launched = false;
  job.let_go();
}

void Executor::record(const Lane& lane, const Job& job) {
  const auto writer = environment_.timeline.writer();
  if (!writer) return;
  const TimePoint now = environment_.clock.now();
  const std::string detail = lane.backend + ", " + std::to_string(job.agreed().size()) +
                             " tensors, " + std::to_string(job.out().size()) + " bytes";
  for (std::size_t i = 0; i < job.agreed().size(); ++i) {
    const std::string& name =
        (job.operations().empty() ? job.agreed()[i].request : job.operations()[i]->request).name;
    if (!job.operations().empty())
      writer->span(name, "NEGOTIATE", job.operations()[i]->submitted, job.agreed_at);
    writer->span(name, "QUEUE", job.agreed_at, job.launched_at);
    writer->span(name, phase_of(job.request().kind), job.launched_at, now, detail);
  }
}

bool Executor::needs_polling() const noexcept {
  return active() && std::any_of(lanes_.begin(), lanes_.end(), [](const auto& entry) {
           return !entry.second.queue.empty() && entry.second.channel->needs_polling();
         });
}

std::string Executor::first_active() const {
  for (const auto& [key, lane] : lanes_) {
    if (!lane.queue.empty()) return lane.queue.front().title();
  }
  return {};
}

std::vector<std::pair<OperationPtr, std::string>> Executor::running() const {
  std::vector<std::pair<OperationPtr, std::string>> found;
  for (const auto& [key, lane] : lanes_) {
    for (const auto& job : lane.queue.jobs()) {
      const std::string state = (job->work ? "runs on " : "agreed, queued for ") + lane.backend;
      for (const OperationPtr& operation : job->operations()) found.emplace_back(operation, state);
    }
  }
  return found;
}

void Executor::abort(const Status& status) noexcept {
  for (auto& [key, lane] : lanes_) {
    if (lane.channel) lane.channel->abort();
    while (!lane.queue.empty()) {
      const std::shared_ptr<Job> job = lane.queue.pop();
      const bool launched = job->work != nullptr;
      job->work.reset();
      if (launched)
        job->abandon_buffers();  // those on a device go with the work, and stay allocated
      for (const OperationPtr& operation : job->operations())
        finish_(operation, status, nullptr, launched);
      job->started = job->launched = false;
      job->let_go();
    }
  }
  in_flight_ = 0;
  device_queue_.abandon();
  device_completed_ = device_jobs_;
}

}  // namespace hvd::runtime
