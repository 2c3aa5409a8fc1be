#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reports/console.h"
#include "reports/frame_connection.h"
#include "reports/report.h"

namespace hvd::launcher {

/// Receives the agents' reports. Called from ReportServer's handlers; may call back into the
/// server.
class RankObserver {
 public:
  virtual ~RankObserver() = default;
  /// A node joins an elastic job by itself. Returns the numbers of its slots; an empty list refuses
  /// the node.
  virtual std::vector<int> on_join(const Hello& /*hello*/) { return {}; }
  /// @param address the numeric address from which the agent has connected
  virtual void on_hello(const Hello& hello, const std::string& address) = 0;
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

  // In an elastic job:
  /// Bytes of the member socket of the slot's worker.
  virtual void on_member(int /*slot*/, std::string_view /*bytes*/) {}
  /// The slot's worker does not run any more; on_ended() may follow later.
  virtual void on_gone(int /*slot*/) {}
  /// An agent has requested the renewal of its lease. @param slot one of its slots
  virtual void on_lease(int /*slot*/) {}
  /// The host of an agent is to leave the job in order. @param slot one of its slots
  virtual void on_leaving(int /*slot*/) {}
  /// An agent has taken these slots of an offer; empty: it has refused it.
  virtual void on_slots(int /*slot*/, const std::vector<int>& /*taken*/) {}
  /// The connection to an agent has ended, after on_lost() of its ranks.
  virtual void on_disconnected(const std::vector<int>& /*ranks*/) {}
};

/// hvdrun's side of the connections to the agents. Admits one agent for each rank, if it proves in
/// time that it has the job's token. Not thread-safe.
class ReportServer {
 public:
  /// The most bytes of output in flight on a connection, unless its ranks are many. A TCP
  /// connection buffers more than this while hvdrun is suspended, so the agent does not consider it
  /// dead.
  static constexpr int kCredit = 48 * 1024;

  /// @param port to listen at; 0: a free one
  /// @throws PortTaken, and LaunchError (kInternal) when it cannot listen. `observer` must outlive
  /// this.
  ReportServer(asio::io_context& io, int size, std::string token, Welcome welcome,
               bool loopback_only, int silence_limit_ms, RankObserver& observer,
               std::chrono::milliseconds proof_timeout = std::chrono::seconds(10),
               std::uint16_t port = 0);

  std::uint16_t port() const;
  const std::string& token() const noexcept { return token_; }
  /// Grants agents new credit for the output that was received. While the console has a backlog,
  /// the caller does not call this, and the programs wait.
  void give_credit();
  /// Grants unlimited credit to a rank that has ended: its remaining output is small.
  void give_full_credit(int rank) { give_credit(rank, 1 << 30); }
  void send(int rank, const SignalOrder& order) { write(rank, FrameType::kSignal, encode(order)); }
  void start(int rank, const StartOrder& order) { write(rank, FrameType::kStart, encode(order)); }
  /// In an elastic job: starts the next worker in a slot whose last one was released.
  void start_next(int slot, const StartOrder& order);
  /// In an elastic job: more slots, with the next numbers.
  void add_slots(int count) { links_.resize(links_.size() + static_cast<std::size_t>(count)); }
  /// In an elastic job: gives these slots to the agent of another one.
  void give_slots(int slot_of_agent, const std::vector<int>& slots);
  /// In an elastic job: sends bytes to the member socket of the slot's worker.
  void send_member(int slot, std::string_view bytes);
  /// In an elastic job: ends the connection to the agent of this slot without a report, and lets
  /// another agent connect for its slots.
  void readmit(const std::vector<int>& slots);
  /// Sends bytes of the rendezvous to a process of the rank; see on_rendezvous().
  /// @param last closes its connection after these bytes
  void send_rendezvous(int rank, std::uint32_t session, const FrameConnection::Shared& bytes,
                       bool last);
  /// Allows the rank's agent to end.
  void release(int rank) { write(rank, FrameType::kRelease, "{}"); }
  /// Breaks every connection, so that the remaining agents stop their programs.
  void close_all();
  /// Sends all agents the job's exit code, then closes every connection.
  void finish_all(int code);
  /// Whether the connections that finish_all() has ended are closed, and all agents have therefore
  /// received the exit code.
  bool finished() const;
  /// The admitted connections.
  std::size_t open_connections() const noexcept { return connections_.size() - unproved_; }

 private:
  struct Connection {
    std::shared_ptr<FrameConnection> frames;
    std::unique_ptr<asio::steady_timer> proof_timer;  ///< null once admitted
    std::string agent_nonce, nonce;
    std::string node = {};  ///< the id of a node that has joined by itself; otherwise empty
    std::vector<int> ranks = {};
    int credit = 0;  ///< of each rank
  };
  struct RankLink {
    int connection = -1;  ///< -1: never connected
    int uncredited = 0;   ///< bytes of output received since the last credit
    bool ended = false, drained = false;
  };

  void accept();
  void pause_accepting();
  bool drop_oldest_unproved();
  void add(asio::ip::tcp::socket socket);
  bool handle(int id, const Frame& frame);
  bool challenge(Connection& connection, const Frame& frame);
  bool admit(int id, const Frame& frame);
  bool has_joined(const std::string& node) const;
  bool on_output(int rank, Stream stream, const Frame& frame);
  void give_credit(int rank, int bytes);
  void write(int rank, FrameType type, std::string_view payload);
  void drop(int id);
  Connection* find_rank(int rank);
  RankLink& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }

  const std::string token_;
  const Welcome welcome_;
  RankObserver& observer_;
  const int silence_limit_ms_;
  const std::chrono::milliseconds proof_timeout_;  ///< time limit for the proof
  asio::ip::tcp::acceptor listener_;
  asio::steady_timer accept_again_;
  int next_id_ = 0;
  std::size_t unproved_ = 0;
  std::map<int, Connection> connections_;
  std::vector<std::shared_ptr<FrameConnection>> finishing_;  ///< by finish_all()
  std::vector<RankLink> links_;                              ///< by rank
};

}  // namespace hvd::launcher
