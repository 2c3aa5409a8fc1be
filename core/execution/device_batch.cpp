#include "execution/device_batch.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/floating.h"
#include "base/kept_memory.h"
#include "base/kernels.h"
#include "base/log.h"
#include "control/validator.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

/// Tensors begin in the buffer where they can be copied with the widest accesses.
constexpr std::size_t kAlignment = 16;
/// Often enough to give memory back and to notice errors, rarely enough to cost nothing beside a
/// step.
constexpr Duration kBetweenLooks = std::chrono::milliseconds(2);

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class DeviceBatch final : public Work {
 public:
  DeviceBatch(DevicePipeline& pipeline, BatchExecution& execution, const composite::Launch& launch)
      : pipeline_(pipeline),
        execution_(execution),
        tensor_type_(execution.request().dtype),
        type_(execution.collective().dtype),
        collective_(execution.collective()) {
    const device::DeviceGuard guard(pipeline_.context.api(), pipeline_.context.device());
    if (!execution_.absent_here()) execution_.ask_for_outputs();
    fold();
    prepare();
    if (needs_in_stream())
      collective_.input_ready = pipeline_.context.events()->record(pipeline_.in.get());
    work_ = launch(collective_, in_, out_);
  }
  DeviceBatch(const DeviceBatch&) = delete;
  DeviceBatch& operator=(const DeviceBatch&) = delete;
  ~DeviceBatch() override = default;

  bool progress() override {
    if (!work_->progress()) return false;
    ready_ = work_->output_ready();
    if (unpacks()) unpack();
    input_.release(ready_);
    output_.release(ready_);
    if (in_turn_) pipeline_.channels_own.release(ready_);
    return true;
  }
  bool moved() const noexcept override { return work_->moved(); }
  EventPtr output_ready() const override { return ready_; }

 private:
  bool unpacks() const { return execution_.buffered() && !execution_.absent_here(); }
  bool needs_in_stream() const {
    return execution_.buffered() || execution_.absent_here() || execution_.scales_early() ||
           !single_event();
  }
  bool sends() const { return collective_.kind != OpKind::kBroadcast || execution_.at_root(); }

  /// With packing and unpacking at hand, factors cost nothing there. An average over all is left to
  /// the channel.
  void fold() {
    const bool reduces =
        collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kReducescatter;
    before_ = execution_.factor_in();
    after_ = execution_.factor_out();
    if (execution_.scales_early()) {
      if (!is_floating(type_))
        throw Error(
            "integers on a GPU cannot be scaled by a prescale factor once a rank has joined; use a "
            "floating type");
    }
    if (!reduces || !execution_.buffered() || !pipeline_.folds || !is_floating(type_)) return;
    ReduceScale& scale = collective_.scale;
    before_ *= std::exchange(scale.prescale, 1.0);
    after_ *= std::exchange(scale.postscale, 1.0);
    if (scale.divisor != static_cast<std::int64_t>(execution_.spec().ranks.size())) {
      after_ /= static_cast<double>(std::exchange(scale.divisor, 1));
    }
  }

  /// All there is to wait for is one event (or none), which the channel can do itself.
  bool single_event() const { return execution_.writable().empty(); }

  void wait_for_inputs() {
    const Event* last = nullptr;
    for (const OperationPtr& operation : execution_.operations()) {
      const EventPtr& event = operation->submission.input_ready;
      if (event.get() != last) pipeline_.context.wait(pipeline_.in.get(), event);
      last = event.get();
    }
    for (const EventPtr& event : execution_.writable())
      pipeline_.context.wait(pipeline_.in.get(), event);
  }

  void prepare() {
    if (needs_in_stream()) wait_for_inputs();
    if (execution_.absent_here()) return prepare_absent();
    if (execution_.buffered()) return prepare_buffered();
    const Submission& submission = execution_.operations().front()->submission;
    if (!needs_in_stream()) collective_.input_ready = submission.input_ready;
    in_ = {submission.input.data, submission.input.bytes()};
    if (execution_.request().kind != OpKind::kGather || execution_.at_root())
      out_ = {submission.output.data, submission.output.bytes()};
    if (!execution_.scales_early()) return;
    // Into the output where it is as large, so that the caller's input stays as it is.
    std::span<std::byte> scaled = out_;
    if (!execution_.in_place_kind()) {
      input_ = pipeline_.buffers.lease(in_.size(), pipeline_.in.get());
      scaled = input_.bytes();
    }
    const device::Piece piece{submission.input.data, 0, in_.size() / size_of(type_)};
    pipeline_.context.copy_pieces({&piece, 1}, {type_, type_, true}, scaled.data(), true, before_,
                                  pipeline_.in.get());
    in_ = scaled;
  }

  /// What a tensor takes up in the buffer: the next one begins at a multiple of kAlignment. One by
  /// itself has no gap behind it, which Adasum would take for a part of the vector. The same on
  /// every rank.
  std::size_t room_for(std::size_t bytes) const {
    return execution_.fused() && execution_.in_place_kind() ? aligned(bytes) : bytes;
  }

  std::size_t padded_bytes() const {
    std::size_t bytes = 0;
    for (const auto& operation : execution_.agreed())
      bytes += room_for(static_cast<std::size_t>(operation.request.elements()) * size_of(type_));
    return bytes;
  }

  /// All ranks take the channel's own buffer for a batch, the same one, or none does: what decides
  /// is agreed, and batches of a pipeline follow each other in one order. A tensor by itself lies
  /// in the caller's memory on the ranks that have it, so a rank that has joined may not take one
  /// for it, unless it is cast.
  void lease_output(std::size_t bytes, bool buffered_in_place) {
    std::span<std::byte> own;
    if (buffered_in_place)
      own = pipeline_.channels_own.take(pipeline_.channel.fusion_buffers(), bytes,
                                        pipeline_.in.get());
    in_turn_ = !own.empty();
    if (!in_turn_) output_ = pipeline_.buffers.lease(bytes, pipeline_.in.get());
    out_ = in_turn_ ? own : output_.bytes();
  }

  void prepare_buffered() {
    // What is cut or joined by rows has its sizes from the collective, so it lies without gaps.
    const bool in_place = execution_.in_place_kind();
    const std::size_t out_bytes = in_place ? padded_bytes() : execution_.out_bytes();
    lease_output(out_bytes, in_place);
    std::span<std::byte> packed = out_;
    if (in_place) {
      collective_.count = static_cast<std::int64_t>(out_bytes / size_of(type_));
    } else {
      input_ = pipeline_.buffers.lease(execution_.in_bytes(), pipeline_.in.get());
      packed = input_.bytes();
    }
    in_ = packed;
    if (!sends()) return;
    pieces_.clear();
    std::size_t offset = 0;
    for (const auto piece : execution_.input_pieces())
      add_piece(const_cast<std::byte*>(piece.data()), piece.size(), offset);  // only read
    pipeline_.context.copy_pieces(pieces_, {tensor_type_, type_, before_ != 1.0}, packed.data(),
                                  true, before_, pipeline_.in.get());
  }

  void add_piece(std::byte* tensor, std::size_t bytes, std::size_t& offset) {
    const std::size_t count = bytes / size_of(tensor_type_);
    pieces_.push_back({tensor, offset, count});
    offset += room_for(count * size_of(type_));
  }

  void prepare_absent() {
    const bool in_place = execution_.in_place_kind() && execution_.buffered();
    const std::size_t out_bytes = in_place ? padded_bytes() : execution_.out_bytes();
    if (in_place) collective_.count = static_cast<std::int64_t>(out_bytes / size_of(type_));
    lease_output(out_bytes, in_place);
    std::span<std::byte> contribution = out_;
    if (!execution_.in_place_kind()) {
      input_ = pipeline_.buffers.lease(execution_.in_bytes(), pipeline_.in.get());
      contribution = input_.bytes();
    }
    in_ = contribution;
    if (collective_.kind != OpKind::kAllreduce && collective_.kind != OpKind::kReducescatter)
      return;
    std::uint64_t pattern = 0;
    const ReduceOp op = collective_.op == ReduceOp::kAdasum ? ReduceOp::kSum : collective_.op;
    fill_identity(reinterpret_cast<std::byte*>(&pattern), 1, type_, op);
    pipeline_.context.api().fill(contribution.data(), contribution.size() / size_of(type_),
                                 size_of(type_), pattern, pipeline_.in.get());
  }

  void unpack() {
    const device::DeviceGuard guard(pipeline_.context.api(), pipeline_.context.device());
    pipeline_.context.wait(pipeline_.out.get(), ready_);
    pieces_.clear();
    std::size_t offset = 0;
    for (const auto piece : execution_.output_pieces())
      add_piece(piece.data(), piece.size(), offset);
    pipeline_.context.copy_pieces(pieces_, {tensor_type_, type_, after_ != 1.0}, out_.data(), false,
                                  after_, pipeline_.out.get());
    ready_ = pipeline_.context.events()->record(pipeline_.out.get());
  }

  DevicePipeline& pipeline_;
  BatchExecution& execution_;
  const DataType tensor_type_;
  const DataType type_;  // in the buffer
  Collective collective_;
  double before_ = 1.0;  // factor while packing
  double after_ = 1.0;   // and while unpacking
  std::span<const std::byte> in_;
  std::span<std::byte> out_;
  device::BufferLease input_;
  device::BufferLease output_;
  bool in_turn_ = false;  // out_ is the channel's own
  std::vector<device::Piece> pieces_;
  EventPtr ready_;
  std::unique_ptr<Work> work_;  // last: it uses what is above
};

}  // namespace

DevicePipeline::DevicePipeline(device::Context& on, Channel& of, bool folds_factors)
    : context(on),
      channel(of),
      folds(folds_factors),
      in(on),
      out(on),
      buffers(on.api(), on.device(), on.plain_memory()),
      channels_own(on.api()) {}

DevicePipeline::~DevicePipeline() {
  try {
    const device::DeviceGuard guard(context.api(), context.device());
    if (channels_own.idle()) channel.give_back_fusion_buffers();
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a channel's fusion buffers were not freed: "
                    << error.what();  // the device has failed, which others report
  }
}

std::unique_ptr<Work> start_on_device(DevicePipeline& pipeline, BatchExecution& execution,
                                      const composite::Launch& launch,
                                      const composite::Launch& launch_on_host) {
  if (execution.request().kind != OpKind::kAlltoall)
    return std::make_unique<DeviceBatch>(pipeline, execution, launch);
  Submission& submission = execution.operations().front()->submission;
  const composite::Launch launch_rows = [&pipeline, &submission, launch](
                                            const Collective& rows, std::span<const std::byte> in,
                                            std::span<std::byte> out) {
    Collective exchange = rows;
    if (rows.input_ready == nullptr) {
      exchange.input_ready = submission.input_ready;
    } else {
      const device::DeviceGuard guard(pipeline.context.api(), pipeline.context.device());
      pipeline.context.wait(pipeline.in.get(), submission.input_ready);
      pipeline.context.wait(pipeline.in.get(), rows.input_ready);
      exchange.input_ready = pipeline.context.events()->record(pipeline.in.get());
    }
    return launch(exchange, in, out);
  };
  return composite::make_alltoall(launch_rows, launch_on_host, submission);
}

void DeviceCompletions::add(Channel& channel, const BatchExecution& execution,
                            EventPtr output_ready) {
  Entry entry{&channel, std::move(output_ready), {}, {}, clock_.now()};
  entry.what = control::describe(execution.request());
  for (const OperationPtr& operation : execution.operations()) {
    const Submission& submission = operation->submission;
    if (submission.keep_alive) entry.keep_alive.push_back(submission.keep_alive);
  }
  if (entries_.empty()) next_look_ = entry.since + kBetweenLooks;
  entries_.push_back(std::move(entry));
}

bool DeviceCompletions::has(const Channel& channel) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.channel == &channel; });
}

void DeviceCompletions::look() {
  if (entries_.empty()) return;
  const TimePoint now = clock_.now();
  if (now < next_look_) return;
  next_look_ = now + kBetweenLooks;
  // Batches of one pipeline end in order, those of several in any.
  std::erase_if(entries_, [](const Entry& entry) { return entry.output_ready->query(); });
  const Channel* checked = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.channel != checked) entry.channel->check_health();
    checked = entry.channel;
    if (limit_ == Duration::zero() || now - entry.since < limit_) continue;
    throw PeerLostError(
        entry.what + " has been in the device's queue for " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::seconds>(now - entry.since).count()) +
            " s; expected every rank's GPU to get to it in " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(limit_).count()) +
            " s (HVD_STALL_SHUTDOWN); a rank's GPU hangs, or its program computes for longer than "
            "that",
        -1);
  }
}

std::optional<TimePoint> DeviceCompletions::next_look() const noexcept {
  if (entries_.empty()) return std::nullopt;
  return next_look_;
}

void DeviceCompletions::abandon() noexcept {
  for (Entry& entry : entries_) {
    for (auto& owner : entry.keep_alive) keep_until_exit(std::move(owner));
  }
  entries_.clear();
}

}  // namespace hvd::runtime
