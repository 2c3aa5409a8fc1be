#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "backend/nccl/nccl_channel.h"
#include "hvd/error.h"
#include "kernels/floating.h"

namespace hvd::nccl {
namespace {

std::int64_t total(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

bool all_equal(std::span<const std::int64_t> counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

/// Calls between construction and end() are one launch, also when one of them throws.
class Group {
 public:
  explicit Group(Library& library) : library_(library) { library_.begin_group(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (!open_) return;
    try {
      library_.end_group();
    } catch (const Error&) {  // the first error is on its way
    }
  }
  void end() {
    open_ = false;
    library_.end_group();
  }

 private:
  Library& library_;
  bool open_ = true;
};

/// The collective as NCCL sees it: which type, how many of it to an element of ours, which
/// reduction.
struct Wire {
  DataType type;
  std::int64_t factor = 1;
  Reduction reduction = Reduction::kSum;
};

class NcclWork final : public Work {
 public:
  NcclWork(NcclChannel& channel, const Collective& collective, std::span<const std::byte> in,
           std::span<std::byte> out)
      : channel_(channel), collective_(collective), in_(in), out_(out) {
    check_sizes(in.size());
    channel_.device().wait(channel_.stream(), collective_.input_ready);
    collective_.input_ready = nullptr;
    if (nothing_to_do()) return;
    choose();
    begin();
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  ~NcclWork() override = default;

  bool progress() override {
    const device::DeviceGuard guard(channel_.device().api(), channel_.device().device());
    if (!nothing_to_do() && !(begin() && channel_.settled())) return false;
    if (scales_output()) run_scale(out_.data(), out_, after_);
    ready_ = channel_.device().events()->record(channel_.stream());
    scaled_.release(ready_);
    return true;
  }

  EventPtr output_ready() const override { return ready_; }

 private:
  bool reduces() const {
    return collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kReducescatter;
  }
  bool scales_output() const { return reduces() && after_ != 1.0 && !out_.empty(); }
  bool nothing_to_do() const { return collective_.kind != OpKind::kAlltoall && elements() == 0; }
  std::int64_t elements() const {
    const bool by_counts =
        collective_.kind == OpKind::kAllgather || collective_.kind == OpKind::kReducescatter;
    return by_counts ? total(collective_.counts) : collective_.count;
  }

  void require(const char* what, std::int64_t expected, std::size_t got) const {
    const auto bytes = static_cast<std::size_t>(expected) * size_of(collective_.dtype);
    if (expected >= 0 && bytes == got) return;
    throw Error("nccl: " + std::string(to_string(collective_.kind)) + ": expected an " + what +
                " of " + std::to_string(bytes) + " bytes, got " + std::to_string(got));
  }

  void check_sizes(std::size_t in) const {
    const auto own = static_cast<std::size_t>(channel_.rank());
    const auto ranks = static_cast<std::size_t>(channel_.size());
    const bool by_counts =
        collective_.kind != OpKind::kAllreduce && collective_.kind != OpKind::kBroadcast;
    if (by_counts && collective_.counts.size() != ranks)
      throw Error("nccl: expected " + std::to_string(ranks) + " counts");
    switch (collective_.kind) {
      case OpKind::kAllreduce:
        require("input", collective_.count, in);
        return require("output", collective_.count, out_.size());
      case OpKind::kBroadcast:
        if (collective_.root == channel_.rank()) require("input", collective_.count, in);
        return require("output", collective_.count, out_.size());
      case OpKind::kAllgather:
        require("input", collective_.counts[own], in);
        return require("output", total(collective_.counts), out_.size());
      case OpKind::kReducescatter:
        require("input", total(collective_.counts), in);
        return require("output", collective_.counts[own], out_.size());
      case OpKind::kAlltoall:
        if (collective_.send_counts.size() != ranks)
          throw Error("nccl: expected " + std::to_string(ranks) + " counts to send");
        require("input", total(collective_.send_counts), in);
        return require("output", total(collective_.counts), out_.size());
      default:
        throw Error("nccl: this backend has no " + std::string(to_string(collective_.kind)));
    }
  }

  void choose() {
    const DataType type = collective_.dtype;
    wire_.type = type;
    if (type == DataType::kBool) wire_.type = DataType::kUInt8;
    if (type == DataType::kInt16) wire_ = {DataType::kInt8, 2};
    if (!reduces()) return;
    const ReduceScale& scale = collective_.scale;
    if (type == DataType::kInt16 || (!is_floating(type) && !scale.identity())) {
      throw Error("nccl: cannot reduce " + std::string(to_string(type)) +
                  (scale.identity() ? "" : " with a factor"));
    }
    if (is_bitwise(collective_.op) && type != DataType::kBool)
      throw Error("nccl: cannot combine bits of " + std::string(to_string(type)));
    switch (collective_.op) {
      // Bools are 0 or 1: or is their maximum, and their minimum.
      case ReduceOp::kSum:
        wire_.reduction = type == DataType::kBool ? Reduction::kMax : Reduction::kSum;
        break;
      case ReduceOp::kProduct:
        wire_.reduction = type == DataType::kBool ? Reduction::kMin : Reduction::kProduct;
        break;
      case ReduceOp::kMin:
      case ReduceOp::kBitAnd:
        wire_.reduction = Reduction::kMin;
        break;
      case ReduceOp::kMax:
      case ReduceOp::kBitOr:
        wire_.reduction = Reduction::kMax;
        break;
      default:
        throw Error("nccl: this backend has no " + std::string(to_string(collective_.op)));
    }
    choose_factors();
  }

  // An average over all ranks is NCCL's own, which needs no kernel of ours and keeps fp16 from
  // overflowing. But of 16-bit numbers it multiplies by 1/N rounded to their type, which for N = 3
  // or 6 is 0.2 % off in bf16, and every step off to the same side. So there, where 1/N is not a
  // power of two, they are divided in fp32 before they are added.
  void choose_factors() {
    const ReduceScale& scale = collective_.scale;
    const auto divisor = static_cast<double>(scale.divisor);
    const bool narrow = is_floating(collective_.dtype) && size_of(collective_.dtype) == 2;
    const bool exact = !narrow || std::has_single_bit(static_cast<std::uint64_t>(scale.divisor));
    const bool averages = collective_.op == ReduceOp::kSum && scale.divisor == channel_.size() &&
                          scale.divisor > 1 && exact;
    if (averages) wire_.reduction = Reduction::kAverage;
    const bool divides_first = narrow && !averages;
    before_ = scale.prescale / (divides_first ? divisor : 1.0);
    after_ = scale.postscale / (averages || divides_first ? 1.0 : divisor);
  }

  void run_scale(const std::byte* from, std::span<std::byte> to, double factor) {
    const std::uint64_t count = to.size() / size_of(collective_.dtype);
    const device::Piece piece{const_cast<std::byte*>(from), 0, count};  // only read
    channel_.device().copy_pieces({&piece, 1}, {collective_.dtype, collective_.dtype, true},
                                  to.data(), true, factor, channel_.stream());
  }

  bool scales_input() const { return reduces() && before_ != 1.0; }
  /// The input itself is left as it is.
  void scale_input() {
    std::span<std::byte> to = out_;
    if (collective_.kind == OpKind::kReducescatter) {
      scaled_ = channel_.buffers().lease(in_.size(), channel_.stream());
      to = scaled_.bytes();
    }
    run_scale(in_.data(), to, before_);
    in_ = to;
  }

  /// False: memory for the scaled input is being made. Nothing overtakes this work meanwhile.
  bool begin() {
    if (begun_) return true;
    const std::size_t bytes = in_.size();
    const bool copies = scales_input() && collective_.kind == OpKind::kReducescatter;
    if (copies && !channel_.buffers().prepare({&bytes, 1})) return false;
    if (scales_input()) scale_input();
    start();
    return begun_ = true;
  }

  std::size_t wire_count(std::int64_t elements) const {
    return static_cast<std::size_t>(elements * wire_.factor);
  }
  std::size_t bytes_of(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(collective_.dtype);
  }

  void start() {
    Library& library = channel_.library();
    const Comm comm = channel_.comm();
    const device::Stream stream = channel_.stream();
    switch (collective_.kind) {
      case OpKind::kAllreduce:
        return library.all_reduce(in_.data(), out_.data(), wire_count(collective_.count),
                                  wire_.type, wire_.reduction, comm, stream);
      case OpKind::kBroadcast: {
        const std::byte* const source =
            collective_.root == channel_.rank() ? in_.data() : out_.data();
        return library.broadcast(source, out_.data(), wire_count(collective_.count), wire_.type,
                                 collective_.root, comm, stream);
      }
      case OpKind::kAllgather:
        if (!all_equal(collective_.counts)) return gather_ragged();
        return library.all_gather(in_.data(), out_.data(), wire_count(collective_.counts[0]),
                                  wire_.type, comm, stream);
      case OpKind::kReducescatter:
        if (!all_equal(collective_.counts)) return scatter_ragged();
        return library.reduce_scatter(in_.data(), out_.data(), wire_count(collective_.counts[0]),
                                      wire_.type, wire_.reduction, comm, stream);
      default:
        return exchange();
    }
  }

  void gather_ragged() {
    Group group(channel_.library());
    std::byte* place = out_.data();
    for (int root = 0; root < channel_.size(); ++root) {
      const std::int64_t count = collective_.counts[static_cast<std::size_t>(root)];
      if (count > 0) {
        const std::byte* const source = root == channel_.rank() ? in_.data() : place;
        channel_.library().broadcast(source, place, wire_count(count), wire_.type, root,
                                     channel_.comm(), channel_.stream());
      }
      place += bytes_of(count);
    }
    group.end();
  }

  void scatter_ragged() {
    Group group(channel_.library());
    const std::byte* place = in_.data();
    for (int root = 0; root < channel_.size(); ++root) {
      const std::int64_t count = collective_.counts[static_cast<std::size_t>(root)];
      if (count > 0) {
        channel_.library().reduce(place, out_.data(), wire_count(count), wire_.type,
                                  wire_.reduction, root, channel_.comm(), channel_.stream());
      }
      place += bytes_of(count);
    }
    group.end();
  }

  void exchange() {
    Group group(channel_.library());
    const std::byte* source = in_.data();
    std::byte* place = out_.data();
    for (int peer = 0; peer < channel_.size(); ++peer) {
      const std::int64_t sent = collective_.send_counts[static_cast<std::size_t>(peer)];
      const std::int64_t received = collective_.counts[static_cast<std::size_t>(peer)];
      if (sent > 0)
        channel_.library().send(source, wire_count(sent), wire_.type, peer, channel_.comm(),
                                channel_.stream());
      if (received > 0)
        channel_.library().receive(place, wire_count(received), wire_.type, peer, channel_.comm(),
                                   channel_.stream());
      source += bytes_of(sent);
      place += bytes_of(received);
    }
    group.end();
  }

  NcclChannel& channel_;
  Collective collective_;
  std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  Wire wire_ = {DataType::kFloat32};
  double before_ = 1.0;  // factor of the input
  double after_ = 1.0;   // and of the result
  bool begun_ = false;
  device::BufferLease scaled_;
  EventPtr ready_;
};

}  // namespace

std::unique_ptr<Work> make_work(NcclChannel& channel, const Collective& collective,
                                std::span<const std::byte> in, std::span<std::byte> out) {
  return std::make_unique<NcclWork>(channel, collective, in, out);
}

}  // namespace hvd::nccl
