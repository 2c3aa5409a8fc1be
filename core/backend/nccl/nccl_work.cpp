#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "backend/nccl/nccl_channel.h"
#include "backend/sizes.h"
#include "base/text.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd::nccl {
namespace {

bool all_equal(std::span<const std::int64_t> counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

class NcclWork final : public Work {
 public:
  NcclWork(NcclChannel& channel, const Collective& collective, std::span<const std::byte> in,
           std::span<std::byte> out)
      : channel_(channel), collective_(collective), in_(in), out_(out) {
    check_arguments("nccl", collective, channel_.rank(), channel_.size(), in, out);
    channel_.device().wait(channel_.stream(), collective_.input_ready);
    collective_.input_ready = nullptr;
    if (is_empty(collective_)) return;
    choose_form();
    begin();
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  ~NcclWork() override = default;

  bool progress() override {
    const device::DeviceGuard guard(channel_.device().api(), channel_.device().device());
    if (!is_empty(collective_) && !(begin() && channel_.settled())) return false;
    if (scales_output()) run_scale(out_.data(), out_, after_);
    ready_ = channel_.device().events()->record(channel_.stream());
    scaled_.release(ready_);
    return true;
  }

  EventPtr output_ready() const override { return ready_; }
  /// A call of NCCL that does not return makes no progress, which the engine limits.
  std::optional<ProgressCount> progress_count() const noexcept override {
    return begun_ ? std::optional(ProgressCount{}) : std::nullopt;
  }

 private:
  bool reduces() const {
    return collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kReducescatter;
  }
  bool scales_output() const { return reduces() && after_ != 1.0 && !out_.empty(); }

  void choose_form() {
    const DataType type = collective_.dtype;
    type_ = type;
    if (type == DataType::kBool) type_ = DataType::kUInt8;
    if (type == DataType::kInt16) {
      type_ = DataType::kInt8;
      per_element_ = 2;
    }
    if (!reduces()) return;
    const ReduceScale& scale = collective_.scale;
    if (type == DataType::kInt16 || (!is_floating(type) && !scale.identity())) {
      throw Error(
          text("nccl: cannot reduce ", to_string(type), scale.identity() ? "" : " with a factor"));
    }
    if (is_bitwise(collective_.op) && type != DataType::kBool)
      throw Error(text("nccl: cannot combine bits of ", to_string(type)));
    switch (collective_.op) {
      // Bools are 0 or 1, so "or" is their maximum and "and" their minimum.
      case ReduceOp::kSum:
        reduction_ = type == DataType::kBool ? Reduction::kMax : Reduction::kSum;
        break;
      case ReduceOp::kProduct:
        reduction_ = type == DataType::kBool ? Reduction::kMin : Reduction::kProduct;
        break;
      case ReduceOp::kMin:
      case ReduceOp::kBitAnd:
        reduction_ = Reduction::kMin;
        break;
      case ReduceOp::kMax:
      case ReduceOp::kBitOr:
        reduction_ = Reduction::kMax;
        break;
      default:
        throw Error(text("nccl: this backend has no ", to_string(collective_.op)));
    }
    choose_factors();
  }

  // NCCL's average is used where it is exact, because it needs no extra kernel and keeps fp16 from
  // overflowing. For 16-bit types NCCL rounds the factor 1/N to the type. In bf16 with N = 3 or 6
  // the result is off by 0.2 %, always in the same direction. Therefore 16-bit types are divided in
  // fp32 before the sum, unless N is a power of two.
  void choose_factors() {
    const ReduceScale& scale = collective_.scale;
    const auto divisor = static_cast<double>(scale.divisor);
    const bool narrow = is_floating(collective_.dtype) && size_of(collective_.dtype) == 2;
    const bool exact = !narrow || std::has_single_bit(static_cast<std::uint64_t>(scale.divisor));
    const bool averages = collective_.op == ReduceOp::kSum && scale.divisor == channel_.size() &&
                          scale.divisor > 1 && exact;
    if (averages) reduction_ = Reduction::kAverage;
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
  /// Leaves the caller's input unchanged.
  void scale_input() {
    std::span<std::byte> to = out_;
    if (collective_.kind == OpKind::kReducescatter) {
      scaled_ = channel_.buffers().lease(in_.size(), channel_.stream());
      to = scaled_.bytes();
    }
    run_scale(in_.data(), to, before_);
    in_ = to;
  }

  /// Returns false while memory for the scaled input is being allocated. The engine launches no
  /// later Work in the meantime.
  bool begin() {
    if (begun_) return true;
    const std::size_t bytes = in_.size();
    const bool copies = scales_input() && collective_.kind == OpKind::kReducescatter;
    if (copies && !channel_.buffers().prepare({&bytes, 1})) return false;
    if (scales_input()) scale_input();
    start();
    return begun_ = true;
  }

  void start() {
    const std::span<const std::int64_t> counts = collective_.counts;
    switch (collective_.kind) {
      case OpKind::kAllreduce:
        return call(Call::Kind::kAllReduce, in_.data(), out_.data(), collective_.count);
      case OpKind::kBroadcast:
        return broadcast(out_.data(), collective_.count, collective_.root);
      case OpKind::kAllgather:
        if (!all_equal(counts)) break;
        return call(Call::Kind::kAllGather, in_.data(), out_.data(), counts[0]);
      case OpKind::kReducescatter:
        if (!all_equal(counts)) break;
        return call(Call::Kind::kReduceScatter, in_.data(), out_.data(), counts[0]);
      default:
        break;
    }
    launch_as_group(channel_.library(), [this] { call_for_each_rank(); });
  }

  /// Handles blocks of different sizes: an allgather is one broadcast per block, a reducescatter
  /// one reduction per block, and an alltoall a send and a receive per rank.
  void call_for_each_rank() {
    const std::byte* from = in_.data();
    std::byte* to = out_.data();
    const auto bytes_of = [this](std::int64_t elements) {
      return static_cast<std::size_t>(elements) * size_of(collective_.dtype);
    };
    for (int rank = 0; rank < channel_.size(); ++rank) {
      const std::int64_t count = collective_.counts[static_cast<std::size_t>(rank)];
      if (collective_.kind == OpKind::kAllgather) {
        broadcast(to, count, rank);
        to += bytes_of(count);
      } else if (collective_.kind == OpKind::kReducescatter) {
        call(Call::Kind::kReduce, from, out_.data(), count, rank);
        from += bytes_of(count);
      } else {
        const std::int64_t sent = collective_.send_counts[static_cast<std::size_t>(rank)];
        call(Call::Kind::kSend, from, nullptr, sent, rank);
        call(Call::Kind::kReceive, nullptr, to, count, rank);
        from += bytes_of(sent);
        to += bytes_of(count);
      }
    }
  }

  void broadcast(std::byte* to, std::int64_t elements, int root) {
    call(Call::Kind::kBroadcast, root == channel_.rank() ? in_.data() : to, to, elements, root);
  }

  void call(Call::Kind kind, const std::byte* in, std::byte* out, std::int64_t elements,
            int peer = -1) {
    if (elements == 0) return;
    const auto count = static_cast<std::size_t>(elements * per_element_);
    channel_.library().launch({kind, in, out, count, type_, reduction_, peer}, channel_.comm(),
                              channel_.stream());
  }

  NcclChannel& channel_;
  Collective collective_;
  std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  // The representation of the collective in NCCL.
  DataType type_ = DataType::kFloat32;
  std::int64_t per_element_ = 1;  // elements of that type per element of the tensor
  Reduction reduction_ = Reduction::kSum;
  double before_ = 1.0;  // factor of the input
  double after_ = 1.0;   // factor of the result
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
