#include "engine/submission_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <type_traits>
#include <variant>

#include "base/text.h"
#include "engine/operations.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd::runtime {
namespace {

template <class Parameters, OpKind kind>
constexpr bool belong_together =
    std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(kind), OperationParameters>,
                   Parameters>;
static_assert(belong_together<Allreduce, OpKind::kAllreduce> &&
              belong_together<Allgather, OpKind::kAllgather> &&
              belong_together<Broadcast, OpKind::kBroadcast> &&
              belong_together<Reducescatter, OpKind::kReducescatter> &&
              belong_together<Alltoall, OpKind::kAlltoall> &&
              belong_together<Barrier, OpKind::kBarrier> && belong_together<Join, OpKind::kJoin> &&
              belong_together<Gather, OpKind::kGather> &&
              belong_together<AddProcessSet, OpKind::kAddProcessSet> &&
              belong_together<RemoveProcessSet, OpKind::kRemoveProcessSet> &&
              belong_together<Reduce, OpKind::kReduce> &&
              belong_together<Scatter, OpKind::kScatter>);

// Leaves room for the list of ranks in the operation's name, see name_by_members().
constexpr std::size_t kMaxSetNameBytes = 3800;
static_assert(kMaxSetNameBytes + 256 < wire::kMaxNameBytes);

class Checker {
 public:
  Checker(const Submission& submission, const control::ProcessSetTable& sets, int rank,
          std::optional<int> gpu)
      : submission_(submission), sets_(sets), rank_(rank), gpu_(gpu) {}

  void check() const {
    check_names();
    check_set();
    check_group();
    check_group_name();
    if (!agrees_on_job()) {
      check_device();
      check_shape();
    }
    if (!submission_.parts.empty()) check_parts();
    std::visit([this](const auto& parameters) { check_parameters(parameters); },
               submission_.parameters);
    if (!wire::only_agrees(kind())) check_output();
  }

 private:
  OpKind kind() const noexcept { return submission_.kind(); }

  void check_parameters(const Allreduce& allreduce) const {
    check_reduction(allreduce);
    check_compression(allreduce.compression);
  }
  void check_parameters(const Reducescatter& reducescatter) const {
    if (reducescatter.op == ReduceOp::kAdasum) fail("Adasum needs whole vectors; use allreduce");
    check_reduction(reducescatter);
  }
  void check_parameters(const Reduce& reduce) const {
    check_root("root", reduce.root);
    check_reduction(reduce);
  }
  void check_parameters(const Scatter& scatter) const { check_root("root", scatter.root); }
  void check_parameters(const Broadcast& broadcast) const { check_root("root", broadcast.root); }
  void check_parameters(const Gather& gather) const {
    check_root("destination", gather.destination);
  }
  void check_parameters(const Alltoall& alltoall) const { check_splits(alltoall.splits); }
  void check_parameters(const Allgather&) const {}
  void check_parameters(const Barrier&) const {}
  void check_parameters(const Join&) const { check_concerns_all(); }
  void check_parameters(const AddProcessSet& add) const {
    check_concerns_all();
    check_members(add.ranks);
    if (add.by_members) check_made_by_members(add.ranks);
  }
  void check_parameters(const RemoveProcessSet& remove) const {
    check_concerns_all();
    if (remove.process_set == 0) fail("the set of all ranks cannot be removed");
    if (!sets_.contains(remove.process_set)) fail("there is no process set ", remove.process_set);
    if (sets_.by_members(remove.process_set)) check_removed_by_members(remove.process_set);
  }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... problem) const {
    throw UsageError(text(kind(), " '", submission_.name, "': ", problem...));
  }

  void check_names() const {
    if (submission_.name.size() > wire::kMaxNameBytes ||
        submission_.group.size() > wire::kMaxNameBytes) {
      fail("expected a name of at most ", wire::kMaxNameBytes, " bytes");
    }
  }

  void check_set() const {
    if (!sets_.contains(submission_.process_set))
      fail("there is no process set ", submission_.process_set, "; was it removed?");
    if (sets_.position(submission_.process_set, rank_) < 0) {
      fail("rank ", rank_, " is not in process set ", submission_.process_set,
           "; only its members submit its operations");
    }
  }

  void check_root(const char* what, int root) const {
    if (sets_.position(submission_.process_set, root) >= 0) return;
    fail(what, " rank ", root, " is not in process set ", submission_.process_set,
         "; a root is a world rank of a member");
  }

  bool agrees_on_job() const { return wire::only_agrees(kind()) && kind() != OpKind::kBarrier; }
  bool cuts_rows() const {
    return wire::gathers(kind()) || kind() == OpKind::kReducescatter || kind() == OpKind::kAlltoall;
  }

  void check_concerns_all() const {
    if (submission_.process_set != 0) fail("it concerns all ranks, not a process set");
  }

  void check_members(const std::vector<int>& ranks) const {
    const auto world = static_cast<int>(sets_.ranks(0).size());
    if (ranks.empty()) fail("expected at least one rank");
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] < 0 || ranks[i] >= world) {
        fail("expected ranks from 0 to ", world - 1, ", got ", ranks[i]);
      }
      if (i > 0 && ranks[i] == ranks[i - 1]) fail("rank ", ranks[i], " occurs twice");
      if (i > 0 && ranks[i] < ranks[i - 1]) fail("expected ranks in ascending order");
    }
  }

  void check_made_by_members(const std::vector<int>& ranks) const {
    if (!std::ranges::binary_search(ranks, rank_)) {
      fail("rank ", rank_, " is not in the list ", control::members_text(ranks),
           "; only the members make a set with by_members");
    }
    if (submission_.group_size > 0) fail("a set that its members make cannot be in a group");
    if (submission_.name.size() > kMaxSetNameBytes)
      fail("expected a name of at most ", kMaxSetNameBytes, " bytes, got ",
           submission_.name.size());
  }

  void check_removed_by_members(int process_set) const {
    if (sets_.position(process_set, rank_) >= 0) return;
    fail("rank ", rank_, " is not in process set ", process_set,
         ", which its members made and remove alone");
  }

  void check_device() const {
    const Device& device = submission_.input.device;
    if (device.type != DeviceType::kCpu) check_gpu(device);
    const bool output_known = !submission_.allocate_output && kind() != OpKind::kBarrier;
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
    fail("the tensor is on ", device_text(device), "; expected cuda:", *gpu_,
         ", the one GPU that this rank works with: its local rank modulo the GPUs it sees, or "
         "HVD_DEVICE");
  }

  static std::string device_text(const Device& device) {
    return device.type == DeviceType::kCpu ? text(device.type)
                                           : text(device.type, ":", device.index);
  }

  template <class Reduction>
  void check_reduction(const Reduction& reduction) const {
    if (!std::isfinite(reduction.prescale) || !std::isfinite(reduction.postscale))
      fail("expected finite scale factors, got prescale ", reduction.prescale, " and postscale ",
           reduction.postscale);
    const DataType type = submission_.input.dtype;
    if (reduction.op == ReduceOp::kAdasum && !is_floating(type))
      fail("Adasum is for floating types, got ", type, "; use sum");
    if (is_bitwise(reduction.op)) check_bitwise(reduction);
    if (type != DataType::kBool) return;
    if (is_average(reduction.op))
      fail("an average of bool has no meaning; use sum (or), product (and), min or max");
    if (reduction.prescale != 1 || reduction.postscale != 1)
      fail("bool cannot be scaled; leave prescale and postscale at 1");
  }

  template <class Reduction>
  void check_bitwise(const Reduction& reduction) const {
    const std::string op(to_string(reduction.op));
    const DataType type = submission_.input.dtype;
    if (is_floating(type)) fail(op, " is for integers and bool, got ", type);
    if (reduction.prescale != 1 || reduction.postscale != 1)
      fail(op + " has no factors; leave prescale and postscale at 1");
  }

  void check_compression(Compression compression) const {
    const DataType type = submission_.input.dtype;
    if (compression == Compression::kNone || type == DataType::kFloat32) return;
    fail("compression (", compression, ") is for float32, got ", type,
         "; submit it without compression");
  }

  void check_shape() const {
    const TensorView& input = submission_.input;
    if (input.shape.size() > wire::kMaxDims)
      fail("expected at most ", wire::kMaxDims, " dimensions");
    std::int64_t elements = 1;
    auto without_zeros = static_cast<std::int64_t>(
        size_of(input.dtype));  // the bytes that a rank with at least one row would have
    for (const auto size : input.shape) {
      const bool fits =
          size >= 0 && !__builtin_mul_overflow(elements, size, &elements) &&
          !__builtin_mul_overflow(without_zeros, std::max<std::int64_t>(size, 1), &without_zeros);
      if (!fits) fail("bad shape " + shape_to_string(input.shape));
    }
    if (kind() == OpKind::kBarrier) return;
    if (elements != input.count) {
      fail("the shape ", shape_to_string(input.shape), " has ", elements, " elements, the view ",
           input.count);
    }
    const auto* const scatter = std::get_if<Scatter>(&submission_.parameters);
    const bool reads_input = scatter == nullptr || scatter->root == rank_;
    if (reads_input && input.count > 0 && input.data == nullptr && submission_.parts.empty())
      fail("the input has no memory");
    if (cuts_rows() && input.shape.empty())
      fail("a scalar has no first dimension; reshape it to [1]");
  }

  void check_splits(const std::vector<std::int64_t>& splits) const {
    const std::size_t members = sets_.ranks(submission_.process_set).size();
    if (splits.size() != members) {
      fail("expected ", members, " splits, one per member, got ", splits.size());
    }
    std::int64_t rows = 0;
    for (const auto split : splits) {
      if (split < 0 || __builtin_add_overflow(rows, split, &rows))
        fail("bad splits " + shape_to_string(splits) + "; expected none below 0");
    }
    if (rows != submission_.input.shape[0]) {
      fail("the splits ", shape_to_string(splits), " add up to ", rows, " rows, expected ",
           submission_.input.shape[0]);
    }
  }

  void check_output() const {
    if (wire::gathers(kind()) || kind() == OpKind::kAlltoall) {
      if (!submission_.allocate_output)
        fail("the size of the result is not known yet: allocate_output must be set");
      return;
    }
    std::int64_t expected = submission_.input.count;
    if (kind() == OpKind::kReducescatter && expected > 0) {
      const std::int64_t rows = submission_.input.shape[0];
      const auto members = static_cast<int>(sets_.ranks(submission_.process_set).size());
      expected = expected / rows *
                 rows_of_member(rows, members, sets_.position(submission_.process_set, rank_));
    }
    const TensorView& output = submission_.output;
    if (output.count != expected || output.dtype != submission_.input.dtype) {
      fail("the output has ", output.count, " elements of ", output.dtype, ", expected ", expected,
           " of ", submission_.input.dtype);
    }
    if (!submission_.parts.empty()) return;
    if (output.count > 0 && output.data == nullptr) fail("the output has no memory");
    check_overlap();
  }

  void check_parts() const {
    const auto* const allreduce = std::get_if<Allreduce>(&submission_.parameters);
    if (allreduce == nullptr || allreduce->op == ReduceOp::kAdasum ||
        submission_.input.device.type == DeviceType::kCpu)
      fail("only an allreduce of a GPU's tensor, and not Adasum, takes a tensor in parts");
    if (submission_.group_size != 0) fail("a tensor in parts cannot be a member of a group");
    if (submission_.input.data != nullptr || submission_.output.data != nullptr)
      fail("a tensor in parts has no memory as a whole; expected null for input and output");
    if (!parts_fit(submission_)) {
      fail("expected parts that have memory and lie one behind the other within the ",
           submission_.input.count, " elements");
    }
  }

  // Other ranks may still read the input when this rank's result arrives, so the result may
  // overwrite only rows that no other rank reads.
  void check_overlap() const {
    const TensorView& input = submission_.input;
    const TensorView& output = submission_.output;
    const std::less<const std::byte*> before;
    if (input.count == 0 || output.count == 0) return;
    if (!before(output.data, input.data + input.bytes()) ||
        !before(input.data, output.data + output.bytes()))
      return;
    if (kind() != OpKind::kReducescatter) {
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
    fail("the output overlaps the input; expected the rows of it that this rank gets, from row ",
         first, " on, or no memory in common");
  }

  void check_group() const {
    if (submission_.group_size < 0 ||
        static_cast<std::size_t>(submission_.group_size) > wire::kMaxTensors ||
        submission_.group_index < 0 ||
        (submission_.group_size > 0 && submission_.group_index >= submission_.group_size)) {
      fail("bad group: member ", submission_.group_index, " of ", submission_.group_size);
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

/// Writes the parameters of the submission's kind into the request, which has one form for all
/// kinds.
void write_parameters(wire::Request& request, const Submission& submission, int rank) {
  const auto write = [&](const auto& parameters) {
    using Parameters = std::remove_cvref_t<decltype(parameters)>;
    if constexpr (requires { parameters.prescale; }) {
      request.op = parameters.op;
      request.prescale = parameters.prescale;
      request.postscale = parameters.postscale;
    }
    if constexpr (requires { parameters.compression; })
      request.compression = parameters.compression;
    if constexpr (requires { parameters.root; }) request.root = parameters.root;
    if constexpr (requires { parameters.destination; }) request.root = parameters.destination;
    if constexpr (requires { parameters.ranks; }) request.new_set = parameters.ranks;
    if constexpr (requires { parameters.process_set; })
      request.removed_set = parameters.process_set;
    // A scatter sends the root's rows only; in an alltoall the ranks may have different numbers.
    if constexpr (std::is_same_v<Parameters, Scatter>) {
      if (parameters.root != rank) request.shape[0] = 0;
    } else if constexpr (std::is_same_v<Parameters, Alltoall>) {
      request.shape[0] = 0;
    }
  };
  std::visit(write, submission.parameters);
}

/// Makes the request an operation of the members if they make or remove the set alone.
void choose_process_set(wire::Request& request, const Submission& submission,
                        const control::ProcessSetTable& sets) {
  if (const auto* const add = std::get_if<AddProcessSet>(&submission.parameters)) {
    if (!add->by_members) return;
    request.process_set = wire::kOwnMembers;
    request.name = control::name_by_members(submission.name, add->ranks);
    request.unnamed = false;
  } else if (request.kind == OpKind::kRemoveProcessSet && sets.by_members(request.removed_set)) {
    request.process_set = request.removed_set;
  }
}

bool in_unnamed_group(const Submission& submission) noexcept {
  return submission.group_size > 0 && submission.name.empty();
}

std::string member_text(const Submission& submission) {
  return text(submission.kind(), " in process set ", submission.process_set);
}

/// Throws for an unnamed group: the last of `members` does not belong to it, or members are
/// missing.
[[noreturn]] void refuse_unnamed_group(std::span<const Submission> members, int rank) {
  const Submission& first = members.front();
  const Submission& last = members.back();
  const std::string group = text("rank ", rank, ": an unnamed group of ", first.group_size,
                                 " begins with ", member_text(first));
  if (in_unnamed_group(last) &&
      (last.kind() != first.kind() || last.process_set != first.process_set)) {
    throw UsageError(group + ", and has " + member_text(last) +
                     "; its members are of one kind and process set, so give the group and its "
                     "members names");
  }
  throw UsageError(text(group, " and is not complete; submit its members, 0 to ",
                        first.group_size - 1, ", in one call and in order"));
}

}  // namespace

void check_unnamed_groups(std::span<const Submission> submissions, int rank) {
  for (std::size_t first = 0; first < submissions.size(); ++first) {
    if (!in_unnamed_group(submissions[first])) continue;
    const Submission& begin = submissions[first];
    const auto size = static_cast<std::size_t>(begin.group_size);
    for (std::size_t i = 0; i < size; ++i) {
      const std::size_t next = std::min(first + i, submissions.size() - 1);
      const Submission& member = submissions[next];
      const bool belongs =
          next == first + i && in_unnamed_group(member) && member.group_size == begin.group_size &&
          member.group_index == static_cast<int>(i) && member.kind() == begin.kind() &&
          member.process_set == begin.process_set && member.in_sequence == begin.in_sequence;
      if (!belongs) refuse_unnamed_group(submissions.subspan(first, next - first + 1), rank);
    }
    first += size - 1;
  }
}

void check_message(const Message& message, const std::string& title,
                   const control::ProcessSetTable& sets, int rank, std::optional<int> gpu) {
  const std::string subject = text(title, " on rank ", rank, ": ");
  const auto fail = [&](const auto&... problem) { throw UsageError(text(subject, problem...)); };
  if (message.name.size() > wire::kMaxNameBytes)
    fail("expected a name of at most ", wire::kMaxNameBytes, " bytes");
  if (!sets.contains(message.process_set))
    fail("there is no process set ", message.process_set, "; was it removed?");
  if (sets.position(message.process_set, rank) < 0) fail("this rank is not in the process set");
  const bool any = message.direction == Direction::kReceive && message.peer == kAnySource;
  if (!any && sets.position(message.process_set, message.peer) < 0)
    fail("expected a world rank of the process set, got ", message.peer);
  if (any && sets.ranks(message.process_set).size() == 1) fail("the process set has no other rank");
  if (message.peer == rank) fail("a rank sends no message to itself; copy the tensor");
  const TensorView& tensor = message.tensor;
  if (tensor.device.type != DeviceType::kCpu && !gpu)
    fail("the tensor is on ", tensor.device.type, ":", tensor.device.index,
         ", but this rank has no GPU to use (see hvd::build_info()); expected a cpu tensor");
  if (tensor.device.type != DeviceType::kCpu && tensor.device.index != *gpu)
    fail("the tensor is on ", tensor.device.type, ":", tensor.device.index,
         "; expected cuda:", *gpu,
         ", the one GPU that this rank works with: its local rank modulo the GPUs it sees, or "
         "HVD_DEVICE");
  if (tensor.count < 0) fail("the tensor has ", tensor.count, " elements");
  if (tensor.count > 0 && tensor.data == nullptr) fail("the tensor has no memory");
}

wire::Request make_request(const Submission& submission, const control::ProcessSetTable& sets,
                           int rank, std::optional<int> gpu) {
  Checker(submission, sets, rank, gpu).check();
  wire::Request request;
  request.name = submission.name;
  request.unnamed = submission.name.empty();
  request.kind = submission.kind();
  request.process_set = submission.process_set;
  request.device = submission.input.device.type;
  if (wire::only_agrees(request.kind)) {
    request.dtype = DataType::kUInt8;
    request.shape = {0};
  } else {
    request.dtype = submission.input.dtype;
    request.shape.assign(submission.input.shape.begin(), submission.input.shape.end());
  }
  write_parameters(request, submission, rank);
  choose_process_set(request, submission, sets);
  request.alone = submission.alone;
  request.group = submission.group;
  request.group_size = submission.group_size;
  request.group_index = submission.group_size > 0 ? submission.group_index : 0;
  request.in_sequence = request.unnamed && submission.in_sequence;
  // All ranks must agree that the tensor passes through a buffer, see Batch::in_parts(). The
  // request marks this by a group of one, which ranks compare and which has no other meaning.
  if (!submission.parts.empty()) {
    request.group = submission.name;
    request.group_size = 1;
  }
  return request;
}

}  // namespace hvd::runtime
