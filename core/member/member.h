#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "member/messages.h"

namespace hvd::member {

// Actions for the process of a worker to carry out.

/// Send the message to the coordinator.
struct Send {
  ToCoordinator message = {};
};
/// End the runtime of the generation with this cause, so that blocked calls throw. Then call
/// left().
struct Leave {
  std::string cause = {};
};
/// Connect to the other seats and make the state equal on all of them. Then call synced().
struct Form {
  Assign assign = {};
  std::uint32_t rank = 0;
  bool receives = false;  ///< takes the state from the root
};
/// Enter the program's function.
struct Run {
  Generation generation = 0;
};
/// A waiting commit now has a verdict: call may_commit() again. Leave has the same effect.
struct Wake {};
/// Return from run().
struct Finish {};
/// End the process.
struct Exit {
  std::string cause = {};
};
using MemberAction = std::variant<Send, Leave, Form, Run, Wake, Finish, Exit>;

/// The worker's side of membership. The carrier of its messages calls receive() and disconnected(),
/// the process calls the other functions, and both carry out take_actions() afterwards, in order.
/// Pure, not thread-safe.
///
/// Note [A member leaves on request]: a worker that has lost another worker reports the loss and
/// keeps its connections until the coordinator resets the generation. Otherwise a third worker
/// could mistake the closed connections for the loss of the reporter, and that report could reach
/// the coordinator first. After the reset, reports of losses in that generation are ignored.
class Member {
 public:
  enum class Phase : std::uint8_t {
    kOutside,    ///< has not requested to join
    kCandidate,  ///< waits for the first reset
    kLeaving,    ///< the program and the runtime leave a generation
    kReady,      ///< waits for its seat
    kForming,    ///< connects, and sends or receives the state
    kSynced,     ///< waits until all members have the state
    kRunning,
    kFailed,  ///< has reported a failure and waits for the reset
    kAtEnd,   ///< the program's function has returned
    kOver,
  };

  /// @param program identifies the program and its version
  Member(WorkerId own, std::string program) : own_(own), program_(std::move(program)) {}

  /// Call this when the process has built its model. @pre no earlier call
  void join();
  void receive(const ToWorker&);
  /// Call this when the connection to the coordinator has ended.
  void disconnected();

  /// Call this when the process has left its generation: the program's function has returned or
  /// thrown, no operation is in flight and the runtime of the generation has ended. Answers Leave.
  /// @pre phase() is kLeaving
  /// @param divided whether the ranks have different parts of the state
  void left(StateSummary state, bool can_load, std::string address, bool divided = false);
  /// Call this when the process is connected and has the state of the generation. Answers Form.
  /// Ignored if the generation has been reset meanwhile.
  void synced(Generation, StateSummary);
  /// Call this when the generation has failed in this process. Ignored if it has been reset
  /// already.
  void failed(std::optional<WorkerId> accused, std::string cause);
  /// Call this when an exception has left the program. Ignored before the first generation.
  /// @param commit the last commit of the program
  void report_exception(Commit commit, std::string cause);
  /// Call this when the program's function has returned. Ignored if the generation has failed
  /// meanwhile: the function is then called again.
  /// @pre phase() is kRunning, kLeaving or kFailed
  void at_end();

  enum class Verdict : std::uint8_t {
    kGoOn,  ///< commit and continue
    kStop,  ///< commit and leave the program's function; then call left()
    kWait,  ///< a change is being prepared: wait for Wake, then call may_commit()
  };
  /// Call this when the program begins a commit. Sends no message.
  /// @pre phase() is kRunning, kLeaving or kFailed
  Verdict begin_commit();
  /// The verdict on the commit that was begun last. @pre begin_commit() has returned kWait
  Verdict may_commit();

  /// The ranks that are to leave the job after the commit whose verdict was kStop; empty unless it
  /// is the commit of a change in order.
  std::vector<int> leaving() const;

  Phase phase() const noexcept { return phase_; }
  /// The generation that was assigned last.
  Generation generation() const noexcept { return generation_; }
  std::vector<MemberAction> take_actions();

 private:
  void handle(const Reset&);
  void handle(const Assign&);
  void handle(const Go&);
  void handle(const Prepare&);
  void handle(const Target&);
  void handle(const End&);
  void handle(const Ping&);
  void handle(const Refused&);

  void send(ToCoordinator message) { actions_.emplace_back(Send{std::move(message)}); }
  void announce(Generation);
  const WorkerId own_;
  const std::string program_;
  Phase phase_ = Phase::kOutside;
  Generation generation_ = 0;
  std::vector<Seat> seats_ = {};              ///< of this generation, by rank
  Generation wanted_ = 0;                     ///< of the last reset or target
  Ready ready_ = {};                          ///< sent last
  Commit begun_ = 0;                          ///< the last commit that the program has begun
  std::optional<std::uint64_t> change_ = {};  ///< a change is being prepared
  Commit answered_ = 0;                       ///< begun_ as of the answer to Prepare
  std::optional<Target> target_ = {};
  std::vector<MemberAction> actions_;
};

}  // namespace hvd::member
