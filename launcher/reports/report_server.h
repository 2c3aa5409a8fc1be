#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reports/console.h"
#include "reports/report.h"
#include "system/poller.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Bytes to be written to a non-blocking socket. Several queues can share the same bytes. Not
/// thread-safe.
class SendQueue {
 public:
  using Shared = std::shared_ptr<const std::vector<std::byte>>;

  /// Returns the end of the queue. Bytes may be appended to it until the next call.
  std::string& tail();
  /// Adds the bytes from `begin` up to, but not including, `end`.
  void add(const Shared& bytes, std::size_t begin, std::size_t end);
  bool empty() const noexcept;
  void clear() { parts_.clear(); }
  /// Sends as much as the socket accepts now. False if the connection is broken.
  bool flush(int fd);

 private:
  struct Part {
    std::string own = {};
    Shared shared = {};     ///< null: the bytes are `own`
    std::size_t begin = 0;  ///< the bytes before it have been sent
    std::size_t end = 0;    ///< of the shared bytes
    std::string_view unsent() const noexcept {
      if (!shared) return std::string_view(own).substr(begin);
      return {reinterpret_cast<const char*>(shared->data()) + begin, end - begin};
    }
  };
  std::deque<Part> parts_;
};

/// Receives the supervisors' reports. Called from ReportServer's handlers; may call back into the
/// server.
class RankObserver {
 public:
  virtual ~RankObserver() = default;
  virtual void on_hello(int rank, const Hello& hello) = 0;
  virtual void on_started(int rank, const ProgramStarted& started) = 0;
  virtual void on_notice(int rank, const Notice& notice) = 0;
  /// Bytes from a process of the rank for its rendezvous.
  virtual void on_rendezvous(int rank, const RendezvousBytes& received) = 0;
  virtual void on_output(int rank, Stream stream, std::string_view bytes) = 0;
  virtual void on_ended(int rank, const Ended& ended) = 0;
  /// No output of this rank follows. Called after on_ended().
  virtual void on_drained(int rank) = 0;
  /// The connection broke, or the peer violated the protocol, before on_ended().
  virtual void on_lost(int rank) = 0;
};

/// hvdrun's end of the connections to the ranks' supervisors. Admits one per rank, if it proves in
/// time that it has the job's token. Not thread-safe.
class ReportServer {
 public:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;
  /// The most bytes of a rank's output in flight. A TCP connection buffers more than this while
  /// hvdrun is suspended, so the supervisor does not consider the connection dead.
  static constexpr int kCredit = 48 * 1024;

  /// @throws LaunchError (kInternal) when it cannot listen. `observer` must outlive this.
  ReportServer(int size, std::string token, Welcome welcome, bool loopback_only,
               int silence_limit_ms, RankObserver& observer,
               std::chrono::milliseconds proof_patience = std::chrono::seconds(10));

  std::uint16_t port() const noexcept { return port_; }
  const std::string& token() const noexcept { return token_; }
  void add_to(Poller& poller);
  /// Grants supervisors new credit for the output that was received. While the console has a
  /// backlog, the caller does not call this, and the supervisors wait.
  void give_credit();
  /// Grants unlimited credit to a rank that has ended: its remaining output is small.
  void give_full_credit(int rank);
  /// When on_time() is due.
  std::optional<TimePoint> next_deadline() const;
  void on_time();
  void send(int rank, const SignalOrder& order);
  void start(int rank, const StartOrder& order);
  /// Sends bytes of the rendezvous to a process of the rank; see on_rendezvous().
  /// @param last closes its connection after these bytes
  void send_rendezvous(int rank, std::uint32_t session, const SendQueue::Shared& bytes, bool last);
  /// Allows the rank's supervisor to end.
  void release(int rank);
  /// Breaks every connection, so that the remaining supervisors stop their programs.
  void close_all();
  std::size_t open_connections() const noexcept { return connections_.size(); }

 private:
  struct Connection {
    UniqueFd fd;
    FrameDecoder decoder;
    SendQueue outgoing;
    std::optional<int> rank;  ///< once admitted
    std::optional<int> greeted;
    std::string supervisor_nonce, nonce;
    TimePoint since{};
    int uncredited = 0;  ///< bytes of output received since the last credit
    bool ended = false, drained = false;
  };

  void accept_all();
  void on_event(int id, short revents);
  void read(int id);
  bool handle(int id, const Frame& frame);
  bool challenge(int id, const Frame& frame);
  bool admit(int id, const Frame& frame);
  bool on_output(int id, Stream stream, const Frame& frame);
  void write(Connection& connection, FrameType type, std::string_view payload);
  static void flush(Connection& connection);
  void drop(int id);
  Connection* find_rank(int rank);

  const int size_;
  const std::string token_;
  const Welcome welcome_;
  RankObserver& observer_;
  const int silence_limit_ms_;
  const std::chrono::milliseconds proof_patience_;  ///< time limit for the proof
  UniqueFd listener_;
  std::optional<TimePoint> accept_again_at_;  ///< set when no descriptor was left
  std::uint16_t port_ = 0;
  int next_id_ = 0;
  std::size_t unproved_ = 0;
  std::map<int, Connection> connections_;
  std::vector<int> id_of_rank_;  ///< -1: never connected
};

}  // namespace hvd::launcher
