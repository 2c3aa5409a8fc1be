#include "engine/device_staging.h"

#include <array>
#include <exception>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd::runtime {
namespace {

/// Tensors are aligned in the buffer for the widest accesses.
constexpr std::size_t kAlignment = 16;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool reduces(const Collective& collective) noexcept {
  return collective.kind == OpKind::kAllreduce || collective.kind == OpKind::kReducescatter;
}

/// Whether the batch's buffer has the same size on every rank, with tensors at multiples of
/// kAlignment. Operations that split or join tensors by rows take their sizes from the collective,
/// so their tensors have no gaps.
bool padded(const Batch& batch) noexcept { return batch.in_place_kind() && batch.buffered(); }

/// The bytes that a tensor occupies in the buffer, the same on every rank. A single tensor has no
/// gap behind it, because Adasum would treat the gap as a part of the vector.
std::size_t room_for(const Batch& batch, std::size_t bytes) noexcept {
  return batch.fused() && batch.in_place_kind() ? aligned(bytes) : bytes;
}

std::size_t padded_bytes(const Batch& batch) {
  std::size_t bytes = 0;
  for (const auto& operation : batch.agreed()) {
    const auto count = static_cast<std::size_t>(operation.request.elements());
    bytes += room_for(batch, count * size_of(batch.conversion().wire_dtype));
  }
  return bytes;
}

/// Size of the buffer that receives the result.
std::size_t buffer_bytes(const Batch& batch) {
  return padded(batch) ? padded_bytes(batch) : batch.out_bytes();
}

}  // namespace

DeviceStaging::~DeviceStaging() {
  channel_.wait_for_abort();
  try {
    const device::DeviceGuard guard(context_.api(), context_.device());
    if (channel_buffers_.idle()) channel_.release_fusion_buffers();
  } catch (const std::exception& error) {  // the device has failed, which is reported elsewhere
    HVD_LOG(kDebug) << "a channel's fusion buffers were not freed: " << error.what();
  }
}

// The channel is ready at this point, so its own buffers are known.
void DeviceStaging::reserve() {
  if (std::exchange(reserved_, true)) return;
  if (fusion_bytes_ > 0 && channel_.fusion_buffers().empty()) buffers_.reserve(fusion_bytes_);
}

// Prepares the buffers that stage() will lease.
bool DeviceStaging::ready(const Batch& batch) {
  reserve();
  std::array<std::size_t, 2> sizes;
  std::size_t count = 0;
  if (batch.absent_here() || batch.buffered()) {
    const std::size_t bytes = buffer_bytes(batch);
    if (!uses_channel_buffers(batch, bytes)) sizes[count++] = bytes;
    if (!batch.in_place_kind()) sizes[count++] = batch.in_bytes();
  } else if (batch.conversion().scales_early() && !batch.in_place_kind()) {
    sizes[count++] = batch.operations().front()->submission.input.bytes();
  }
  return count == 0 || buffers_.prepare(std::span(sizes).first(count));
}

const Staged& DeviceStaging::stage(const Batch& batch) {
  HVD_EXPECT(!input_.valid() && !output_.valid() && !output_in_channel_buffer_,
             "the batch before has been unstaged; none follows abandon()");
  const device::DeviceGuard guard(context_.api(), context_.device());
  const std::vector<EventPtr> writable = batch.allocate_outputs();
  staged_ = {batch.collective()};
  fold_factors(batch);
  // When there is at most one event to wait for, the channel can wait for it.
  const bool uses_stream = batch.buffered() || batch.absent_here() ||
                           batch.conversion().scales_early() || !writable.empty();
  if (uses_stream) wait_for_inputs(batch, writable);
  if (batch.absent_here()) {
    fill_neutral(lease_buffers(batch));
  } else if (batch.buffered()) {
    pack(batch, lease_buffers(batch));
  } else {
    use_tensor(batch);
  }
  if (uses_stream) staged_.collective.input_ready = context_.events()->record(in_.get());
  return staged_;
}

// Applying the factors while packing and unpacking costs no extra time. The divisor of an average
// is applied before the sum, so that fp16 does not overflow.
void DeviceStaging::fold_factors(const Batch& batch) {
  conversion_ = batch.conversion();
  const bool floating = is_floating(conversion_.wire_dtype);
  if (conversion_.scales_early() && !floating) {
    throw Error(
        "integers on a GPU cannot be scaled by a prescale factor once a rank has joined; use a "
        "floating type");
  }
  if (!reduces(staged_.collective) || !batch.buffered() || !folds_ || !floating) return;
  ReduceScale& scale = staged_.collective.scale;
  conversion_.before *= std::exchange(scale.prescale, 1.0);
  conversion_.before /= static_cast<double>(std::exchange(scale.divisor, 1));
  conversion_.after *= std::exchange(scale.postscale, 1.0);
}

void DeviceStaging::wait_for_inputs(const Batch& batch, std::span<const EventPtr> writable) {
  const Event* last = nullptr;
  for (const OperationPtr& operation : batch.operations()) {
    const EventPtr& event = operation->submission.input_ready;
    if (event.get() != last) context_.wait(in_.get(), event);
    last = event.get();
  }
  for (const EventPtr& event : writable) context_.wait(in_.get(), event);
}

void DeviceStaging::use_tensor(const Batch& batch) {
  const Submission& submission = batch.operations().front()->submission;
  staged_.collective.input_ready = submission.input_ready;
  if (batch.reads_input()) staged_.in = {submission.input.data, submission.input.bytes()};
  if (batch.has_output()) staged_.out = {submission.output.data, submission.output.bytes()};
  if (!batch.conversion().scales_early()) return;
  // Scales into the output if the sizes are equal, so that the caller's input does not change.
  std::span<std::byte> scaled = staged_.out;
  if (!batch.in_place_kind()) {
    input_ = buffers_.lease(staged_.in.size(), in_.get());
    scaled = input_.bytes();
  }
  const DataType type = conversion_.wire_dtype;
  const device::Piece piece{submission.input.data, 0, staged_.in.size() / size_of(type)};
  context_.copy_pieces({&piece, 1}, {type, type, true}, scaled.data(), true, conversion_.before,
                       in_.get());
  staged_.in = scaled;
}

/// @return the destination of this rank's contribution
std::span<std::byte> DeviceStaging::lease_buffers(const Batch& batch) {
  const std::size_t bytes = buffer_bytes(batch);
  lease_output(batch, bytes);
  if (padded(batch))
    staged_.collective.count = static_cast<std::int64_t>(bytes / size_of(conversion_.wire_dtype));
  std::span<std::byte> packed = staged_.out;
  if (!batch.in_place_kind()) {
    input_ = buffers_.lease(batch.in_bytes(), in_.get());
    packed = input_.bytes();
  }
  staged_.in = packed;
  return packed;
}

// For each batch, either all ranks use the same buffer of the channel, or no rank uses one: the
// decision depends only on values that all ranks agree on, and the batches of a pipeline have the
// same order on all ranks. A single tensor that is not packed stays in the caller's memory. For
// such a tensor a rank that has joined must not use a channel's buffer either, unless the tensor is
// cast.
bool DeviceStaging::uses_channel_buffers(const Batch& batch, std::size_t bytes) const {
  return padded(batch) && device::BufferRing::fits(channel_.fusion_buffers(), bytes);
}

void DeviceStaging::lease_output(const Batch& batch, std::size_t bytes) {
  output_in_channel_buffer_ = uses_channel_buffers(batch, bytes);
  if (output_in_channel_buffer_) {
    staged_.out = channel_buffers_.acquire(channel_.fusion_buffers(), bytes, in_.get());
  } else {
    output_ = buffers_.lease(bytes, in_.get());
    staged_.out = output_.bytes();
  }
}

template <class Byte>
void DeviceStaging::lay_out(const Batch& batch, std::span<const std::span<Byte>> tensors) {
  pieces_.clear();
  std::size_t offset = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t count = tensors[i].size() / size_of(conversion_.tensor);
    if (!batch.in_place_kind() || batch.operations()[i]->submission.parts.empty()) {
      pieces_.push_back(
          {const_cast<std::byte*>(tensors[i].data()), offset, count});  // inputs: only read
    } else {
      add_parts(batch.operations()[i]->submission.parts, offset);
    }
    offset += room_for(batch, count * size_of(conversion_.wire_dtype));
  }
}

/// @param offset the position in the buffer of the tensor that has these parts
void DeviceStaging::add_parts(std::span<const TensorPart> parts, std::size_t offset) {
  for (const TensorPart& part : parts) {
    const std::size_t first =
        static_cast<std::size_t>(part.first) * size_of(conversion_.wire_dtype);
    pieces_.push_back({part.data, offset + first, static_cast<std::uint64_t>(part.count)});
  }
}

void DeviceStaging::pack(const Batch& batch, std::span<std::byte> packed) {
  if (batch.collective().kind == OpKind::kBroadcast && !batch.at_root()) return;
  batch.input_pieces(input_pieces_);
  lay_out<const std::byte>(batch, input_pieces_);
  context_.copy_pieces(pieces_,
                       {conversion_.tensor, conversion_.wire_dtype, conversion_.before != 1.0},
                       packed.data(), true, conversion_.before, in_.get());
}

EventPtr DeviceStaging::unpack(const Batch& batch, const EventPtr& reduced) {
  const device::DeviceGuard guard(context_.api(), context_.device());
  context_.wait(out_.get(), reduced);
  batch.output_pieces(output_pieces_);
  lay_out<std::byte>(batch, output_pieces_);
  context_.copy_pieces(pieces_,
                       {conversion_.tensor, conversion_.wire_dtype, conversion_.after != 1.0},
                       staged_.out.data(), false, conversion_.after, out_.get());
  return context_.events()->record(out_.get());
}

void DeviceStaging::fill_neutral(std::span<std::byte> contribution) {
  if (!reduces(staged_.collective)) return;
  const DataType type = conversion_.wire_dtype;
  std::uint64_t pattern = 0;
  const ReduceOp op =
      staged_.collective.op == ReduceOp::kAdasum ? ReduceOp::kSum : staged_.collective.op;
  fill_identity(reinterpret_cast<std::byte*>(&pattern), 1, type, op);
  context_.api().fill(contribution.data(), contribution.size() / size_of(type), size_of(type),
                      pattern, in_.get());
}

EventPtr DeviceStaging::unstage(const Batch& batch, EventPtr reduced) {
  EventPtr ready = std::move(reduced);
  if (batch.buffered() && !batch.absent_here()) ready = unpack(batch, ready);
  input_.release(ready);
  output_.release(ready);
  if (std::exchange(output_in_channel_buffer_, false)) channel_buffers_.release(ready);
  staged_ = {};
  return ready;
}

// Buffers that are dropped without release() stay allocated, and the channel's buffers stay in use.
void DeviceStaging::abandon() noexcept {
  input_ = {};
  output_ = {};
}

EventPtr DeviceStaging::after_both(const EventPtr& one, const EventPtr& other) {
  if (one == nullptr || other == nullptr) return one != nullptr ? one : other;
  const device::DeviceGuard guard(context_.api(), context_.device());
  context_.wait(in_.get(), one);
  context_.wait(in_.get(), other);
  return context_.events()->record(in_.get());
}

}  // namespace hvd::runtime
