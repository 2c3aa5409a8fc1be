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

/// Makes the calls between its construction and end() one launch. Ends the group if one of them
/// throws.
class Group {
 public:
  explicit Group(Library& library) : library_(library) { library_.begin_group(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (!open_) return;
    try {
      library_.end_group();
    } catch (const Error&) {  // the exception that destroys this object is reported
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

/// The representation of a collective in NCCL.
struct NcclForm {
  DataType type;
  std::int64_t per_element = 1;  ///< elements of NCCL's type per element of the tensor
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
    if (is_empty()) return;
    choose_form();
    begin();
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  ~NcclWork() override = default;

  bool progress() override {
    const device::DeviceGuard guard(channel_.device().api(), channel_.device().device());
    if (!is_empty() && !(begin() && channel_.settled())) return false;
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
  bool is_empty() const { return collective_.kind != OpKind::kAlltoall && elements() == 0; }
  std::int64_t elements() const {
    const bool by_counts =
        collective_.kind == OpKind::kAllgather || collective_.kind == OpKind::kReducescatter;
    return by_counts ? total(collective_.counts) : collective_.count;
  }

  /// @param memory "input" or "output"
  void require(const char* memory, std::int64_t expected, std::size_t got) const {
    const auto bytes = static_cast<std::size_t>(expected) * size_of(collective_.dtype);
    if (expected >= 0 && bytes == got) return;
    throw Error("nccl: " + std::string(to_string(collective_.kind)) + ": expected an " + memory +
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
        throw Error("nccl: this backend does not have " + std::string(to_string(collective_.kind)));
    }
  }

  void choose_form() {
    const DataType type = collective_.dtype;
    form_.type = type;
    if (type == DataType::kBool) form_.type = DataType::kUInt8;
    if (type == DataType::kInt16) form_ = {DataType::kInt8, 2};
    if (!reduces()) return;
    const ReduceScale& scale = collective_.scale;
    if (type == DataType::kInt16 || (!is_floating(type) && !scale.identity())) {
      throw Error("nccl: cannot reduce " + std::string(to_string(type)) +
                  (scale.identity() ? "" : " with a factor"));
    }
    if (is_bitwise(collective_.op) && type != DataType::kBool)
      throw Error("nccl: cannot combine bits of " + std::string(to_string(type)));
    switch (collective_.op) {
      // Bools are 0 or 1, so "or" is their maximum and "and" their minimum.
      case ReduceOp::kSum:
        form_.reduction = type == DataType::kBool ? Reduction::kMax : Reduction::kSum;
        break;
      case ReduceOp::kProduct:
        form_.reduction = type == DataType::kBool ? Reduction::kMin : Reduction::kProduct;
        break;
      case ReduceOp::kMin:
      case ReduceOp::kBitAnd:
        form_.reduction = Reduction::kMin;
        break;
      case ReduceOp::kMax:
      case ReduceOp::kBitOr:
        form_.reduction = Reduction::kMax;
        break;
      default:
        throw Error("nccl: this backend does not have " + std::string(to_string(collective_.op)));
    }
    choose_factors();
  }

  // NCCL's average is used where it is exact, because it needs no extra kernel and keeps fp16 from
  // overflowing. For 16-bit types NCCL rounds the factor 1/N to the type. In bf16 and N = 3 or 6
  // the result is 0.2 % off, always to the same side. Therefore 16-bit types are divided in fp32
  // before the sum, unless N is a power of two.
  void choose_factors() {
    const ReduceScale& scale = collective_.scale;
    const auto divisor = static_cast<double>(scale.divisor);
    const bool narrow = is_floating(collective_.dtype) && size_of(collective_.dtype) == 2;
    const bool exact = !narrow || std::has_single_bit(static_cast<std::uint64_t>(scale.divisor));
    const bool averages = collective_.op == ReduceOp::kSum && scale.divisor == channel_.size() &&
                          scale.divisor > 1 && exact;
    if (averages) form_.reduction = Reduction::kAverage;
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

  /// Returns false while memory for the scaled input is being allocated. No later work overtakes
  /// this one meanwhile.
  bool begin() {
    if (begun_) return true;
    const std::size_t bytes = in_.size();
    const bool copies = scales_input() && collective_.kind == OpKind::kReducescatter;
    if (copies && !channel_.buffers().prepare({&bytes, 1})) return false;
    if (scales_input()) scale_input();
    start();
    return begun_ = true;
  }

  std::size_t nccl_count(std::int64_t elements) const {
    return static_cast<std::size_t>(elements * form_.per_element);
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
        return library.all_reduce(in_.data(), out_.data(), nccl_count(collective_.count),
                                  form_.type, form_.reduction, comm, stream);
      case OpKind::kBroadcast: {
        const std::byte* const source =
            collective_.root == channel_.rank() ? in_.data() : out_.data();
        return library.broadcast(source, out_.data(), nccl_count(collective_.count), form_.type,
                                 collective_.root, comm, stream);
      }
      case OpKind::kAllgather:
        if (!all_equal(collective_.counts)) return gather_ragged();
        return library.all_gather(in_.data(), out_.data(), nccl_count(collective_.counts[0]),
                                  form_.type, comm, stream);
      case OpKind::kReducescatter:
        if (!all_equal(collective_.counts)) return scatter_ragged();
        return library.reduce_scatter(in_.data(), out_.data(), nccl_count(collective_.counts[0]),
                                      form_.type, form_.reduction, comm, stream);
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
        channel_.library().broadcast(source, place, nccl_count(count), form_.type, root,
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
        channel_.library().reduce(place, out_.data(), nccl_count(count), form_.type,
                                  form_.reduction, root, channel_.comm(), channel_.stream());
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
        channel_.library().send(source, nccl_count(sent), form_.type, peer, channel_.comm(),
                                channel_.stream());
      if (received > 0)
        channel_.library().receive(place, nccl_count(received), form_.type, peer, channel_.comm(),
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
  NcclForm form_ = {DataType::kFloat32};
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
