#include "runtime/executor.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "control/validator.h"
#include "fusion/packer.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

std::int64_t row_elements(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::span<const std::byte> input_bytes(const Submission& submission) {
  return {submission.input.data, submission.input.bytes()};
}
std::span<std::byte> output_bytes(const Submission& submission) {
  return {submission.output.data, submission.output.bytes()};
}

const char* phase_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce: return "ALLREDUCE";
    case OpKind::kAllgather: return "ALLGATHER";
    case OpKind::kBroadcast: return "BROADCAST";
    case OpKind::kReducescatter: return "REDUCESCATTER";
    case OpKind::kAlltoall: return "ALLTOALL";
    case OpKind::kBarrier: return "BARRIER";
    case OpKind::kJoin: return "JOIN";
    case OpKind::kGather: return "GATHER";
    case OpKind::kAddProcessSet: return "ADD_PROCESS_SET";
    case OpKind::kRemoveProcessSet: return "REMOVE_PROCESS_SET";
  }
  return "?";
}

}  // namespace

/// One batch on its way through a channel.
struct Executor::Job {
  std::vector<ExecutableOperation> operations;
  ChannelSpec spec;
  Collective collective;
  std::vector<std::int64_t> counts;                  // allgather: elements per rank
  std::vector<std::vector<std::size_t>> part_bytes;  // fused allgather: [tensor][rank]
  fusion::FusionLease input_buffer;
  fusion::FusionLease output_buffer;
  std::span<const std::byte> in;
  std::span<std::byte> out;
  std::unique_ptr<Work> work;
  TimePoint agreed_at{};
  TimePoint launched_at{};

  bool fused() const noexcept { return operations.size() > 1; }
  const wire::Request& request() const noexcept { return operations.front().agreed.request; }
  bool at_root() const noexcept { return spec.ranks[static_cast<std::size_t>(spec.set_rank)] == request().root; }
};

Executor::Executor(Environment environment, std::vector<std::shared_ptr<Backend>> backends,
                   std::optional<std::string> forced_backend, Finish finish)
    : environment_(environment),
      backends_(std::move(backends)),
      forced_backend_(std::move(forced_backend)),
      finish_(std::move(finish)) {}

Executor::~Executor() = default;

void Executor::start(std::vector<ExecutableOperation> batch) {
  auto job = std::make_unique<Job>();
  job->operations = std::move(batch);
  job->agreed_at = environment_.clock.now();
  const wire::Request& request = job->request();
  if (request.kind == OpKind::kBarrier) {  // agreeing was all there is to it
    for (const auto& item : job->operations) finish_(item.operation, {}, nullptr, false);
    return;
  }
  const auto& ranks = environment_.sets.ranks(request.process_set);
  job->spec = {request.process_set, ranks, environment_.sets.position(request.process_set, environment_.topology.rank),
               {request.device, 0}};
  describe(*job);
  Lane& lane = lane_for(*job);
  lane.queue.push_back(std::move(job));
  ++in_flight_;
}

void Executor::describe(Job& job) const {
  const wire::Request& request = job.request();
  Collective& collective = job.collective;
  const auto size = static_cast<std::int64_t>(job.spec.ranks.size());
  collective.kind = request.kind;
  collective.dtype = request.dtype;
  collective.op = request.op == ReduceOp::kAverage ? ReduceOp::kSum : request.op;
  collective.scale = {request.prescale, request.postscale, request.op == ReduceOp::kAverage ? size : 1};
  if (request.kind == OpKind::kBroadcast) {
    collective.root = environment_.sets.position(request.process_set, request.root);
  }
  if (request.kind == OpKind::kAllgather) {
    job.counts.resize(job.spec.ranks.size());
    for (const auto& [agreed, operation] : job.operations) {
      const std::int64_t row = row_elements(agreed.request.shape);
      std::vector<std::size_t> parts;
      for (std::size_t rank = 0; rank < job.counts.size(); ++rank) {
        job.counts[rank] += agreed.first_dims[rank] * row;
        parts.push_back(static_cast<std::size_t>(agreed.first_dims[rank] * row) * size_of(request.dtype));
      }
      job.part_bytes.push_back(std::move(parts));
    }
    collective.counts = job.counts;
    collective.count = std::accumulate(job.counts.begin(), job.counts.end(), std::int64_t{0});
  } else {
    for (const auto& item : job.operations) collective.count += item.agreed.request.elements();
  }
}

Backend& Executor::choose_backend(const ChannelSpec& spec, const Collective& collective) const {
  Backend* best = nullptr;
  int best_score = 0;
  for (const auto& backend : backends_) {
    if (forced_backend_ && backend->name() != *forced_backend_) continue;
    const int score = backend->score(environment_.topology, spec, collective);
    if (score <= best_score) continue;
    best = backend.get();
    best_score = score;
  }
  if (best == nullptr) {
    throw Error("no backend can run " + std::string(to_string(collective.kind)) + " of " +
                std::string(to_string(collective.dtype)) + " on " + std::string(to_string(spec.device.type)) +
                (forced_backend_ ? "; HVD_BACKEND allows only '" + *forced_backend_ + "'" : ""));
  }
  return *best;
}

Executor::Lane& Executor::lane_for(const Job& job) {
  Backend& backend = choose_backend(job.spec, job.collective);
  Lane& lane = lanes_[{job.spec.process_set, std::string(backend.name())}];
  if (!lane.channel) {
    lane.channel = backend.open(job.spec, environment_.peers);
    lane.backend = backend.name();
    lane.spec = job.spec;
  }
  return lane;
}

bool Executor::progress() {
  bool moved = false;
  if (in_flight_ == 0) return moved;
  for (auto& [key, lane] : lanes_) moved = progress(lane) || moved;
  return moved;
}

bool Executor::progress(Lane& lane) {
  bool moved = false;
  while (!lane.queue.empty()) {
    Job& job = *lane.queue.front();
    try {
      if (job.launched_at == TimePoint{}) {
        launch(lane, job);
        moved = true;
      }
      if (job.work && !job.work->progress()) return moved;
      complete(lane, job);
    } catch (const PeerLostError& error) {
      throw PeerLostError(control::describe(job.request()) + ": " + error.what(), error.rank());
    } catch (const std::exception& error) {
      throw Error(control::describe(job.request()) + ": " + error.what());
    }
    lane.queue.pop_front();
    --in_flight_;
    moved = true;
  }
  return moved;
}

void Executor::launch(Lane& lane, Job& job) {
  job.launched_at = environment_.clock.now();
  if (job.request().kind == OpKind::kAllgather) {
    prepare_gather(job);
  } else {
    prepare_in_place(job);
  }
  if (job.collective.count == 0) return;  // every rank knows that there is nothing to move
  environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
  job.work = lane.channel->launch(job.collective, job.in, job.out);
}

// Allreduce and broadcast: as many elements out as in, on every rank.
void Executor::prepare_in_place(Job& job) {
  if (!job.fused()) {
    const Submission& submission = job.operations.front().operation->submission;
    job.in = input_bytes(submission);
    job.out = output_bytes(submission);
    return;
  }
  const auto bytes = static_cast<std::size_t>(job.collective.count) * size_of(job.collective.dtype);
  job.output_buffer = buffers_.lease(bytes);
  job.in = job.out = job.output_buffer.bytes();
  if (job.collective.kind == OpKind::kBroadcast && !job.at_root()) return;
  std::vector<std::span<const std::byte>> pieces;
  for (const auto& item : job.operations) pieces.push_back(input_bytes(item.operation->submission));
  fusion::pack(pieces, job.output_buffer.bytes());
}

void Executor::prepare_gather(Job& job) {
  for (std::size_t i = 0; i < job.operations.size(); ++i) {
    Submission& submission = job.operations[i].operation->submission;
    submission.output = submission.allocate_output({job.operations[i].agreed.first_dims});
    const std::size_t expected = std::accumulate(job.part_bytes[i].begin(), job.part_bytes[i].end(), std::size_t{0});
    if (submission.output.bytes() != expected || (expected > 0 && submission.output.data == nullptr)) {
      throw Error("the allocated output has " + std::to_string(submission.output.bytes()) + " bytes, expected " +
                  std::to_string(expected));
    }
  }
  if (!job.fused()) {
    const Submission& submission = job.operations.front().operation->submission;
    job.in = input_bytes(submission);
    job.out = output_bytes(submission);
    return;
  }
  const std::size_t element = size_of(job.collective.dtype);
  job.input_buffer = buffers_.lease(static_cast<std::size_t>(job.counts[static_cast<std::size_t>(job.spec.set_rank)]) * element);
  job.output_buffer = buffers_.lease(static_cast<std::size_t>(job.collective.count) * element);
  job.in = job.input_buffer.bytes();
  job.out = job.output_buffer.bytes();
  std::vector<std::span<const std::byte>> pieces;
  for (const auto& item : job.operations) pieces.push_back(input_bytes(item.operation->submission));
  fusion::pack(pieces, job.input_buffer.bytes());
}

void Executor::unpack(Job& job) {
  std::vector<std::span<std::byte>> outputs;
  for (const auto& item : job.operations) outputs.push_back(output_bytes(item.operation->submission));
  if (job.collective.kind == OpKind::kAllgather) {
    fusion::unpack_gathered(job.output_buffer.bytes(), job.part_bytes, outputs);
  } else {
    fusion::unpack(job.output_buffer.bytes(), outputs);
  }
}

void Executor::complete(Lane& lane, Job& job) {
  if (job.fused()) unpack(job);
  const EventPtr output_ready = job.work ? job.work->output_ready() : nullptr;
  job.work.reset();
  if (environment_.timeline.on()) {
    if (const auto writer = environment_.timeline.writer()) {
      const TimePoint now = environment_.clock.now();
      const std::string detail = lane.backend + ", " + std::to_string(job.operations.size()) + " tensors, " +
                                 std::to_string(job.out.size()) + " bytes";
      for (const auto& [agreed, operation] : job.operations) {
        writer->span(agreed.request.name, "NEGOTIATE", operation->submitted, job.agreed_at);
        writer->span(agreed.request.name, "QUEUE", job.agreed_at, job.launched_at);
        writer->span(agreed.request.name, phase_of(agreed.request.kind), job.launched_at, now, detail);
      }
    }
  }
  for (const auto& item : job.operations) finish_(item.operation, {}, output_ready, false);
}

std::string Executor::first_active() const {
  for (const auto& [key, lane] : lanes_) {
    if (!lane.queue.empty()) return control::describe(lane.queue.front()->request());
  }
  return {};
}

void Executor::abort(const Status& status) noexcept {
  for (auto& [key, lane] : lanes_) {
    if (lane.channel) lane.channel->abort();
    for (auto& job : std::exchange(lane.queue, {})) {
      const bool launched = job->work != nullptr;
      job->work.reset();
      if (launched) {  // See Note [Who frees the buffer]
        job->input_buffer.abandon();
        job->output_buffer.abandon();
      }
      for (const auto& item : job->operations) finish_(item.operation, status, nullptr, launched);
    }
  }
  in_flight_ = 0;
}

}  // namespace hvd::runtime
