#include <utility>
#include <vector>

#include "backend/hierarchical/host_pipeline.h"

namespace hvd::hierarchical {
namespace {

/// Broadcasts along a binomial tree of the hosts. One member of each host puts the data into the
/// result buffer and sends it on. On the root's host this member is the root.
class HostBroadcast final : public HostPipeline {
 public:
  HostBroadcast(std::shared_ptr<HostChannelState> shared, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : HostPipeline(std::move(shared), collective, in, out),
        root_host_(plan().host_of(collective.root)),
        root_(is(collective.root)) {
    rounds_ = rounds_of(out.size(), step_bytes());
    if (!is(representative(plan().host))) return;
    drives_ = true;
    // Relative hosts count from the root's host.
    const int hosts = plan().host_count();
    const int own = (plan().host - root_host_ + hosts) % hosts;
    const auto member_on = [&](int relative) {
      return representative((relative + root_host_) % hosts);
    };
    int bit = 1;
    for (; bit < hosts && (own & bit) == 0; bit <<= 1) {
    }
    if (own != 0) parent_ = member_on(own - bit);
    for (bit >>= 1; bit > 0; bit >>= 1) {
      if (own + bit < hosts) children_.push_back(member_on(own + bit));
    }
  }

 private:
  std::size_t step_bytes() noexcept { return host().tuning.buffer_bytes; }
  bool is(int member) const noexcept { return member == plan().member(plan().host, plan().index); }
  int representative(int of_host) const noexcept {
    return of_host == root_host_ ? collective_.root : plan().member(of_host, 0);
  }
  Range part(std::uint64_t round) noexcept { return round_part(out_.size(), round, step_bytes()); }
  std::size_t request_in(std::uint64_t round) const noexcept {
    return round % kResults * (1 + children_.size());
  }

  bool sent(std::uint64_t round) const noexcept override {
    for (std::size_t child = 0; child < children_.size(); ++child) {
      if (!idle(request_in(round) + 1 + child)) return false;
    }
    return true;
  }

  void send_on(std::uint64_t round) {
    for (std::size_t child = 0; child < children_.size(); ++child) {
      send(request_in(round) + 1 + child, result_buffer(round), part(round).size(),
           children_[child]);
    }
  }

  void start() override { requests().reset(kResults * (1 + children_.size())); }

  void post() override {
    if (parent_ < 0) return;
    for (; posted_ < rounds_ && result_free(posted_); ++posted_)
      receive(request_in(posted_), result_buffer(posted_), part(posted_).size(), parent_);
  }

  void fill(std::uint64_t) override {}

  bool reduce(std::uint64_t round) override {
    if (!root_) return true;
    if (!result_free(round)) return false;
    const Range all = part(round);
    copy_bytes(result_buffer(round), in_.data() + all.begin, all.size());
    send_on(round);
    return true;
  }

  bool settle(std::uint64_t round) override {
    if (root_ || !drives_) return true;
    if (posted_ <= round || !idle(request_in(round))) return false;
    send_on(round);
    return true;
  }

  void copy_out(std::uint64_t round) override {
    const Range all = part(round);
    copy_bytes(out_.data() + all.begin, root_ ? in_.data() + all.begin : result_buffer(round),
               all.size());
  }

  const int root_host_;
  const bool root_;
  bool drives_ = false;
  int parent_ = -1;
  std::vector<int> children_;
  std::uint64_t posted_ = 0;
};

}  // namespace

std::unique_ptr<Work> make_broadcast(std::shared_ptr<HostChannelState> host,
                                     const Collective& collective, std::span<const std::byte> in,
                                     std::span<std::byte> out) {
  return std::make_unique<HostBroadcast>(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
