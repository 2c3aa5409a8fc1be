#include "execution/host_staging.h"

#include <utility>

#include "base/expect.h"
#include "base/kernels.h"
#include "execution/packer.h"

namespace hvd::runtime {

const Staged& HostStaging::stage(const Batch& batch) {
  HVD_EXPECT(input_.bytes().empty() && output_.bytes().empty(),
             "the batch before has been unstaged");
  batch.allocate_outputs();
  staged_ = {batch.collective()};
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
  std::span<std::byte> packed = staged_.out;
  if (!batch.in_place_kind()) {
    input_ = pool_.lease(batch.in_bytes());
    packed = input_.bytes();
  }
  staged_.in = packed;
  if (absent) {
    fill_neutral(staged_.collective, packed);
  } else if (staged_.collective.kind != OpKind::kBroadcast || batch.at_root()) {
    pack_tensors(batch, packed);
  }
  return staged_;
}

void HostStaging::pack_tensors(const Batch& batch, std::span<std::byte> packed) {
  const Conversion& conversion = batch.conversion();
  batch.input_pieces(input_pieces_);
  if (conversion.casts())
    return pack_narrowed(input_pieces_, packed, conversion.travels, conversion.before);
  pack(input_pieces_, packed);
  if (!conversion.scales_early()) return;
  const std::byte* const source = packed.data();
  reduce({&source, 1}, packed.data(),
         static_cast<std::int64_t>(packed.size() / size_of(conversion.travels)), conversion.travels,
         staged_.collective.op, {conversion.before, 1.0, 1});
}

// Where nothing is reduced an absent rank has nothing to say: the root, or who has rows, does.
void HostStaging::fill_neutral(const Collective& collective, std::span<std::byte> contribution) {
  if (collective.kind != OpKind::kAllreduce && collective.kind != OpKind::kReducescatter) return;
  const ReduceOp op = collective.op == ReduceOp::kAdasum ? ReduceOp::kSum : collective.op;
  fill_identity(contribution.data(),
                static_cast<std::int64_t>(contribution.size() / size_of(collective.dtype)),
                collective.dtype, op);
}

EventPtr HostStaging::unstage(const Batch& batch, EventPtr reduced) {
  HVD_EXPECT(!batch.buffered() || output_.bytes().size() == batch.out_bytes(),
             "this batch is staged");
  if (batch.buffered() && !batch.absent_here()) {
    const Conversion& conversion = batch.conversion();
    batch.output_pieces(output_pieces_);
    if (conversion.casts()) {
      unpack_widened(output_.bytes(), output_pieces_, conversion.travels, conversion.after);
    } else {
      unpack(output_.bytes(), output_pieces_);
    }
  }
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
