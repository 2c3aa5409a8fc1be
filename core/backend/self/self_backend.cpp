#include "backend/self/self_backend.h"

#include <cstring>

#include "base/text.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd {
namespace {

class SelfWork final : public Work {
 public:
  SelfWork(const Collective& collective, std::int64_t count, std::span<const std::byte> in,
           std::span<std::byte> out)
      : collective_(collective), count_(count), in_(in), out_(out) {}

  bool progress() override {
    if (collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kReducescatter) {
      const std::byte* const source = in_.data();
      reduce({&source, 1}, out_.data(), count_, collective_.dtype, collective_.op,
             collective_.scale);
    } else if (count_ > 0 && in_.data() != out_.data()) {
      std::memcpy(out_.data(), in_.data(),
                  static_cast<std::size_t>(count_) * size_of(collective_.dtype));
    }
    return true;
  }

 private:
  const Collective collective_;
  const std::int64_t count_;  ///< elements of the input and of the output
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
};

class SelfChannel final : public Channel {
 public:
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    const bool has_count =
        collective.kind == OpKind::kAllreduce || collective.kind == OpKind::kBroadcast;
    if (!has_count && collective.counts.size() != 1)
      throw Error(text("self backend: ", to_string(collective.kind), ": expected 1 count, got ",
                       collective.counts.size()));
    const std::int64_t count = has_count ? collective.count : collective.counts[0];
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(collective.dtype);
    if (in.size() < bytes || out.size() < bytes)
      throw Error(text("self backend: ", to_string(collective.kind), ": expected an input and an ",
                       "output of ", bytes, " bytes, got ", in.size(), " and ", out.size()));
    return std::make_unique<SelfWork>(collective, count, in, out);
  }
  void abort() noexcept override {}
};

}  // namespace

int SelfBackend::score(const Topology&, const ChannelSpec& spec,
                       const Collective& collective) const noexcept {
  const bool moves_data = collective.kind != OpKind::kBarrier && collective.kind != OpKind::kJoin;
  return moves_data && spec.ranks.size() == 1 && spec.device.type == DeviceType::kCpu &&
                 collective.op != ReduceOp::kAdasum
             ? 1
             : 0;
}

std::unique_ptr<Channel> SelfBackend::open(const ChannelSpec&, Peers&) {
  return std::make_unique<SelfChannel>();
}

}  // namespace hvd
