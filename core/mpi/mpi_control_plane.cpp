#include "mpi/mpi_control_plane.h"

#include <mpi.h>

#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "base/poll_until.h"
#include "hvd/error.h"
#include "mpi/call_watch.h"
#include "mpi/communicator.h"
#include "mpi/environment.h"
#include "mpi/mpi_error.h"
#include "mpi/send_pool.h"

namespace hvd::mpi {
namespace {

constexpr int kCoordinator = 0;
constexpr int kTag = 0;
constexpr std::size_t kMessageLimit = std::size_t{256} << 20;
/// How long leaving waits for messages that are still under way.
constexpr auto kFlushTime = std::chrono::milliseconds(200);
/// A process that is killed closes its connections first; the end of a large one takes the kernel
/// 0.2 s per GiB more.
constexpr auto kTimeToDie = std::chrono::seconds(1);

class MpiControlPlane final : public control::ControlPlane {
 public:
  explicit MpiControlPlane(std::shared_ptr<MpiWorld> world)
      : world_(std::move(world)),
        communicator_(world_->control_communicator().get()),
        sends_(communicator_) {
    for (int rank = 0; rank < size(); ++rank) {
      if (rank != this->rank()) others_.push_back(rank);
    }
  }
  MpiControlPlane(const MpiControlPlane&) = delete;
  MpiControlPlane& operator=(const MpiControlPlane&) = delete;
  ~MpiControlPlane() override;

  int rank() const noexcept override { return world_->topology().rank; }
  int size() const noexcept override { return world_->topology().size; }
  const Topology& topology() const noexcept override { return world_->topology(); }
  void ring(int world_rank) noexcept override { world_->node()->ring(world_rank); }
  Doorbell& doorbell() noexcept override { return world_->node()->board().own_bell(); }

  void report(std::span<const std::byte> message) override { deliver(kCoordinator, message); }
  void publish(std::span<const std::byte> message) override;
  void send(int rank, std::span<const std::byte> message) override;
  void send(std::span<const int> ranks, std::span<const std::byte> message) override;
  std::optional<control::Message> poll() override;

  bool busy() const noexcept override {
    return receiving_ != nullptr || !sends_.empty() || !loopback_.empty();
  }
  bool rung_by_all() const noexcept override { return world_->node()->rung_by_all(); }
  bool quiet() const noexcept override {
    return rung_by_all() && !busy() && world_->node()->mail_empty();
  }

  LockWords* lock_words(int rank) noexcept override { return world_->node()->lock_words(rank); }
  LockWords* outside_lock_words() noexcept override { return world_->node()->outside_lock_words(); }

  void beat(TimePoint now) noexcept override { world_->node()->board().beat(now); }
  std::optional<control::PeerLoss> check_peers(TimePoint now, Duration timeout) override;
  std::optional<control::PeerLoss> find_loss_behind_error() override;
  void accuse(int rank, std::string_view cause) noexcept override {
    accused_ = true;
    world_->node()->board().accuse(rank, cause);
  }
  void farewell() noexcept override {
    world_->node()->board().farewell();
    world_->farewell();
  }

 private:
  /// A message that was matched and has not arrived in full. One at a time, and nothing is taken
  /// from the queue behind it, which keeps messages of one rank in order.
  struct Receive {
    control::Message message = {};
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void deliver(int rank, std::span<const std::byte> message);
  void retire_sends();
  bool start_receive();

  std::shared_ptr<MpiWorld> world_;
  MPI_Comm communicator_;
  std::vector<int> others_;
  SendPool sends_;
  std::deque<control::Message> loopback_;
  std::unique_ptr<Receive> receiving_;
  bool accused_ = false;
};

void require_within_limit(std::size_t bytes, const char* what, int peer) {
  if (bytes <= kMessageLimit) return;
  throw Error(std::string(what) + " rank " + std::to_string(peer) + ": a control message of " +
              std::to_string(bytes) + " bytes; the limit is " + std::to_string(kMessageLimit) +
              ". Submit fewer or smaller objects at a time");
}

MpiControlPlane::~MpiControlPlane() {
  try {
    // What tells other hosts of a loss may go to ranks that this one has never talked to: MPI calls
    // it sent before the connection is there, which needs both sides.
    const bool lingers = accused_ && !rung_by_all();
    if (is_active() && (lingers || (!world_->failed() && !sends_.empty()))) {
      poll_until(std::chrono::steady_clock::now() + kFlushTime, [&] {
        retire_sends();
        if (!lingers) return sends_.empty();
        const WatchedCall watched("MPI_Iprobe");
        int found = 0;
        check(MPI_Iprobe(MPI_ANY_SOURCE, kTag, communicator_, &found, MPI_STATUS_IGNORE),
              "MPI_Iprobe");
        return false;
      });
    }
  } catch (...) {
    // The transport is broken; there is nobody left to tell.
    world_->mark_failed();
  }
  // MPI may still write to it.
  static_cast<void>(receiving_.release());
}

void MpiControlPlane::deliver(int to, std::span<const std::byte> message) {
  require_within_limit(message.size(), "sending to", to);
  if (to == rank()) {
    loopback_.push_back({to, {message.begin(), message.end()}});
    return;
  }
  sends_.send(message, {&to, 1}, kTag);
  world_->node()->announce(to);
  ring(to);
}

void MpiControlPlane::publish(std::span<const std::byte> message) {
  if (rank() != kCoordinator)
    throw Error("publish: only rank 0 may call it, this is rank " + std::to_string(rank()));
  send(others_, message);
  loopback_.push_back({rank(), {message.begin(), message.end()}});
}

void MpiControlPlane::send(std::span<const int> ranks, std::span<const std::byte> message) {
  require_within_limit(message.size(), "sending from", rank());
  sends_.send(message, ranks, kTag);
  for (const int to : ranks) {
    world_->node()->announce(to);
    ring(to);
  }
}

void MpiControlPlane::send(int to, std::span<const std::byte> message) {
  if (to < 0 || to >= size()) {
    throw Error("send: there is no rank " + std::to_string(to) + " among " +
                std::to_string(size()));
  }
  deliver(to, message);
}

void MpiControlPlane::retire_sends() {
  // A message that MPI could not hand over at once may have gone out just now, after we rang.
  sends_.retire([&](std::span<const int> ranks) {
    for (const int other : ranks) ring(other);
  });
}

bool MpiControlPlane::start_receive() {
  int found = 0;
  const WatchedCall watched("MPI_Improbe");
  MPI_Message matched = MPI_MESSAGE_NULL;
  MPI_Status status = {};
  // Twice, because Open MPI looks first and fetches what has arrived afterwards: one probe would
  // find a message only when poll() is called again, and the engine would have gone to sleep in
  // between.
  for (int attempt = 0; attempt < 2 && !found; ++attempt) {
    check(MPI_Improbe(MPI_ANY_SOURCE, kTag, communicator_, &found, &matched, &status),
          "MPI_Improbe");
  }
  if (!found) return false;
  MPI_Count bytes = 0;
  check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x", status.MPI_SOURCE);
  if (bytes < 0)
    throw Error("a control message from rank " + std::to_string(status.MPI_SOURCE) +
                " has no size");
  require_within_limit(static_cast<std::size_t>(bytes), "receiving from", status.MPI_SOURCE);
  auto receive = std::make_unique<Receive>();
  receive->message.source = status.MPI_SOURCE;
  receive->message.bytes.resize(static_cast<std::size_t>(bytes));
  check(MPI_Imrecv(receive->message.bytes.data(), static_cast<int>(bytes), MPI_BYTE, &matched,
                   &receive->request),
        "MPI_Imrecv", status.MPI_SOURCE);
  receiving_ = std::move(receive);
  return true;
}

std::optional<control::Message> MpiControlPlane::poll() {
  if (!sends_.empty()) retire_sends();
  if (!loopback_.empty()) {
    control::Message message = std::move(loopback_.front());
    loopback_.pop_front();
    return message;
  }
  if (others_.empty() || (receiving_ == nullptr && !start_receive())) return std::nullopt;
  int done = 0;
  const WatchedCall watched("MPI_Test", receiving_->message.source);
  check(MPI_Test(&receiving_->request, &done, MPI_STATUS_IGNORE), "receiving a control message",
        receiving_->message.source);
  if (!done) return std::nullopt;
  control::Message message = std::move(receiving_->message);
  receiving_.reset();
  world_->node()->note_received();
  return message;
}

std::optional<control::PeerLoss> MpiControlPlane::find_loss_behind_error() {
  std::optional<control::PeerLoss> loss;
  poll_until(std::chrono::steady_clock::now() + kTimeToDie, [&] {
    loss =
        check_peers(SteadyClock().now(), std::chrono::hours(24));  // not by beats, which take time
    return loss.has_value();
  });
  return loss;
}

std::optional<control::PeerLoss> MpiControlPlane::check_peers(TimePoint now, Duration timeout) {
  auto loss = world_->node()->board().check(now, timeout);
  if (!loss) return std::nullopt;
  // No MPI call may wait for that rank any more, not even the last one.
  world_->mark_failed();
  const int rank = world_->node()->rank_of_slot(loss->slot);
  if (loss->accused) return control::PeerLoss{*loss->accused, std::move(loss->cause), true};
  return control::PeerLoss{rank, std::move(loss->cause), false};
}

}  // namespace

std::unique_ptr<control::ControlPlane> make_mpi_control_plane(std::shared_ptr<MpiWorld> world) {
  return std::make_unique<MpiControlPlane>(std::move(world));
}

std::unique_ptr<control::ControlPlane> make_mpi_control_plane(
    std::chrono::milliseconds start_timeout) {
  return make_mpi_control_plane(MpiWorld::join({.start_timeout = start_timeout}));
}

}  // namespace hvd::mpi
