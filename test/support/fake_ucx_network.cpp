#include "support/fake_ucx_network.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <span>
#include <string>

#include "hvd/error.h"

namespace hvd::testing {
namespace {

constexpr ucx::Status kReset = -25;

}  // namespace

FakeUcxNetwork::FakeUcxNetwork(const FakeUcxOptions& options, const Clock& clock)
    : options_(options),
      clock_(clock),
      random_(options.seed),
      stations_(static_cast<std::size_t>(options.size) * ucx::kSides) {}

std::shared_ptr<FakeUcxNetwork> FakeUcxNetwork::create(const FakeUcxOptions& options,
                                                       const Clock& clock) {
  return std::shared_ptr<FakeUcxNetwork>(new FakeUcxNetwork(options, clock));
}

FakeUcxNetwork::Way& FakeUcxNetwork::way_between(int from, int to) {
  const auto [found, made] = ways_.try_emplace({from, to});
  if (made && random_() % 8 == 0) found->second.slowness = 10;
  return found->second;
}

void FakeUcxNetwork::put(int to, Packet packet) {
  Way& way = way_between(packet.from, to);
  const auto longest = static_cast<std::uint64_t>(options_.longest_delay.count());
  const Duration delay(longest == 0 ? 0 : random_() % longest * way.slowness);
  way.last = std::max(way.last, clock_.now() + delay);
  stations_[static_cast<std::size_t>(to)].coming.emplace(way.last, std::move(packet));
}

/// Breaks both directions between two workers, and both workers detect it. @param loses whether
/// messages under way are lost
void FakeUcxNetwork::break_ways(int one, int other, bool loses) {
  for (const auto& way_of : {std::pair(one, other), std::pair(other, one)}) {
    const int from = way_of.first;
    const int to = way_of.second;
    Way& way = way_between(from, to);
    if (std::exchange(way.broken, true)) continue;
    auto& coming = stations_[static_cast<std::size_t>(to)].coming;
    if (loses)
      std::erase_if(coming, [from](const auto& packet) { return packet.second.from == from; });
    put(to, {.kind = Packet::Kind::kBroken, .from = from});
  }
}

void FakeUcxNetwork::connect(int from, int to) {
  const std::lock_guard lock(mutex_);
  ++connected_;
  static_cast<void>(way_between(from, to));
  static_cast<void>(way_between(to, from));
  if (stations_[static_cast<std::size_t>(to)].ended) break_ways(from, to, true);
}

void FakeUcxNetwork::deliver(int to, Packet packet) {
  const std::lock_guard lock(mutex_);
  if (stations_[static_cast<std::size_t>(packet.from)].ended) return;
  if (!way_between(packet.from, to).broken) put(to, std::move(packet));
}

bool FakeUcxNetwork::collect(int worker, std::vector<Packet>& come) {
  const std::lock_guard lock(mutex_);
  Station& station = stations_[static_cast<std::size_t>(worker)];
  if (station.ended) return false;
  const TimePoint now = clock_.now();
  while (!station.coming.empty() && station.coming.begin()->first <= now) {
    come.push_back(std::move(station.coming.begin()->second));
    station.coming.erase(station.coming.begin());
  }
  return true;
}

void FakeUcxNetwork::end_worker(int worker) {
  const std::lock_guard lock(mutex_);
  Station& station = stations_[static_cast<std::size_t>(worker)];
  if (std::exchange(station.ended, true)) return;
  std::vector<int> others;
  for (const auto& [ends, way] : ways_)
    if (ends.first == worker) others.push_back(ends.second);
  for (const int other : others) break_ways(worker, other, false);
  station.coming.clear();
}

void FakeUcxNetwork::end(int rank) {
  for (std::size_t side = 0; side < ucx::kSides; ++side)
    end_worker(worker_of(rank, static_cast<ucx::Side>(side)));
}

void FakeUcxNetwork::kill(int rank) {
  {
    const std::lock_guard lock(mutex_);
    const bool loses = random_() % 2 == 0;
    for (std::size_t to = 0; loses && to < stations_.size(); ++to) {
      std::erase_if(stations_[to].coming, [rank](const auto& one) {
        return rank_of(one.second.from) == rank && one.second.kind != Packet::Kind::kBroken;
      });
    }
  }
  end(rank);
}

void FakeUcxNetwork::cut(int rank, int peer) {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<int, int>> between;
  for (const auto& [ends, way] : ways_)
    if (rank_of(ends.first) == rank && rank_of(ends.second) == peer) between.push_back(ends);
  for (const auto& [one, other] : between) break_ways(one, other, true);
}

int FakeUcxNetwork::connected() const {
  const std::lock_guard lock(mutex_);
  return connected_;
}

std::uint64_t FakeUcxNetwork::draw(std::uint64_t below) {
  const std::lock_guard lock(mutex_);
  return random_() % below;
}

class FakeUcxWorker final : public ucx::Worker {
 public:
  FakeUcxWorker(std::shared_ptr<FakeUcxNetwork> network, int number)
      : network_(std::move(network)), number_(number) {}
  ~FakeUcxWorker() override { network_->end_worker(number_); }

  std::vector<std::byte> address() override {
    const auto* const first = reinterpret_cast<const std::byte*>(&number_);
    return {first, first + sizeof number_};
  }
  ucx::Status connect(std::span<const std::byte> address, ucx::Status* failure,
                      ucx::Endpoint& made) override {
    int to = 0;
    std::memcpy(&to, address.data(), sizeof to);
    network_->connect(number_, to);
    ends_.push_back({.to = to, .failure = failure});
    made = {&ends_.back()};
    return ucx::kOk;
  }
  /// In flush mode, sends the messages that wait for room.
  ucx::StartResult close(ucx::Endpoint endpoint, ucx::CloseMode mode) override {
    of(endpoint).open = false;
    if (mode == ucx::CloseMode::kFlush) let_out(outbox_.size());
    return {};
  }

  ucx::StartResult send(ucx::Endpoint endpoint, std::span<const std::byte> bytes,
                        message::Tag tag) override;
  ucx::StartResult receive(std::span<std::byte> room, message::Tag tag) override;
  ucx::StartResult receive(std::span<std::byte> room, void* message) override;
  std::optional<ucx::Matched> probe(message::Tag tag, message::Tag mask) override;

  ucx::Status status_of_send(void* request) override { return of(request).status; }
  ucx::Status status_of_receive(void* request, std::size_t& bytes) override {
    if (of(request).status == ucx::kOk) bytes = of(request).size;
    return of(request).status;
  }
  void cancel_receive(void* request) noexcept override {
    if (std::erase(posted_, &of(request)) > 0) of(request).status = ucx::kCancelled;
  }
  void free(void* request) noexcept override {
    of(request).freed = true;
    std::erase_if(requests_,
                  [](const Request& one) { return one.freed && one.status != ucx::kInProgress; });
  }
  bool progress() override;
  std::string describe(ucx::Status status) const override {
    return "simulated trouble " + std::to_string(-status);
  }

 private:
  using Packet = FakeUcxNetwork::Packet;
  struct End {
    int to = 0;
    ucx::Status* failure = nullptr;
    bool open = true;
  };
  struct Request {
    ucx::Status status = ucx::kInProgress;
    int peer = -1;  ///< the worker, once it is known
    message::Tag tag = 0;
    std::span<const std::byte> bytes = {};  ///< to be sent
    std::span<std::byte> room = {};
    std::size_t size = 0;
    std::uint64_t id = 0;
    bool freed = false;
  };
  /// Messages that have left the caller's memory and wait for room.
  struct Held {
    int to = 0;
    Packet packet = {};
    Request* request = nullptr;  ///< complete once the packet is delivered
  };

  static End& of(ucx::Endpoint endpoint) {
    auto& end = *static_cast<End*>(endpoint.handle);
    if (!end.open) throw Error("simulated UCX: a call with a closed endpoint");
    return end;
  }
  static Request& of(void* handle) {
    auto& request = *static_cast<Request*>(handle);
    if (request.freed) throw Error("simulated UCX: a request is used after it was freed");
    return request;
  }
  Request& begin(Request request) {
    requests_.push_back(request);
    return requests_.back();
  }
  void send_packet(int to, Packet packet, Request* request = nullptr) {
    packet.from = number_;
    outbox_.push_back({to, std::move(packet), request});
  }
  bool let_out(std::size_t count);
  void accept(Packet&);
  void match(Packet&);
  void fill(Request&, Packet&);
  void give(Request&, std::span<const std::byte>);
  void break_with(int peer);

  const std::shared_ptr<FakeUcxNetwork> network_;
  const int number_;
  std::deque<End> ends_;  // its elements keep their addresses
  std::list<Request> requests_;
  std::deque<Request*> posted_;
  std::list<Packet> unexpected_;
  std::list<Packet> matched_;  // by probe()
  std::deque<Held> outbox_;
  std::vector<Packet> arrived_;
  std::uint64_t next_id_ = 1;
};

ucx::StartResult FakeUcxWorker::send(ucx::Endpoint endpoint, std::span<const std::byte> bytes,
                                     message::Tag tag) {
  const End& end = of(endpoint);
  if (*end.failure != ucx::kOk) return {nullptr, *end.failure};
  Packet packet{.kind = Packet::Kind::kWhole, .tag = tag, .size = bytes.size()};
  if (bytes.size() > network_->options_.eager_bytes) {
    Request& request = begin({.peer = end.to, .bytes = bytes, .id = next_id_++});
    packet.kind = Packet::Kind::kAnnounce;
    packet.id = request.id;
    send_packet(end.to, std::move(packet));
    return {&request, ucx::kInProgress};
  }
  packet.bytes.assign(bytes.begin(), bytes.end());
  if (network_->draw(2) == 0) {
    send_packet(end.to, std::move(packet));
    if (network_->draw(network_->options_.holds_one_of) != 0) let_out(outbox_.size());
    return {};
  }
  Request& request = begin({.peer = end.to});
  send_packet(end.to, std::move(packet), &request);
  return {&request, ucx::kInProgress};
}

ucx::StartResult FakeUcxWorker::receive(std::span<std::byte> room, message::Tag tag) {
  Request& request = begin({.tag = tag, .room = room});
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(),
                                  [tag](const Packet& packet) { return packet.tag == tag; });
  if (found == unexpected_.end()) {
    posted_.push_back(&request);
  } else {
    fill(request, *found);
    unexpected_.erase(found);
  }
  return {&request, ucx::kInProgress};
}

ucx::StartResult FakeUcxWorker::receive(std::span<std::byte> room, void* message) {
  const auto found = std::find_if(matched_.begin(), matched_.end(),
                                  [message](const Packet& packet) { return &packet == message; });
  if (found == matched_.end()) throw Error("simulated UCX: an arrival was received twice");
  Request& request = begin({.tag = found->tag, .room = room});
  fill(request, *found);
  matched_.erase(found);
  return {&request, ucx::kInProgress};
}

std::optional<ucx::Matched> FakeUcxWorker::probe(message::Tag tag, message::Tag mask) {
  const auto found =
      std::find_if(unexpected_.begin(), unexpected_.end(),
                   [=](const Packet& packet) { return (packet.tag & mask) == (tag & mask); });
  if (found == unexpected_.end()) return std::nullopt;
  matched_.splice(matched_.end(), unexpected_, found);
  return ucx::Matched{&matched_.back(), matched_.back().tag, matched_.back().size};
}

bool FakeUcxWorker::progress() {
  bool moved = let_out(network_->draw(4));
  if (!network_->collect(number_, arrived_)) return false;
  moved = moved || !arrived_.empty();
  for (Packet& packet : arrived_) accept(packet);
  arrived_.clear();
  return moved;
}

bool FakeUcxWorker::let_out(std::size_t count) {
  const std::size_t leaving = std::min(count, outbox_.size());
  for (std::size_t i = 0; i < leaving; ++i) {
    Held held = std::move(outbox_.front());
    outbox_.pop_front();
    network_->deliver(held.to, std::move(held.packet));
    if (held.request != nullptr) held.request->status = ucx::kOk;
  }
  return leaving > 0;
}

void FakeUcxWorker::accept(Packet& packet) {
  switch (packet.kind) {
    case Packet::Kind::kWhole:
    case Packet::Kind::kAnnounce:
      return match(packet);
    case Packet::Kind::kGoOn:
    case Packet::Kind::kData: {
      const bool goes_on = packet.kind == Packet::Kind::kGoOn;
      const auto found = std::find_if(requests_.begin(), requests_.end(), [&](const Request& one) {
        return one.status == ucx::kInProgress && one.id == packet.id && one.peer == packet.from &&
               one.bytes.empty() != goes_on;
      });
      if (found == requests_.end()) return;
      if (!goes_on) return give(*found, packet.bytes);
      send_packet(packet.from,
                  {.kind = Packet::Kind::kData,
                   .id = packet.id,
                   .bytes = {found->bytes.begin(), found->bytes.end()}},
                  &*found);
      return;
    }
    case Packet::Kind::kBroken:
      return break_with(packet.from);
  }
}

void FakeUcxWorker::match(Packet& packet) {
  const auto found = std::find_if(posted_.begin(), posted_.end(),
                                  [&](const Request* one) { return one->tag == packet.tag; });
  if (found == posted_.end()) {
    unexpected_.push_back(std::move(packet));
    return;
  }
  Request& request = **found;
  posted_.erase(found);
  fill(request, packet);
}

void FakeUcxWorker::fill(Request& request, Packet& packet) {
  request.peer = packet.from;
  if (packet.kind == Packet::Kind::kWhole) return give(request, packet.bytes);
  request.id = packet.id;
  send_packet(packet.from, {.kind = Packet::Kind::kGoOn, .id = packet.id});
}

void FakeUcxWorker::give(Request& request, std::span<const std::byte> bytes) {
  request.size = bytes.size();
  request.status = bytes.size() > request.room.size() ? ucx::kTruncated : ucx::kOk;
  if (request.status == ucx::kOk && !bytes.empty())
    std::memcpy(request.room.data(), bytes.data(), bytes.size());
}

void FakeUcxWorker::break_with(int peer) {
  for (const End& end : ends_)
    if (end.to == peer && end.open && *end.failure == ucx::kOk) *end.failure = kReset;
  for (Request& request : requests_)
    if (request.peer == peer && request.status == ucx::kInProgress) request.status = kReset;
  std::erase_if(outbox_, [peer](const Held& held) { return held.to == peer; });
}

ucx::Workers FakeUcxNetwork::workers(int rank) {
  ucx::Workers workers;
  for (std::size_t side = 0; side < ucx::kSides; ++side) {
    workers.of[side] = std::make_unique<FakeUcxWorker>(
        shared_from_this(), worker_of(rank, static_cast<ucx::Side>(side)));
  }
  workers.only_workers_touch_memory = true;
  return workers;
}

}  // namespace hvd::testing
