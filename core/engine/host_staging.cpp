#include "engine/host_staging.h"

#include <algorithm>
#include <utility>

#include "backend/backend.h"
#include "base/expect.h"
#include "kernels/kernels.h"

namespace hvd::runtime {

const Staged& HostStaging::stage(const Batch& batch) {
  HVD_EXPECT(input_.bytes().empty() && output_.bytes().empty(),
             "the batch before has been unstaged");
  batch.allocate_outputs();
  staged_ = {batch.collective()};
  packed_ = {};
  position_ = {};
  unpacks_ = false;
  const bool absent = batch.absent_here();
  if (batch.buffered() || absent) {
    output_ = pool_.lease(batch.out_bytes());
    staged_.out = output_.bytes();
  } else {
    const Submission& submission = batch.operations().front()->submission;
    if (batch.reads_input()) staged_.in = {submission.input.data, submission.input.bytes()};
    if (batch.has_output()) staged_.out = {submission.output.data, submission.output.bytes()};
    if (!batch.conversion().scales_early()) return staged_;
  }
  packed_ = staged_.out;
  if (!batch.in_place_kind()) {
    input_ = pool_.lease(batch.in_bytes());
    packed_ = input_.bytes();
  }
  staged_.in = packed_;
  if (!absent) batch.input_pieces(input_pieces_);
  return staged_;
}

bool HostStaging::pack_part(const Batch& batch) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  if (packed_.empty()) return true;
  if (batch.absent_here()) return fill_neutral(staged_.collective);
  const bool contributes = staged_.collective.kind != OpKind::kBroadcast || batch.at_root();
  return !contributes || pack_tensors(batch);
}

bool HostStaging::pack_tensors(const Batch& batch) {
  const Conversion& conversion = batch.conversion();
  const std::size_t begin = position_.in_buffer;
  if (conversion.casts()) {
    position_ = pack_narrowed(input_pieces_, packed_, {conversion.travels, conversion.before},
                              position_, kBytesPerCall);
  } else {
    position_ = pack(input_pieces_, packed_, position_, kBytesPerCall);
  }
  if (conversion.scales_early()) {
    std::byte* const scaled = packed_.data() + begin;
    const std::byte* const source = scaled;
    reduce({&source, 1}, scaled,
           static_cast<std::int64_t>((position_.in_buffer - begin) / size_of(conversion.travels)),
           conversion.travels, staged_.collective.op, {conversion.before, 1.0, 1});
  }
  return position_.piece == input_pieces_.size();
}

// Where nothing is reduced an absent rank has nothing to contribute: the root, or a rank with rows,
// does.
bool HostStaging::fill_neutral(const Collective& collective) {
  if (collective.kind != OpKind::kAllreduce && collective.kind != OpKind::kReducescatter)
    return true;
  const ReduceOp op = collective.op == ReduceOp::kAdasum ? ReduceOp::kSum : collective.op;
  const std::size_t bytes = std::min(kBytesPerCall, packed_.size() - position_.in_buffer);
  fill_identity(packed_.data() + position_.in_buffer,
                static_cast<std::int64_t>(bytes / size_of(collective.dtype)), collective.dtype, op);
  position_.in_buffer += bytes;
  return position_.in_buffer == packed_.size();
}

bool HostStaging::unpack_part(const Batch& batch) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  if (!batch.buffered() || batch.absent_here()) return true;
  if (!std::exchange(unpacks_, true)) {
    position_ = {};
    batch.output_pieces(output_pieces_);
  }
  const Conversion& conversion = batch.conversion();
  if (conversion.casts()) {
    position_ = unpack_widened(output_.bytes(), output_pieces_,
                               {conversion.travels, conversion.after}, position_, kBytesPerCall);
  } else {
    position_ = unpack(output_.bytes(), output_pieces_, position_, kBytesPerCall);
  }
  return position_.piece == output_pieces_.size();
}

EventPtr HostStaging::unstage([[maybe_unused]] const Batch& batch, EventPtr reduced) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  input_ = {};
  output_ = {};
  staged_ = {};
  return reduced;
}

void HostStaging::abandon() noexcept {
  input_.abandon();
  output_.abandon();
}

}  // namespace hvd::runtime
