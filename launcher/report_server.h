#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "console.h"
#include "poller.h"
#include "report.h"
#include "unique_fd.h"

namespace hvd::launcher {

/// What the supervisors have to say. Called from ReportServer's handlers; may call back into the
/// server.
class RankObserver {
 public:
  virtual ~RankObserver() = default;
  virtual void on_hello(int rank, const Hello& hello) = 0;
  virtual void on_started(int rank, const Started& started) = 0;
  virtual void on_notice(int rank, const Notice& notice) = 0;
  virtual void on_output(int rank, Stream stream, std::string_view bytes) = 0;
  virtual void on_ended(int rank, const Ended& ended) = 0;
  /// The connection broke, or spoke nonsense, before `ended`.
  virtual void on_lost(int rank) = 0;
};

/// hvdrun's end of the connections to the ranks' supervisors. Admits one per rank, and only with
/// the job's token. Not thread-safe.
class ReportServer {
 public:
  /// @throws LaunchError (kInternal) when it cannot listen. `observer` must outlive this.
  ReportServer(int size, std::string token, Welcome welcome, bool loopback_only,
               RankObserver& observer);

  std::uint16_t port() const noexcept { return port_; }
  const std::string& token() const noexcept { return token_; }
  /// `read_output`: false while the console has more than it can write; supervisors then wait.
  void add_to(Poller& poller, bool read_output);
  void send(int rank, const SignalOrder& order);
  /// The rank's supervisor may end.
  void release(int rank);
  /// Breaks every connection: supervisors that are left stop their programs.
  void close_all();
  std::size_t open_connections() const noexcept { return connections_.size(); }

 private:
  struct Connection {
    UniqueFd fd;
    FrameDecoder decoder;
    std::string outgoing;
    std::optional<int> rank;  ///< once admitted
    bool ended = false;
  };

  void accept_all();
  void on_event(int id, short revents);
  void read(int id);
  bool handle(int id, const Frame& frame);
  bool admit(int id, const Frame& frame);
  void write(Connection& connection, FrameType type, std::string_view payload);
  static void flush(Connection& connection);
  void drop(int id);
  Connection* find_rank(int rank);

  const int size_;
  const std::string token_;
  const Welcome welcome_;
  RankObserver& observer_;
  UniqueFd listener_;
  std::uint16_t port_ = 0;
  int next_id_ = 0;
  std::map<int, Connection> connections_;
  std::vector<int> id_of_rank_;  ///< -1: never connected
};

}  // namespace hvd::launcher
