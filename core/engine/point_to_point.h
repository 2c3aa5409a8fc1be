#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "base/rank_set.h"
#include "engine/device_transfer.h"
#include "engine/message_window.h"
#include "engine/operations.h"
#include "engine/peers.h"
#include "engine/runtime_options.h"
#include "hvd/status.h"
#include "negotiation/mailboxes.h"
#include "negotiation/negotiator.h"
#include "negotiation/point_messages.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// The sends and recvs of a rank, as control messages between the two ranks. They involve neither
/// the coordinator nor a schedule.
///
///   sender                        receiver
///   Offer ----------------------> waits in its Mailboxes until a recv matches it
///         <---------------------- Received 0 (an eager message: all bytes, and the send is done)
///   Piece, at most four --------> into the tensor; on one host through a MessageWindow
///         <---------------------- Received n, for each piece; with the last one the send is done
///
/// The receiver may answer an offer with a Refusal instead.
///
/// Not thread-safe: used by the thread that drives the engine. Times exclude those for which the
/// process was stopped. Errors of the transport and impossible messages are thrown as hvd::Error.
class PointToPoint {
 public:
  using Finish =
      std::function<void(const OperationPtr&, const Status&, const EventPtr& output_ready)>;
  /// References that outlive it.
  struct Parts {
    control::ControlPlane& control;
    observe::Counters& counters;
    const control::Negotiator& negotiator;
    std::shared_ptr<device::Context> device;  ///< of this rank's GPU; null without one
    Finish finish;
    /// Describes the work of this rank besides sends and recvs, for texts. Empty without any.
    std::function<std::string()> activity;
    /// Called when another rank has answered inquire().
    std::function<void(std::uint64_t inquiry, int source, const std::string& activity)> answered;
  };
  PointToPoint(const RuntimeOptions&, Parts);

  /// @pre the operation is a send or recv
  void begin(const OperationPtr&, TimePoint now);
  void handle(int source, const wire::PointMessage&);
  /// Sends at most about kBytesPerCall of accepted messages, and handles waits that are too long.
  /// @return whether it moved bytes or ended an operation
  bool progress(TimePoint now);
  /// Call this when the program has called shutdown(): this rank then starts no more sends and
  /// recvs. @return whether this is the first call
  bool leave();
  /// Ends the sends and recvs of a removed set that have not been matched.
  void remove_set(int process_set);
  /// Removes and returns all operations, for the end of the job.
  std::vector<OperationPtr> release_all();

  /// Whether no message of an earlier call precedes a new message with this key.
  /// @pre !active()
  bool has_no_earlier(int process_set, std::int64_t tag) const {
    HVD_EXPECT(!active(), "no operation is outstanding");
    return mailboxes_.empty() || !mailboxes_.has({process_set, {}, tag});
  }
  bool active() const noexcept { return !sends_.empty() || !recvs_.empty(); }
  /// The time at which progress() has work even if no message arrives.
  std::optional<TimePoint> deadline() const noexcept;
  /// The ranks that may be the other side of an operation that has not been matched; empty if it
  /// has been matched.
  RankSet other_sides(const OperationState&) const;
  /// Ranks that have called shutdown(), as far as this rank has been informed.
  const RankSet& left() const noexcept { return left_; }
  /// Asks these ranks for their activities. @return the number of this inquiry, which the answers
  /// carry
  std::uint64_t inquire(RankSpan ranks);
  /// Continues "rank 0 ...": "waits for allreduce 'a'".
  std::string state_text() const;
  /// The operations that have not ended, each with a text that describes its state.
  std::vector<std::pair<OperationPtr, std::string>> outstanding() const;

 private:
  /// The stages of an operation that has not been matched, by the time that it has waited.
  enum class Wait : std::uint8_t { kShort, kAnnounced, kWarned, kEnding };
  struct Send {
    OperationPtr operation;
    TimePoint begun{};
    std::size_t bytes = 0;
    bool eager = false;
    bool accepted = false;
    std::size_t sent = 0;
    Wait wait = Wait::kShort;
    std::unique_ptr<DeviceTransfer> device = nullptr;  ///< null: the tensor is not on a GPU
  };
  struct Recv {
    OperationPtr operation;
    TimePoint begun{};
    bool matched = false;
    int source = 0;  ///< once matched
    std::size_t bytes = 0;
    std::size_t received = 0;
    std::uint64_t send = 0;                            ///< the number of the send, once matched
    std::unique_ptr<DeviceTransfer> device = nullptr;  ///< null: the tensor is not on a GPU
    bool accepted = false;                             ///< with `device`: the first copy may begin
    std::vector<std::byte> payload = {};               ///< with `device`: of an eager message
    Wait wait = Wait::kShort;
    RankSet unanswered = {};  ///< while kEnding: ranks whose Answer is missing
    std::vector<std::string> answers = {};
  };
  /// The accepted messages to one rank. They are sent one after the other.
  struct Stream {
    std::deque<std::uint64_t> sends;
    int pieces_under_way = 0;
    std::unique_ptr<MessageWindow> window;  ///< null: pieces travel in control messages
  };
  using Sends = std::map<std::uint64_t, Send>;
  using Recvs = std::map<std::uint64_t, Recv>;

  void begin_send(const OperationPtr&, TimePoint now);
  void begin_recv(const OperationPtr&, TimePoint now);
  /// Lets offers wake this rank only while a recv waits for one, so that a thread that sends and
  /// receives in turn has the engine to itself.
  void update_wakeups() noexcept;

  void on(int source, const wire::Offer&);
  void on(int source, const wire::Piece&);
  void on(int source, const wire::SharedPiece&);
  void on(int source, const wire::Window&);
  void on(int source, const wire::Recall&);
  void on(int source, const wire::Withdrawal&);
  void on(int source, const wire::Received&);
  void on(int source, const wire::Refusal&);
  void on(int source, const wire::Awaiting&);
  void on(int source, const wire::Leaving&);
  void on(int source, const wire::Inquiry&);
  void on(int source, const wire::Answer&);

  void match(std::uint64_t recv, const control::Arrival&);
  /// Returns the recv that has accepted the send. Refuses bytes that are not its next ones.
  Recv& expect_piece(int source, std::uint64_t send, std::uint64_t offset, std::uint64_t bytes);
  /// Confirms a piece that has been copied into its tensor.
  void confirm_piece(int source, std::uint64_t send, std::size_t bytes);
  /// Makes the window for messages from a rank, unless it exists or cannot exist.
  void offer_window(int source);
  std::string window_name(int source, int destination) const;
  /// @return whether it sent any
  bool send_pieces();
  bool send_piece(int peer, Stream&);
  /// The next bytes of an accepted send; empty: the device has not copied them yet.
  std::span<const std::byte> next_piece(Send&);

  // Tensors on the GPU.
  std::unique_ptr<DeviceTransfer> transfer_of(const TensorView&, const OperationState&);
  /// Host memory for the next piece of a recv. Refuses a piece for which there is no free slot.
  std::span<std::byte> slot_of(int source, Recv&, std::size_t bytes);
  /// Accepts matched recvs, and confirms the pieces that the device has copied.
  /// @return whether it did any
  bool advance_device();
  bool advance_device(Recv&);
  /// @throws PeerLostError when messages have waited only for the device for too long
  void check_device(bool moved, TimePoint now);
  /// Ends an operation. Keeps the memory of a copy that the device may still make.
  void finish(const OperationPtr&, const std::unique_ptr<DeviceTransfer>&, const Status&);
  static void keep_memory(const OperationPtr&, const std::unique_ptr<DeviceTransfer>&);

  void release_eager_bytes(const Send&);

  bool check_waits(TimePoint now);
  void check_wait(std::uint64_t id, Send&, TimePoint now);
  void check_wait(std::uint64_t id, Recv&, TimePoint now);
  /// Advances a wait to this stage once it has lasted for `after`. @return whether it did
  bool reaches(Wait&, Wait step, Duration after, TimePoint begun, TimePoint now);
  void warn(const OperationState&, Duration waited);
  void inquire(std::uint64_t id, Recv&);
  bool end_if_answered(std::uint64_t id);
  bool end_if_all_left(std::uint64_t id);

  void finish(Sends::iterator, const Status&);
  void finish(Recvs::iterator, const Status&);
  void send(int peer, const wire::PointMessage& message) const {
    sender_.send(peer, wire::encode(message));
  }
  void refuse(int source, const wire::Offer&, StatusCode, const std::string& problem);
  std::vector<int> sources_of(const OperationState&) const;
  [[noreturn]] void refuse_message(int source, const std::string& problem) const;

  const RuntimeOptions options_;
  const Parts parts_;
  const ControlSender sender_;
  const int rank_;

  std::unique_ptr<DeviceMessages> device_messages_;  ///< null before the first of a GPU
  control::Mailboxes mailboxes_;
  std::uint64_t next_id_ = 0;
  Sends sends_;
  Recvs recvs_;
  std::map<std::pair<int, std::uint64_t>, std::uint64_t>
      transfers_;                               ///< recvs that are matched, by source and send
  std::map<int, std::size_t> eager_under_way_;  ///< bytes that may wait at each rank
  std::map<int, Stream> streams_;               ///< by rank
  /// For messages from each rank; null: there is no memory for it.
  std::map<int, std::unique_ptr<MessageWindow>> windows_;
  std::set<std::uint64_t> device_recvs_;        ///< matched recvs whose tensors are on the GPU
  std::optional<TimePoint> next_device_check_;  ///< empty: no operation waits for the device
  bool awaits_device_ = false;
  /// The time since which no message has moved while some wait for the device.
  std::optional<TimePoint> device_waits_since_;
  int last_stream_ = -1;               ///< the rank that was last served
  std::optional<TimePoint> deadline_;  ///< of the next step of a wait
  bool leaving_ = false;
  bool awaits_offers_ = false;
  RankSet left_;        ///< ranks that start no more sends
  RankSet awaited_;     ///< ranks to which this one has sent Awaiting
  RankSet awaited_by_;  ///< ranks that have sent it to this one
};

}  // namespace hvd::runtime
