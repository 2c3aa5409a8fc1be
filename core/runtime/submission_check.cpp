#include "runtime/submission_check.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

class Checker {
 public:
  Checker(const Submission& submission, const control::ProcessSetTable& sets, int rank)
      : submission_(submission), sets_(sets), rank_(rank) {}

  void check() const {
    check_names();
    check_set_and_root();
    check_op();
    check_shape();
    check_output();
    check_group();
    check_group_name();
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw UsageError(std::string(to_string(submission_.kind)) + " '" + submission_.name + "': " + problem);
  }

  void check_names() const {
    if (submission_.name.size() > wire::kMaxNameBytes || submission_.group.size() > wire::kMaxNameBytes) {
      fail("expected a name of at most " + std::to_string(wire::kMaxNameBytes) + " bytes");
    }
  }

  void check_set_and_root() const {
    if (!sets_.contains(submission_.process_set)) fail("there is no process set " + std::to_string(submission_.process_set));
    if (sets_.position(submission_.process_set, rank_) < 0) {
      fail("rank " + std::to_string(rank_) + " is not in process set " + std::to_string(submission_.process_set));
    }
    if (submission_.kind == OpKind::kBroadcast && sets_.position(submission_.process_set, submission_.root) < 0) {
      fail("root rank " + std::to_string(submission_.root) + " is not in process set " +
           std::to_string(submission_.process_set) + "; a root is a world rank of a member");
    }
  }

  bool reduces() const { return submission_.kind == OpKind::kAllreduce || submission_.kind == OpKind::kReducescatter; }

  void check_op() const {
    switch (submission_.kind) {
      case OpKind::kAllreduce:
      case OpKind::kAllgather:
      case OpKind::kBroadcast:
      case OpKind::kBarrier:
        break;
      case OpKind::kReducescatter:
      case OpKind::kAlltoall:
      case OpKind::kJoin:
      case OpKind::kGather:
      case OpKind::kAddProcessSet:
      case OpKind::kRemoveProcessSet:
        fail("this version does not have this operation; it has allreduce, allgather, broadcast and barrier");
    }
    if (submission_.input.device.type != DeviceType::kCpu) {
      fail("the tensor is on " + std::string(to_string(submission_.input.device.type)) +
           "; this build has backends for cpu only");
    }
    if (!std::isfinite(submission_.prescale) || !std::isfinite(submission_.postscale)) fail("a scale factor is not finite");
    if (!reduces()) return;
    if (submission_.op == ReduceOp::kAdasum) fail("this version does not have Adasum; use average or sum");
    if (submission_.op == ReduceOp::kAverage && submission_.input.dtype == DataType::kBool) {
      fail("an average of bool has no meaning; use sum (or), product (and), min or max");
    }
    if (submission_.input.dtype == DataType::kBool && (submission_.prescale != 1 || submission_.postscale != 1)) {
      fail("bool cannot be scaled; leave prescale and postscale at 1");
    }
  }

  void check_shape() const {
    const TensorView& input = submission_.input;
    if (input.shape.size() > wire::kMaxDims) fail("expected at most " + std::to_string(wire::kMaxDims) + " dimensions");
    std::int64_t elements = 1;
    for (const auto size : input.shape) {
      if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) fail("bad shape " + shape_to_string(input.shape));
    }
    if (submission_.kind == OpKind::kBarrier) return;
    if (elements != input.count) {
      fail("the shape " + shape_to_string(input.shape) + " has " + std::to_string(elements) + " elements, the view " +
           std::to_string(input.count));
    }
    if (input.count > 0 && input.data == nullptr) fail("the input has no memory");
    if (submission_.kind == OpKind::kAllgather && input.shape.empty()) {
      fail("a scalar has no first dimension to concatenate along; reshape it to [1]");
    }
  }

  void check_output() const {
    if (submission_.kind == OpKind::kAllgather) {
      if (!submission_.allocate_output) fail("the size of the result is not known yet: allocate_output must be set");
      return;
    }
    if (submission_.kind != OpKind::kAllreduce && submission_.kind != OpKind::kBroadcast) return;
    const TensorView& output = submission_.output;
    if (output.count != submission_.input.count || output.dtype != submission_.input.dtype) {
      fail("the output has " + std::to_string(output.count) + " elements of " + std::string(to_string(output.dtype)) +
           ", expected " + std::to_string(submission_.input.count) + " of " + std::string(to_string(submission_.input.dtype)));
    }
    if (output.count > 0 && output.data == nullptr) fail("the output has no memory");
  }

  void check_group() const {
    if (submission_.group_size < 0 || static_cast<std::size_t>(submission_.group_size) > wire::kMaxTensors ||
        submission_.group_index < 0 || (submission_.group_size > 0 && submission_.group_index >= submission_.group_size)) {
      fail("bad group: member " + std::to_string(submission_.group_index) + " of " + std::to_string(submission_.group_size));
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
};

}  // namespace

wire::Request make_request(const Submission& submission, const control::ProcessSetTable& sets, int rank) {
  Checker(submission, sets, rank).check();
  wire::Request request;
  request.name = submission.name;
  request.unnamed = submission.name.empty();
  request.kind = submission.kind;
  // Fields that mean nothing for a kind are normalised, or they would keep equal operations from sharing a batch.
  const bool reduces = submission.kind == OpKind::kAllreduce || submission.kind == OpKind::kReducescatter;
  request.op = reduces ? submission.op : ReduceOp::kSum;
  request.prescale = reduces ? submission.prescale : 1.0;
  request.postscale = reduces ? submission.postscale : 1.0;
  request.root = submission.kind == OpKind::kBroadcast ? submission.root : 0;
  request.dtype = submission.kind == OpKind::kBarrier ? DataType::kUInt8 : submission.input.dtype;
  request.device = submission.input.device.type;
  request.process_set = submission.process_set;
  request.shape = submission.kind == OpKind::kBarrier ? std::vector<std::int64_t>{0} : submission.input.shape;
  request.group = submission.group;
  request.group_size = submission.group_size;
  request.group_index = submission.group_size > 0 ? submission.group_index : 0;
  return request;
}

}  // namespace hvd::runtime
