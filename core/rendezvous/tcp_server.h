#pragma once

#include <asio.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous/admission.h"

namespace hvd::rendezvous {

/// A frame: four bytes of length, as the host has them, then texts (join_fields).
///
///   request  verb, key, value      come: value is an Arrival; put; get; wait: value is a number of
///                                  milliseconds; fail: value is the reason; leave
///   answer   verdict, value        welcome, refused (a Refusal), done, exists, value, nothing,
///                                  failed (the reason: a text, or a Refusal where a rank is lost)
///
/// Each request has one answer, and a rank sends one request at a time.
inline constexpr std::size_t kRequestFields = 3;
inline constexpr std::size_t kAnswerFields = 2;
inline constexpr std::uint32_t kMostFrameBytes = 64 << 20;
/// Is put when all other ranks have left or ended.
inline constexpr const char* kAllLeft = "\1left";

/// What rank 0 serves, in a thread of its own. The constructor and the destructor may be called by
/// any thread.
///
/// Who comes for another job, with another token or as a rank that is there is refused alone: a
/// stranger disturbs no job. Other contradictions, and a rank that does not come, refuse all.
class TcpServer {
 public:
  /// @throws UsageError when the port cannot be had
  TcpServer(std::uint16_t port, std::string place, const Introduction& of_rank_0, Deadline);
  TcpServer(const TcpServer&) = delete;
  TcpServer& operator=(const TcpServer&) = delete;
  /// What has been answered leaves first, for at most a second.
  ~TcpServer();

 private:
  struct Session;
  using SessionPtr = std::shared_ptr<Session>;

  void listen(std::uint16_t port);
  void accept();
  void read(const SessionPtr&);
  void handle(const SessionPtr&, const std::vector<std::string>& request);
  void come(const SessionPtr&, const std::string& value);
  void put(const SessionPtr&, const std::string& key, const std::string& value);
  void wait(const SessionPtr&, const std::string& key, const std::string& value);
  void leave(const SessionPtr&);
  void count_as_left();
  void fail(const std::string& reason);
  void answer(const SessionPtr&, const std::string& verdict, const std::string& value = {});
  void refuse(const SessionPtr& session, const Refusal& refusal);
  void refuse_all(const Refusal&);
  void drop(const SessionPtr&);
  void close();

  const std::string place_;
  const Introduction own_;
  // All below belongs to the thread.
  asio::io_context io_{1};
  asio::ip::tcp::acceptor acceptor_{io_};
  asio::steady_timer give_up_{io_};
  asio::steady_timer stop_{io_};
  std::vector<SessionPtr> sessions_;
  std::map<int, SessionPtr> come_;  ///< by rank
  std::map<std::string, std::string> values_;
  std::optional<Refusal> refused_;
  std::optional<std::string> failed_;
  bool begun_ = false;
  bool closing_ = false;
  int left_ = 0;
  std::jthread thread_;  // last: it uses what is above
};

}  // namespace hvd::rendezvous
