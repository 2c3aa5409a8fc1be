#include "support/local_network.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"

namespace hvd::testing {

/// One rank's end of a LocalNetwork.
class LocalControlPlane final : public control::ControlPlane {
 public:
  LocalControlPlane(std::shared_ptr<LocalNetwork> network, int rank)
      : network_(std::move(network)),
        topology_(make_topology(rank, network_->options_.host_per_rank)) {}

  int rank() const noexcept override { return topology_.rank; }
  int size() const noexcept override { return topology_.size; }
  const Topology& topology() const noexcept override { return topology_; }
  void ring(int world_rank) noexcept override { mailbox(world_rank).doorbell.ring(); }

  void send(int to, std::span<const std::byte> message) override {
    network_->deliver(rank(), to, message);
  }
  void send(std::span<const int> ranks, std::span<const std::byte> message) override {
    for (const int to : ranks) network_->deliver(rank(), to, message);
  }

  std::optional<control::Message> poll() override {
    LocalNetwork::Mailbox& own = mailbox(rank());
    const MutexLock lock(own.mutex);
    if (own.queue.empty()) return std::nullopt;
    // Messages of different senders overtake one another; those of one sender are in order because
    // their arrival times are.
    const auto first =
        std::min_element(own.queue.begin(), own.queue.end(),
                         [](const auto& a, const auto& b) { return a.arrives < b.arrives; });
    if (first->arrives > network_->clock_.now()) return std::nullopt;
    control::Message message = std::move(first->message);
    own.queue.erase(first);
    return message;
  }

  bool busy() const noexcept override {
    LocalNetwork::Mailbox& own = mailbox(rank());
    const MutexLock lock(own.mutex);
    return !own.queue.empty();  // a delayed message rings no doorbell when it arrives
  }
  bool rung_by_all() const noexcept override {
    return network_->options_.rings_across_hosts || topology_.host_names.size() == 1;
  }
  bool quiet() const noexcept override { return !busy(); }
  std::string shared_memory_prefix(int rank) const override {
    const std::vector<std::string>& prefixes = network_->options_.shared_memory_prefixes;
    const bool shared = !prefixes.empty() && topology_.same_host(rank, topology_.rank);
    return shared ? prefixes[static_cast<std::size_t>(topology_.rank)] : std::string();
  }
  Doorbell& doorbell() noexcept override { return mailbox(rank()).doorbell; }

  ArrivalFlags* arrival_flags(int rank, int flag) noexcept override {
    return topology_.same_host(rank, topology_.rank)
               ? &mailbox(rank).arrival_flags[static_cast<std::size_t>(flag)]
               : nullptr;
  }
  ArrivalFlags* remote_arrival_flags() noexcept override {
    return topology_.host_names.size() > 1
               ? &mailbox(topology_.first_rank_on(topology_.host_index())).remote
               : nullptr;
  }

  void heartbeat(TimePoint now) noexcept override {
    mailbox(rank()).heartbeat.store(now.count(), std::memory_order_relaxed);
  }

  std::optional<control::PeerLoss> check_peers(TimePoint now, Duration timeout) override {
    for (int peer = 0; peer < size(); ++peer) {
      const LocalNetwork::Mailbox& other = mailbox(peer);
      if (peer == rank() || other.left.load()) continue;
      if (other.dead.load()) return control::PeerLoss{peer, "it was killed"};
      const TimePoint heartbeat{other.heartbeat.load(std::memory_order_relaxed)};
      if (heartbeat.count() != 0 && now - heartbeat > timeout)
        return control::PeerLoss{peer, "no sign of life"};
    }
    return std::nullopt;
  }

  std::vector<Departure> departures() override {
    std::vector<Departure> found;
    for (int peer = 0; peer < size(); ++peer) {
      const LocalNetwork::Mailbox& other = mailbox(peer);
      if (peer != rank() && other.left.load()) found.push_back({peer, other.dead.load()});
    }
    return found;
  }

  std::optional<control::PeerLoss> find_loss_behind_error(Duration /*timeout*/) override {
    return check_peers({}, Duration::max());
  }

  void report_loss(int, std::string_view) noexcept override {
  }  // the ranks of one process do not end one by one
  void farewell() noexcept override { mailbox(rank()).left.store(true); }

 private:
  LocalNetwork::Mailbox& mailbox(int rank) const noexcept {
    return *network_->mailboxes_[static_cast<std::size_t>(rank)];
  }

  std::shared_ptr<LocalNetwork> network_;
  Topology topology_;
};

std::shared_ptr<LocalNetwork> LocalNetwork::create(NetworkOptions options, const Clock& clock) {
  if (options.host_per_rank.empty())
    options.host_per_rank.assign(static_cast<std::size_t>(options.size), "localhost");
  return std::shared_ptr<LocalNetwork>(new LocalNetwork(std::move(options), clock));
}

LocalNetwork::LocalNetwork(NetworkOptions options, const Clock& clock)
    : options_(std::move(options)), clock_(clock) {
  for (int rank = 0; rank < options_.size; ++rank) {
    auto mailbox = std::make_unique<Mailbox>();
    mailbox->last_from.resize(static_cast<std::size_t>(options_.size));
    mailbox->random.seed(options_.seed * 1000003 + static_cast<std::uint64_t>(rank));
    mailboxes_.push_back(std::move(mailbox));
  }
}

LocalNetwork::~LocalNetwork() = default;

std::unique_ptr<control::ControlPlane> LocalNetwork::plane(int rank) {
  return std::make_unique<LocalControlPlane>(shared_from_this(), rank);
}

void LocalNetwork::kill(int rank) {
  mailboxes_[static_cast<std::size_t>(rank)]->dead.store(true);
  for (const auto& mailbox : mailboxes_) {
    const MutexLock lock(mailbox->mutex);
    std::erase_if(mailbox->queue, [rank](const Envelope& e) { return e.message.source == rank; });
  }
}

void LocalNetwork::corrupt_next_message_to(int rank) {
  Mailbox& mailbox = *mailboxes_[static_cast<std::size_t>(rank)];
  const MutexLock lock(mailbox.mutex);
  mailbox.corrupt_next = true;
}

void LocalNetwork::refuse_next_message_to(int rank) {
  Mailbox& mailbox = *mailboxes_[static_cast<std::size_t>(rank)];
  const MutexLock lock(mailbox.mutex);
  mailbox.refuse_next = true;
}

void LocalNetwork::deliver(int from, int to, std::span<const std::byte> bytes) {
  if (mailboxes_[static_cast<std::size_t>(from)]->dead.load()) return;
  Mailbox& mailbox = *mailboxes_[static_cast<std::size_t>(to)];
  {
    const MutexLock lock(mailbox.mutex);
    if (std::exchange(mailbox.refuse_next, false)) throw Error("the message was refused");
    Envelope envelope{{from, {bytes.begin(), bytes.end()}}, clock_.now()};
    if (options_.longest_delay > Duration::zero()) {
      envelope.arrives += Duration(static_cast<Duration::rep>(
          mailbox.random() % static_cast<std::uint64_t>(options_.longest_delay.count() + 1)));
    }
    TimePoint& last = mailbox.last_from[static_cast<std::size_t>(from)];
    // Strictly later than its predecessor, so that equal times cannot reorder a pair's messages.
    last = envelope.arrives = std::max(envelope.arrives, last + Duration(1));
    if (std::exchange(mailbox.corrupt_next, false)) envelope.message.bytes[0] ^= std::byte{0xFF};
    mailbox.queue.push_back(std::move(envelope));
  }
  const auto host = [this](int rank) {
    return options_.host_per_rank[static_cast<std::size_t>(rank)];
  };
  if (options_.rings_across_hosts || host(from) == host(to)) mailbox.doorbell.ring();
}

}  // namespace hvd::testing
