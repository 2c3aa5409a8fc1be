#include "fault/ucx_campaign_rank.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <list>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "hvd/error.h"
#include "transport/request_table.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::ucx_campaign {
namespace {

using message::Plane;
using message::RequestTable;
using message::Tag;
using Clock = std::chrono::steady_clock;
using Memory = std::vector<std::byte>;

constexpr std::size_t kSmall = 64;
constexpr std::size_t kLarge = 4 << 20;
constexpr std::byte kReleased{0xEE};
constexpr std::byte kAfterLoss{0xB1};
constexpr auto kTimeout = std::chrono::seconds(10);
constexpr std::uint32_t kGeneration = 5;

/// Thrown to end the rank with this code.
struct Ended {
  Ending ending;
};

class Rank {
 public:
  explicit Rank(const Orders&);
  int run();

 private:
  /// An outgoing message of the control plane.
  struct Parcel {
    Parcel(message::Carrier& carrier, Memory content)
        : bytes(std::move(content)), table(carrier, Plane::kControl) {
      table.reset(1);
    }
    Memory bytes;
    RequestTable table;
  };

  void exchange_until_stopped();
  void begin_step();
  void check_step();
  bool receive_order();
  void cancel_messages();
  void message_survivors();
  void send_control(int to, Memory);
  void progress_control();
  bool cancel(RequestTable&);
  std::byte value_of(int rank) const { return static_cast<std::byte>((rank * 37 + step_) & 0x7F); }
  Tag data_tag(int source) const {
    return message::make_tag({.generation = kGeneration, .source = source});
  }
  Tag control_tag(int source) const {
    return message::make_tag(
        {.generation = kGeneration, .source = source, .kind = message::kControlKind});
  }

  const Orders orders_;
  const bool transports_chosen_ = std::getenv("UCX_TLS") != nullptr;
  std::mt19937_64 random_;
  std::shared_ptr<message::Carrier> carrier_;
  std::vector<int> others_;
  std::size_t bytes_ = 0;
  int step_ = 0;
  Memory outgoing_;
  std::vector<Memory> incoming_;  ///< by place in others_
  std::unique_ptr<RequestTable> data_;
  std::list<Parcel> parcels_;
  std::unique_ptr<RequestTable> receiving_;
  Memory received_;
  int killed_ = -1;
  bool released_ = false;
  std::set<int> messages_after_loss_;
};

Rank::Rank(const Orders& orders) : orders_(orders), random_(orders.seed * 64 + 1) {
  random_.discard(static_cast<unsigned>(orders.rank) * 16U);
  auto workers = ucx::open_workers();
  send_address(orders_.socket, workers.address());
  ucx::JobMembers members{.rank = orders_.rank, .generation = kGeneration, .addresses = {}};
  for (int rank = 0; rank < orders_.size; ++rank) {
    members.addresses.push_back(receive_address(orders_.socket));
    if (rank != orders_.rank) others_.push_back(rank);
  }
  carrier_ = ucx::make_ucx_carrier(std::move(workers), std::move(members));
  bytes_ = orders_.moment == Moment::kConnecting ? kSmall : kLarge;
  outgoing_.resize(bytes_);
  incoming_.assign(others_.size(), Memory(bytes_));
  data_ = std::make_unique<RequestTable>(*carrier_, Plane::kData);
  receiving_ = std::make_unique<RequestTable>(*carrier_, Plane::kControl);
  receiving_->reset(1);
}

bool Rank::receive_order() {
  unsigned char word = 0;
  const ssize_t got = ::recv(orders_.socket, &word, 1, MSG_DONTWAIT);
  if (got == 0) throw Ended{kBroken};  // the supervisor has ended
  if (got < 0) return false;
  if (word < kFirstWord) killed_ = word;
  return true;
}

/// Waits until UCX no longer uses the memory of the carrier's messages; their results are ignored.
/// Returns false if UCX keeps the memory, which is allowed only with transports that the user has
/// chosen.
bool Rank::cancel(RequestTable& table) {
  if (message::wait_for_memory(table, Clock::now() + std::chrono::seconds(2))) return true;
  if (!transports_chosen_) throw Ended{kKept};
  return false;
}

void Rank::send_control(int to, Memory content) {
  Parcel& parcel = parcels_.emplace_back(*carrier_, std::move(content));
  try {
    parcel.table.send(0, parcel.bytes, to, control_tag(orders_.rank));
  } catch (const Error&) {
    parcels_.pop_back();
  }
}

void Rank::progress_control() {
  for (auto parcel = parcels_.begin(); parcel != parcels_.end();) {
    try {
      parcel->table.test();
    } catch (const Error&) {
      static_cast<void>(cancel(parcel->table));
    }
    parcel = parcel->table.in_flight() == 0 ? parcels_.erase(parcel) : std::next(parcel);
  }
  if (receiving_->in_flight() == 0) {
    const auto arrival = carrier_->probe(control_tag(orders_.rank));
    if (!arrival) return;
    received_.resize(arrival->bytes);
    receiving_->receive(0, received_, *arrival);
  }
  const int source = receiving_->peer(0);
  try {
    if (receiving_->test().empty()) return;
  } catch (const Error&) {
    static_cast<void>(cancel(*receiving_));
    return;
  }
  if (!received_.empty() && received_.front() == kAfterLoss) messages_after_loss_.insert(source);
}

void Rank::begin_step() {
  ++step_;
  std::fill(outgoing_.begin(), outgoing_.end(), value_of(orders_.rank));
  std::shuffle(others_.begin(), others_.end(), random_);
  data_->reset(2 * others_.size());
  for (std::size_t place = 0; place < others_.size(); ++place) {
    data_->receive(2 * place, incoming_[place], others_[place], data_tag(others_[place]));
    data_->send(2 * place + 1, outgoing_, others_[place], data_tag(orders_.rank));
  }
  const std::size_t size = random_() % 4 == 0 && bytes_ == kLarge ? 300000 : 24;
  send_control(others_[random_() % others_.size()], Memory(size));
}

void Rank::check_step() {
  for (std::size_t place = 0; place < others_.size(); ++place) {
    const auto good =
        std::count(incoming_[place].begin(), incoming_[place].end(), value_of(others_[place]));
    if (good != static_cast<long>(bytes_)) throw Ended{kWrongBytes};
  }
}

void Rank::exchange_until_stopped() {
  try {
    while (!receive_order()) {
      if (data_->in_flight() == 0) {
        if (step_ > 0) check_step();
        begin_step();
      }
      if (data_->test().empty()) ::sched_yield();
      progress_control();
    }
  } catch (const Error&) {
    // A peer has been killed, or has cancelled its messages.
  }
}

void Rank::cancel_messages() {
  released_ = cancel(*data_);
  if (!released_) return;
  for (Memory& memory : incoming_) std::fill(memory.begin(), memory.end(), kReleased);
}

/// A rank that has lost a peer must be able to notify all others, connected or not.
void Rank::message_survivors() {
  const auto limit = Clock::now() + kTimeout;
  while (killed_ < 0) {
    static_cast<void>(receive_order());
    progress_control();
    if (Clock::now() > limit) throw Ended{kBroken};
    ::sched_yield();
  }
  for (const int other : others_)
    if (other != killed_) send_control(other, Memory(16, kAfterLoss));
  while (std::any_of(others_.begin(), others_.end(), [&](int other) {
    return other != killed_ && !messages_after_loss_.contains(other);
  })) {
    progress_control();
    if (Clock::now() > limit) throw Ended{kSilence};
    ::sched_yield();
  }
}

int Rank::run() {
  exchange_until_stopped();
  cancel_messages();
  message_survivors();
  const unsigned char done = kDone;
  if (::send(orders_.socket, &done, 1, MSG_NOSIGNAL) != 1) return kBroken;
  for (unsigned char word = 0; word != kEnd;) {  // others may not have received their messages
    progress_control();
    ::sched_yield();
    if (::recv(orders_.socket, &word, 1, MSG_DONTWAIT) == 0) return kBroken;
  }
  for (const Memory& memory : incoming_)
    if (released_ &&
        std::count(memory.begin(), memory.end(), kReleased) != static_cast<long>(bytes_))
      return kTouched;
  carrier_->mark_failed();
  return kWell;
}

}  // namespace

void send_address(int socket, std::span<const std::byte> address) {
  if (::send(socket, address.data(), address.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(address.size()))
    throw std::runtime_error("the other end has closed the socket");
}

std::vector<std::byte> receive_address(int socket) {
  std::vector<std::byte> address(64 * 1024);
  const ssize_t bytes = ::recv(socket, address.data(), address.size(), 0);
  if (bytes <= 0) throw std::runtime_error("the other end has closed the socket");
  address.resize(static_cast<std::size_t>(bytes));
  return address;
}

int run_rank(const Orders& orders) {
  try {
    return Rank(orders).run();
  } catch (const Ended& ended) {
    return ended.ending;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", orders.rank, error.what());
    return kBroken;
  }
}

}  // namespace hvd::ucx_campaign
