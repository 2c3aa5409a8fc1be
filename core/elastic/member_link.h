#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "member/member.h"
#include "member/messages.h"

namespace hvd::elastic {

/// A frame on the socket is a length of four bytes, little-endian, and a message of membership.
inline constexpr std::uint32_t kMaxFrameBytes = 16 << 20;

/// The next task of the thread in run().
struct Next {
  enum class Kind : std::uint8_t {
    kLeave,   ///< leave the generation, then call MemberLink::left()
    kForm,    ///< form a generation, then call MemberLink::synced() or failed()
    kRun,     ///< enter the program's function
    kFinish,  ///< return from run()
    kExit,    ///< the process has no place in the job any more
  };
  Kind kind = Kind::kExit;
  std::string cause = {};      ///< of kLeave and kExit
  member::Form form = {};      ///< of kForm
  member::Generation run = 0;  ///< of kRun
};

/// Carries the messages of a member::Member over the socket from its agent, in a thread that
/// answers while the program computes.
///
/// Thread-safe. One thread, that of run(), calls next(), left(), synced(), at_end() and commit().
class MemberLink {
 public:
  /// Called by the thread when a generation is reset, or the connection to hvdrun has ended. Must
  /// not block, nor call the link.
  using Interrupt = std::function<void(const std::string& cause)>;

  /// @param socket connected to the agent; the link closes it
  MemberLink(int socket, member::WorkerId own, std::string program);
  MemberLink(const MemberLink&) = delete;
  MemberLink& operator=(const MemberLink&) = delete;
  ~MemberLink();
  /// Ends the thread. Messages are not answered any more.
  void stop();

  void join();
  /// Waits for the next task.
  Next next();
  /// Replaces the function that the thread calls. When this returns, the earlier function is not
  /// called any more.
  void set_interrupt(Interrupt);
  /// Whether the generation has been reset, is being changed, or has failed in this process.
  bool over() const;

  void left(member::StateSummary, bool can_load, std::string address, bool divided = false);
  void synced(member::Generation, member::StateSummary);
  /// Ignored unless this is the current generation.
  void failed(member::Generation, std::optional<member::WorkerId> accused, std::string cause);
  /// Reports that an exception leaves the program.
  void report_exception(member::Commit, std::string cause);
  void at_end();
  /// Begins a commit, and waits while a change is being prepared. Returns false if the program
  /// leaves its function after it.
  bool commit();
  /// After commit() has returned false: the ranks that leave the job, in order, at this commit.
  std::vector<int> leaving() const;

 private:
  void run(const std::stop_token&);
  bool read_frame(const std::stop_token&);
  bool read_all(std::byte* into, std::size_t bytes, const std::stop_token&);
  void carry_out() HVD_REQUIRES(mutex_);
  void carry_out(const member::MemberAction&) HVD_REQUIRES(mutex_);
  void send(const member::ToCoordinator&) HVD_REQUIRES(mutex_);
  void interrupt_if_requested();

  const int socket_;
  const int wake_;  ///< an eventfd that stops the thread
  mutable Mutex mutex_;
  Condition changed_;
  member::Member member_ HVD_GUARDED_BY(mutex_);
  std::optional<std::string> leave_ HVD_GUARDED_BY(mutex_);
  std::optional<member::Form> form_ HVD_GUARDED_BY(mutex_);
  std::optional<member::Generation> run_ HVD_GUARDED_BY(mutex_);
  std::optional<std::string> exit_ HVD_GUARDED_BY(mutex_);
  bool finish_ HVD_GUARDED_BY(mutex_) = false;
  std::optional<std::string> interruption_ HVD_GUARDED_BY(mutex_);
  Mutex interrupt_mutex_;
  Interrupt interrupt_ HVD_GUARDED_BY(interrupt_mutex_);
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace hvd::elastic
