#pragma once

#include <asio.hpp>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "bootstrap/meeting.h"

namespace hvd::rendezvous {

/// Serves a meeting at a port of rank 0's, in a thread of its own. The constructor and the
/// destructor may be called by any thread.
class TcpServer {
 public:
  /// @throws UsageError when the port cannot be had
  TcpServer(std::uint16_t port, const std::string& place, const Introduction& of_rank_0, Deadline);
  TcpServer(const TcpServer&) = delete;
  TcpServer& operator=(const TcpServer&) = delete;
  /// What has been answered leaves first, for at most a second.
  ~TcpServer();

  /// The meeting was refused, and there is nobody left to tell. Any thread.
  bool everybody_knows() const noexcept { return everybody_knows_; }

 private:
  struct Session;
  using SessionPtr = std::shared_ptr<Session>;

  void listen(std::uint16_t port, const std::string& place, Deadline);
  asio::error_code try_to_listen(std::uint16_t port);
  void accept();
  void read(const SessionPtr&);
  void handle(const SessionPtr&);
  void answer(int id, const std::shared_ptr<const Bytes>& frame, bool last);
  void drop(const SessionPtr&);
  void look_at_clock();
  void close();

  // All below belongs to the thread.
  asio::io_context io_{1};
  asio::ip::tcp::acceptor acceptor_{io_};
  asio::steady_timer clock_{io_};  ///< of the meeting
  asio::steady_timer stop_{io_};
  std::map<int, SessionPtr> sessions_;
  int next_id_ = 0;
  Meeting meeting_;
  bool closing_ = false;
  std::atomic<bool> everybody_knows_ = false;  // written by the thread
  std::jthread thread_;                        // last: it uses what is above
};

}  // namespace hvd::rendezvous
