#include "engine/submission_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "base/floating.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

class Checker {
 public:
  Checker(const Submission& submission, const control::ProcessSetTable& sets, int rank,
          std::optional<int> gpu)
      : submission_(submission), sets_(sets), rank_(rank), gpu_(gpu) {}

  void check() const {
    check_names();
    check_set_and_root();
    check_compression();
    check_group();
    check_group_name();
    if (agrees_on_job()) return check_job_operation();
    check_device();
    check_op();
    check_shape();
    check_output();
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw UsageError(std::string(to_string(submission_.kind)) + " '" + submission_.name +
                     "': " + problem);
  }

  void check_names() const {
    if (submission_.name.size() > wire::kMaxNameBytes ||
        submission_.group.size() > wire::kMaxNameBytes) {
      fail("expected a name of at most " + std::to_string(wire::kMaxNameBytes) + " bytes");
    }
  }

  void check_set_and_root() const {
    if (!sets_.contains(submission_.process_set))
      fail("there is no process set " + std::to_string(submission_.process_set));
    if (sets_.position(submission_.process_set, rank_) < 0) {
      fail("rank " + std::to_string(rank_) + " is not in process set " +
           std::to_string(submission_.process_set));
    }
    if (has_root() && sets_.position(submission_.process_set, submission_.root) < 0) {
      fail(std::string(submission_.kind == OpKind::kGather ? "destination" : "root") + " rank " +
           std::to_string(submission_.root) + " is not in process set " +
           std::to_string(submission_.process_set) + "; a root is a world rank of a member");
    }
  }

  bool has_root() const {
    return submission_.kind == OpKind::kBroadcast || submission_.kind == OpKind::kGather;
  }
  bool agrees_on_job() const {
    return submission_.kind == OpKind::kJoin || submission_.kind == OpKind::kAddProcessSet ||
           submission_.kind == OpKind::kRemoveProcessSet;
  }
  bool cuts_rows() const {
    return wire::gathers(submission_.kind) || submission_.kind == OpKind::kReducescatter ||
           submission_.kind == OpKind::kAlltoall;
  }

  void check_job_operation() const {
    if (submission_.process_set != 0) fail("it concerns all ranks, not a process set");
    if (submission_.kind == OpKind::kRemoveProcessSet) {
      if (submission_.root == 0) fail("the set of all ranks cannot be removed");
      if (!sets_.contains(submission_.root))
        fail("there is no process set " + std::to_string(submission_.root));
    }
    if (submission_.kind == OpKind::kAddProcessSet) check_members();
  }

  void check_members() const {
    const auto& ranks = submission_.splits;
    const auto world = static_cast<std::int64_t>(sets_.ranks(0).size());
    if (ranks.empty()) fail("expected at least one rank");
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] < 0 || ranks[i] >= world) {
        fail("expected ranks from 0 to " + std::to_string(world - 1) + ", got " +
             std::to_string(ranks[i]));
      }
      if (i > 0 && ranks[i] == ranks[i - 1])
        fail("rank " + std::to_string(ranks[i]) + " occurs twice");
      if (i > 0 && ranks[i] < ranks[i - 1]) fail("expected ranks in ascending order");
    }
  }

  bool reduces() const {
    return submission_.kind == OpKind::kAllreduce || submission_.kind == OpKind::kReducescatter;
  }

  void check_device() const {
    const Device& device = submission_.input.device;
    if (device.type != DeviceType::kCpu) check_gpu(device);
    const bool output_known = !submission_.allocate_output && submission_.kind != OpKind::kBarrier;
    if (!output_known || submission_.output.device == device) return;
    fail("the input is on " + device_text(device) + ", the output on " +
         device_text(submission_.output.device) + "; expected both on one device");
  }

  void check_gpu(const Device& device) const {
    if (!gpu_) {
      fail("the tensor is on " + device_text(device) +
           ", but this rank has no GPU to use (see hvd::build_info()); expected a cpu tensor");
    }
    if (device.index == *gpu_) return;
    fail("the tensor is on " + device_text(device) + "; expected cuda:" + std::to_string(*gpu_) +
         ", the one GPU that this rank works with: its local rank modulo the GPUs it sees, or "
         "HVD_DEVICE");
  }

  static std::string device_text(const Device& device) {
    const std::string type(to_string(device.type));
    return device.type == DeviceType::kCpu ? type : type + ":" + std::to_string(device.index);
  }

  void check_op() const {
    if (!std::isfinite(submission_.prescale) || !std::isfinite(submission_.postscale))
      fail("a scale factor is not finite");
    if (!reduces()) return;
    if (submission_.op == ReduceOp::kAdasum) check_adasum();
    if (submission_.op == ReduceOp::kAverage && submission_.input.dtype == DataType::kBool) {
      fail("an average of bool has no meaning; use sum (or), product (and), min or max");
    }
    if (submission_.input.dtype == DataType::kBool &&
        (submission_.prescale != 1 || submission_.postscale != 1)) {
      fail("bool cannot be scaled; leave prescale and postscale at 1");
    }
  }

  void check_compression() const {
    if (submission_.compression == Compression::kNone) return;
    const std::string compression(to_string(submission_.compression));
    if (submission_.kind != OpKind::kAllreduce)
      fail("compression (" + compression + ") is for allreduce; send a tensor of 16 bits instead");
    if (submission_.input.dtype == DataType::kFloat32) return;
    fail("compression (" + compression + ") is for float32, got " +
         std::string(to_string(submission_.input.dtype)) + "; submit it without");
  }

  void check_adasum() const {
    if (submission_.kind == OpKind::kReducescatter)
      fail("Adasum needs whole vectors; use allreduce");
    const DataType type = submission_.input.dtype;
    if (!is_floating(type))
      fail("Adasum is for floating types, got " + std::string(to_string(type)) + "; use sum");
  }

  void check_shape() const {
    const TensorView& input = submission_.input;
    if (input.shape.size() > wire::kMaxDims)
      fail("expected at most " + std::to_string(wire::kMaxDims) + " dimensions");
    std::int64_t elements = 1;
    auto without_zeros = static_cast<std::int64_t>(
        size_of(input.dtype));  // the bytes that a rank with more rows than none would have
    for (const auto size : input.shape) {
      const bool fits =
          size >= 0 && !__builtin_mul_overflow(elements, size, &elements) &&
          !__builtin_mul_overflow(without_zeros, std::max<std::int64_t>(size, 1), &without_zeros);
      if (!fits) fail("bad shape " + shape_to_string(input.shape));
    }
    if (submission_.kind == OpKind::kBarrier) return;
    if (elements != input.count) {
      fail("the shape " + shape_to_string(input.shape) + " has " + std::to_string(elements) +
           " elements, the view " + std::to_string(input.count));
    }
    if (input.count > 0 && input.data == nullptr) fail("the input has no memory");
    if (cuts_rows() && input.shape.empty())
      fail("a scalar has no first dimension; reshape it to [1]");
    if (submission_.kind == OpKind::kAlltoall) check_splits();
  }

  void check_splits() const {
    const auto& splits = submission_.splits;
    const std::size_t members = sets_.ranks(submission_.process_set).size();
    if (splits.size() != members) {
      fail("expected " + std::to_string(members) + " splits, one per member, got " +
           std::to_string(splits.size()));
    }
    std::int64_t rows = 0;
    for (const auto split : splits) {
      if (split < 0 || __builtin_add_overflow(rows, split, &rows))
        fail("bad splits " + shape_to_string(splits) + "; expected none below 0");
    }
    if (rows != submission_.input.shape[0]) {
      fail("the splits " + shape_to_string(splits) + " add up to " + std::to_string(rows) +
           " rows, expected " + std::to_string(submission_.input.shape[0]));
    }
  }

  void check_output() const {
    if (submission_.kind == OpKind::kBarrier) return;
    if (wire::gathers(submission_.kind) || submission_.kind == OpKind::kAlltoall) {
      if (!submission_.allocate_output)
        fail("the size of the result is not known yet: allocate_output must be set");
      return;
    }
    std::int64_t expected = submission_.input.count;
    if (submission_.kind == OpKind::kReducescatter && expected > 0) {
      const std::int64_t rows = submission_.input.shape[0];
      const auto members = static_cast<int>(sets_.ranks(submission_.process_set).size());
      expected = expected / rows *
                 rows_of_member(rows, members, sets_.position(submission_.process_set, rank_));
    }
    const TensorView& output = submission_.output;
    if (output.count != expected || output.dtype != submission_.input.dtype) {
      fail("the output has " + std::to_string(output.count) + " elements of " +
           std::string(to_string(output.dtype)) + ", expected " + std::to_string(expected) +
           " of " + std::string(to_string(submission_.input.dtype)));
    }
    if (output.count > 0 && output.data == nullptr) fail("the output has no memory");
    check_overlap();
  }

  // The others may still read the input when this rank's result comes in: only rows that nobody
  // else reads can take it.
  void check_overlap() const {
    const TensorView& input = submission_.input;
    const TensorView& output = submission_.output;
    const std::less<const std::byte*> before;
    if (input.count == 0 || output.count == 0) return;
    if (!before(output.data, input.data + input.bytes()) ||
        !before(input.data, output.data + output.bytes()))
      return;
    if (submission_.kind != OpKind::kReducescatter) {
      if (output.data != input.data)
        fail("the output overlaps the input; expected the same memory or none in common");
      return;
    }
    const auto members = static_cast<int>(sets_.ranks(submission_.process_set).size());
    const int position = sets_.position(submission_.process_set, rank_);
    std::int64_t first = 0;
    for (int member = 0; member < position; ++member)
      first += rows_of_member(input.shape[0], members, member);
    if (output.data == input.data + static_cast<std::size_t>(first) *
                                        (input.bytes() / static_cast<std::size_t>(input.shape[0])))
      return;
    fail("the output overlaps the input; expected the rows of it that this rank gets, from row " +
         std::to_string(first) + " on, or no memory in common");
  }

  void check_group() const {
    if (submission_.group_size < 0 ||
        static_cast<std::size_t>(submission_.group_size) > wire::kMaxTensors ||
        submission_.group_index < 0 ||
        (submission_.group_size > 0 && submission_.group_index >= submission_.group_size)) {
      fail("bad group: member " + std::to_string(submission_.group_index) + " of " +
           std::to_string(submission_.group_size));
    }
  }

  void check_group_name() const {
    if (submission_.group_size > 0 && submission_.group.empty() != submission_.name.empty()) {
      fail("a group and its members are either all named or all unnamed");
    }
  }

  const Submission& submission_;
  const control::ProcessSetTable& sets_;
  const int rank_;
  const std::optional<int> gpu_;
};

}  // namespace

wire::Request make_request(const Submission& submission, const control::ProcessSetTable& sets,
                           int rank, std::optional<int> gpu) {
  Checker(submission, sets, rank, gpu).check();
  wire::Request request;
  request.name = submission.name;
  request.unnamed = submission.name.empty();
  request.kind = submission.kind;
  // Fields that mean nothing for a kind are normalised, or they would keep equal operations from
  // sharing a batch.
  const bool reduces =
      submission.kind == OpKind::kAllreduce || submission.kind == OpKind::kReducescatter;
  request.op = reduces ? submission.op : ReduceOp::kSum;
  request.prescale = reduces ? submission.prescale : 1.0;
  request.postscale = reduces ? submission.postscale : 1.0;
  request.compression = submission.compression;
  const bool has_root = submission.kind == OpKind::kBroadcast ||
                        submission.kind == OpKind::kGather ||
                        submission.kind == OpKind::kRemoveProcessSet;
  request.root = has_root ? submission.root : 0;
  if (submission.kind == OpKind::kAddProcessSet) request.splits = submission.splits;
  request.process_set = submission.process_set;
  request.device = submission.input.device.type;
  if (wire::only_agrees(submission.kind)) {
    request.dtype = DataType::kUInt8;
    request.shape = {0};
  } else {
    request.dtype = submission.input.dtype;
    request.shape.assign(submission.input.shape.begin(), submission.input.shape.end());
    // Each rank sends as many rows as it likes.
    if (submission.kind == OpKind::kAlltoall) request.shape[0] = 0;
  }
  request.alone = submission.alone;
  request.group = submission.group;
  request.group_size = submission.group_size;
  request.group_index = submission.group_size > 0 ? submission.group_index : 0;
  return request;
}

}  // namespace hvd::runtime
