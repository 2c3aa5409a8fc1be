#include "transport/control_plane.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/local_mail.h"
#include "transport/node/node.h"
#include "transport/request_table.h"
#include "transport/send_pool.h"

namespace hvd::message {
namespace {

constexpr std::size_t kMessageLimit = std::size_t{256} << 20;
/// Limit of the messages that are received at the same time. The messages of a rank that has died
/// may never be complete, and the report of its death comes from another rank. A rank sends few
/// messages that do not arrive at once: four pieces of a message (kPiecesUnderWay in
/// engine/point_to_point.cpp) and large reports.
constexpr std::size_t kMaxIncoming = 64;
/// How long the destructor waits for messages that are still under way.
constexpr auto kFlushTime = std::chrono::milliseconds(200);
/// The same for a carrier that may still have to connect, when this rank leaves in order. The other
/// rank has to poll for the connection and may not be scheduled for a while, and it cannot get the
/// contents of the message in another way.
constexpr auto kConnectTime = std::chrono::seconds(10);

class MessageControlPlane final : public control::ControlPlane {
 public:
  MessageControlPlane(std::shared_ptr<Carrier> carrier, std::shared_ptr<host::Node> node,
                      const ControlPlaneOptions& options)
      : carrier_(std::move(carrier)),
        node_(std::move(node)),
        time_to_connect_(options.time_to_connect),
        tag_(make_tag({.generation = carrier_->generation(),
                       .source = carrier_->rank(),
                       .kind = kControlKind})),
        sends_(*carrier_),
        mail_(
            *node_,
            [this](int to, std::span<const std::byte> message) {
              sends_.send(message, {&to, 1}, tag_);
            },
            options.use_mail_rings) {}
  MessageControlPlane(const MessageControlPlane&) = delete;
  MessageControlPlane& operator=(const MessageControlPlane&) = delete;
  ~MessageControlPlane() override;

  int rank() const noexcept override { return node_->topology().rank; }
  int size() const noexcept override { return node_->topology().size; }
  const Topology& topology() const noexcept override { return node_->topology(); }
  void ring(int world_rank) noexcept override { node_->ring(world_rank); }
  std::string shared_memory_prefix(int rank) const override {
    const bool shared = node_->control_segment_shared() && topology().same_host(rank, this->rank());
    return shared ? node_->name_prefix() : std::string();
  }
  Doorbell& doorbell() noexcept override { return node_->control_segment().own_doorbell(); }

  void send(int rank, std::span<const std::byte> message) override;
  void send(std::span<const int> ranks, std::span<const std::byte> message) override;
  void send_lazily(int rank, std::span<const std::byte> message) override;
  void await_lazy_messages(bool awaits) noexcept override { node_->await_lazy_mail(awaits); }
  bool awaits_lazy_messages(int rank) noexcept override {
    return mail_.reaches(rank) && node_->awaits_lazy_mail(rank);
  }
  std::optional<MessageBoxes> message_boxes(int rank) noexcept override {
    return mail_.reaches(rank) ? node_->message_boxes(rank) : std::nullopt;
  }
  bool has_local_message() noexcept override { return mail_.has_message(); }
  std::optional<control::Message> poll() override;
  void expect_messages(std::span<const int> ranks) override;
  void check_connections() override {
    // A message that is still arriving may name the lost rank.
    if (!incoming_.empty()) return;
    // For ranks of this host the control segment is more accurate; it also holds their farewells.
    carrier_->check_connections([this](int rank) {
      return !node_->control_segment_shared() || !topology().same_host(rank, this->rank());
    });
  }

  bool busy() const noexcept override { return !incoming_.empty() || sends(); }
  bool rung_by_all() const noexcept override { return node_->rung_by_all(); }
  bool may_send_to_lost() const noexcept override { return carrier_->may_send_to_lost(); }
  bool needs_polling() const noexcept override {
    return !rung_by_all() || (!carrier_->delivers_at_once() && (busy() || !node_->inbox_empty()));
  }
  bool quiet() const noexcept override { return rung_by_all() && !busy() && node_->inbox_empty(); }

  ArrivalFlags* arrival_flags(int rank, int flag) noexcept override {
    return node_->arrival_flags(rank, flag);
  }
  ArrivalFlags* remote_arrival_flags() noexcept override { return node_->remote_arrival_flags(); }

  void heartbeat(TimePoint now) noexcept override;
  std::optional<control::PeerLoss> check_peers(TimePoint now, Duration timeout) override;
  std::uint32_t endings() const noexcept override { return node_->control_segment().endings(); }
  std::vector<Departure> departures() override;
  std::optional<control::PeerLoss> find_loss_behind_error(Duration timeout) override;
  void report_loss(int rank, std::string_view cause) noexcept override {
    accused_ = true;
    node_->control_segment().report_loss(rank, cause);
  }
  void give_up_messages() noexcept override {
    accused_ = false;
    carrier_->mark_failed();
  }
  void farewell() noexcept override {
    left_in_order_ = true;
    node_->control_segment().farewell();
    carrier_->farewell();
  }

 private:
  /// A message that was matched.
  struct Incoming {
    explicit Incoming(Carrier& carrier) : requests(carrier, Plane::kControl) { requests.reset(1); }
    RequestTable requests;
    control::Message message = {};
    bool complete = false;
  };

  /// Whether messages of this rank are under way that need further calls.
  bool sends() const noexcept { return !sends_.empty() || mail_.keeps_messages(); }
  void announce(int to) {
    node_->announce(to);
    ring(to);
  }
  void retire_sends();
  bool start_receive();
  void test_incoming();
  std::optional<control::Message> next_message();
  std::optional<control::Message> deliver();

  const std::shared_ptr<Carrier> carrier_;
  const std::shared_ptr<host::Node> node_;
  const Duration time_to_connect_;
  const Tag tag_;
  SendPool sends_;
  LocalMail mail_;
  /// In the order in which they were matched. deliver() keeps those of one rank in order.
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::vector<std::unique_ptr<Incoming>> idle_;
  std::exception_ptr send_failure_;  ///< thrown when no message has arrived
  bool accused_ = false;
  bool left_in_order_ = false;
};

void require_within_limit(std::size_t bytes, const char* what, int peer) {
  if (bytes <= kMessageLimit) return;
  throw Error(text(what, " rank ", peer, ": a control message of ", bytes, " bytes; the limit is ",
                   kMessageLimit, ". Submit fewer or smaller objects at a time"));
}

MessageControlPlane::~MessageControlPlane() {
  try {
    // The report of a loss may go to ranks with which this rank has never exchanged messages. A
    // carrier such as MPI reports a message as sent before the connection exists, and both sides
    // are needed to make the connection.
    const bool lingers = accused_ && !rung_by_all();
    if (carrier_->active() && (lingers || (!carrier_->failed() && sends()))) {
      const bool waits_for_others = left_in_order_ && !lingers && !carrier_->delivers_at_once();
      const Duration limit = waits_for_others ? Duration(kConnectTime) : Duration(kFlushTime);
      poll_until(std::chrono::steady_clock::now() + limit, [&] {
        if (!lingers) {
          try {
            retire_sends();
          } catch (const BrokenConnection&) {  // the other ranks still need their messages
          }
          return !sends();
        }
        carrier_->progress();  // messages to the lost rank never complete
        return false;
      });
    }
  } catch (...) {
    // The transport is broken, so no rank can be notified.
    carrier_->mark_failed();
  }
  const Deadline until = std::chrono::steady_clock::now() + kCancelTime;
  for (const auto& incoming : incoming_) {
    if (!wait_for_memory(incoming->requests, until))
      keep_until_exit(std::make_shared<const control::Message>(std::move(incoming->message)));
  }
}

void MessageControlPlane::send(std::span<const int> ranks, std::span<const std::byte> message) {
  require_within_limit(message.size(), "sending from", rank());
  std::exception_ptr failure;
  // If one of the ranks is lost, the others still need the message.
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<int> others;
  for (const int to : ranks) {
    if (mail_.reaches(to)) {
      node_->announce(to);
      attempt([&] { mail_.send(to, message); });
    } else {
      others.push_back(to);
    }
  }
  if (!others.empty()) attempt([&] { sends_.send(message, others, tag_); });
  for (const int to : others) announce(to);
  if (failure) std::rethrow_exception(failure);
}

void MessageControlPlane::send(int to, std::span<const std::byte> message) {
  if (to < 0 || to >= size() || to == rank()) {
    throw Error(text("sending from rank ", rank(), " to rank ", to,
                     ": expected another rank, from 0 to ", size() - 1));
  }
  require_within_limit(message.size(), "sending to", to);
  if (mail_.reaches(to)) {
    node_->announce(to);
    return mail_.send(to, message);
  }
  sends_.send(message, {&to, 1}, tag_);
  announce(to);
}

void MessageControlPlane::send_lazily(int to, std::span<const std::byte> message) {
  if (to < 0 || to >= size() || !mail_.reaches(to)) return send(to, message);
  node_->announce(to);
  mail_.send(to, message, LocalMail::Wake::kIfAwaited);
}

void MessageControlPlane::retire_sends() {
  // A message that could not be sent at once may have been sent only now, after the ring.
  sends_.retire([&](std::span<const int> ranks) {
    for (const int other : ranks) ring(other);
  });
  mail_.flush();
}

void MessageControlPlane::heartbeat(TimePoint now) noexcept {
  node_->control_segment().heartbeat(now);
  if (carrier_->delivers_at_once() || !carrier_->active()) return;
  try {
    carrier_->progress();  // a message reported as sent may still wait for buffer space
  } catch (...) {
    carrier_->mark_failed();
  }
}

bool MessageControlPlane::start_receive() {
  const std::optional<ProbedMessage> arrival = carrier_->probe(tag_);
  if (!arrival) return false;
  require_within_limit(arrival->bytes, "receiving from", arrival->source);
  if (idle_.empty()) idle_.push_back(std::make_unique<Incoming>(*carrier_));
  Incoming& incoming = *idle_.back();
  incoming.message.source = arrival->source;
  incoming.message.bytes.resize(arrival->bytes);
  incoming.complete = false;
  incoming.requests.receive(0, incoming.message.bytes, *arrival);
  incoming_.push_back(std::move(idle_.back()));
  idle_.pop_back();
  return true;
}

void MessageControlPlane::test_incoming() {
  for (auto next = incoming_.begin(); next != incoming_.end(); ++next) {
    Incoming& incoming = **next;
    if (incoming.complete) continue;
    try {
      incoming.complete = !incoming.requests.test().empty();
    } catch (const std::exception&) {  // a broken connection
      if (incoming.requests.in_flight() == 0) incoming_.erase(next);
      throw;
    }
  }
}

std::optional<control::Message> MessageControlPlane::deliver() {
  const auto found = std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& incoming) {
    const auto first = std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& other) {
      return other->message.source == incoming->message.source;
    });
    return incoming->complete && first->get() == incoming.get() &&
           mail_.may_deliver(incoming->message.source);
  });
  if (found == incoming_.end()) return std::nullopt;
  control::Message message = std::exchange((*found)->message, {});
  idle_.push_back(std::move(*found));
  incoming_.erase(found);
  mail_.on_delivered(message.source);
  node_->count_received();
  return message;
}

std::optional<control::Message> MessageControlPlane::poll() {
  try {
    if (sends()) retire_sends();
  } catch (const std::exception&) {  // a received message may contain the cause, so handle messages
                                     // first
    if (!send_failure_) send_failure_ = std::current_exception();
  }
  std::optional<control::Message> message = next_message();
  if (!message && send_failure_) std::rethrow_exception(std::exchange(send_failure_, nullptr));
  return message;
}

std::optional<control::Message> MessageControlPlane::next_message() {
  if (size() == 1) return std::nullopt;
  if (auto message = mail_.pop()) {
    node_->count_received();
    return message;
  }
  if (mail_.reaches_all() && incoming_.empty() && !mail_.awaits_carrier()) return std::nullopt;
  test_incoming();
  if (auto message = deliver()) return message;
  while (incoming_.size() < kMaxIncoming && start_receive()) {
    test_incoming();
    if (auto message = deliver()) return message;
  }
  return std::nullopt;
}

void MessageControlPlane::expect_messages(std::span<const int> ranks) {
  // On one host, connecting in advance is no faster than connecting in the first step, and all
  // ranks would connect to rank 0 at the same time.
  if (rung_by_all()) return;
  for (const int rank : ranks) carrier_->connect(Plane::kControl, rank);
  poll_until(std::chrono::steady_clock::now() + time_to_connect_, [&] {
    carrier_->progress();
    return !carrier_->connecting();
  });
}

std::optional<control::PeerLoss> MessageControlPlane::find_loss_behind_error(Duration timeout) {
  std::optional<control::PeerLoss> loss;
  poll_until(std::chrono::steady_clock::now() + timeout, [&] {
    loss =
        check_peers(SteadyClock().now(), std::chrono::hours(24));  // heartbeats would take too long
    return loss.has_value();
  });
  return loss;
}

std::vector<control::ControlPlane::Departure> MessageControlPlane::departures() {
  std::vector<Departure> found;
  for (const auto& [slot, ended] : node_->control_segment().departures())
    found.push_back({node_->rank_of_slot(slot), ended});
  return found;
}

std::optional<control::PeerLoss> MessageControlPlane::check_peers(TimePoint now, Duration timeout) {
  auto loss = node_->control_segment().check(now, timeout);
  if (!loss) return std::nullopt;
  // No call may wait for the lost rank any more, not even the carrier's destructor.
  carrier_->mark_failed();
  return control::PeerLoss{node_->lost_rank(*loss), std::move(loss->cause),
                           loss->accused.has_value()};
}

}  // namespace

std::unique_ptr<control::ControlPlane> make_control_plane(std::shared_ptr<Carrier> carrier,
                                                          std::shared_ptr<host::Node> node,
                                                          const ControlPlaneOptions& options) {
  return std::make_unique<MessageControlPlane>(std::move(carrier), std::move(node), options);
}

}  // namespace hvd::message
