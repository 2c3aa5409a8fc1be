#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/admission.h"

namespace hvd::rendezvous {

/// A request of a rank to the server. Requests and replies are frames: a length of four bytes in
/// the host's byte order, then texts (join_fields).
///
///   verb      value                     verdict of the reply
///   join      a JoinRequest             accepted, refused (a Refusal)
///   put       the key's value           done, exists
///   get                                 value, nothing
///   wait                                value, nothing, failed
///   exchange  this rank's part          all (N parts: join_fields), absent (rank), exists, failed
///   fail      the reason                done
///   leave                               done
///
/// `failed` carries the reason: a text, or a Refusal if a rank is lost. Each request has one reply,
/// and a rank sends one request at a time.
struct ServerRequest {
  std::string verb = {}, key = {}, value = {};
  std::chrono::milliseconds left{0};  ///< timeout of join, wait and exchange
};
struct ServerReply {
  std::string verdict = {}, value = {};
};
inline constexpr std::uint32_t kMostFrameBytes = 64 << 20;
/// Limit of a frame before its session has joined.
inline constexpr std::uint32_t kMostJoinBytes = 64 << 10;
/// This key gets a value when all ranks except 0 have left or ended.
inline constexpr const char* kAllLeft = "\1left";

/// Encodes a request without the length of its frame.
Bytes encode(const ServerRequest&);
std::optional<ServerRequest> decode_server_request(std::span<const std::byte>);
std::optional<ServerReply> decode_reply(std::span<const std::byte>);
/// A whole frame of a reply, which may be sent to several ranks.
std::shared_ptr<const Bytes> reply_frame(const std::string& verdict,
                                         std::span<const std::byte> value);

/// The state of one rendezvous, from the first rank that joins to the last that leaves. Rank 0
/// serves it at a port, or hvdrun does. It has no sockets, threads or clock: the caller passes
/// requests of numbered sessions, and the time. Not thread-safe.
///
/// A process with another job name or token, or that joins as a rank that has joined already, is
/// refused alone and does not disturb the job. All ranks are refused when they contradict each
/// other in another way, when a rank ends before all have joined, and when a rank does not join in
/// time. The shortest timeout of all ranks counts.
class RendezvousServer {
 public:
  struct Options {
    std::string place = {};  ///< for error texts
    /// Ranks must not contradict it. Empty: the first rank that joins becomes the reference.
    std::optional<RankInfo> reference = {};
    int size = 1;
    /// Advice to the user when ranks have not joined in time.
    std::string advice = {};
  };
  /// Sends a frame to a session, which ends after it if `last`. Must not call the server.
  using Send = std::function<void(int id, const std::shared_ptr<const Bytes>&, bool last)>;

  RendezvousServer(Options, Send);

  /// Handles a request. Returns false if it is invalid or out of turn: the caller then ends the
  /// session and calls drop().
  bool handle(int id, std::span<const std::byte> request, Deadline now);
  /// Records that a session has ended.
  void drop(int id);
  /// Refuses all ranks, including those that join later.
  void refuse_all(const Refusal&);
  /// When on_time() must be called next.
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

  /// Whether all ranks have been refused and have received the reason, or have ended.
  bool all_informed() const {
    return refused_ && static_cast<int>(informed_.size()) >= options_.size;
  }
  /// Whether ranks are still missing and have not been refused.
  bool joining() const noexcept { return !begun_ && !refused_; }
  const std::optional<Refusal>& refused() const noexcept { return refused_; }
  /// Whether all sessions have left.
  bool finished() const;
  /// "host h, process 17" of a session that has joined; else empty.
  std::optional<std::string> process(int id) const;

 private:
  struct Session {
    JoinRequest request = {};
    std::string awaited = {};  ///< a key, or the name of an exchange; empty: no wait
    bool exchanges = false;    ///< `awaited` names an exchange
    Deadline until = {};
    bool left = false;
  };
  using Exchange = std::map<int, std::string>;  ///< parts by rank

  void join(int id, const ServerRequest&, Deadline now);
  void put(int id, const std::string& key, const std::string& value);
  void wait(int id, const std::string& key, Deadline until);
  void exchange(int id, const ServerRequest&, Deadline until);
  void complete(const std::string& what);
  void leave(int id);
  void count_as_left();
  void fail(const std::string& reason);
  void reply(int id, const std::string& verdict, const std::string& value = {});
  void refuse(int id, const Refusal&);
  /// Ends the waits for a key or an exchange, and returns their sessions.
  std::vector<int> release(const std::string& awaited, bool exchanges);
  /// Ranks that have not joined.
  std::vector<int> absent() const;
  std::string absent_from(const std::string& what) const;

  Options options_;
  const Send send_;
  std::map<int, Session> sessions_;  ///< sessions that have joined, by number
  std::map<int, int> session_of_;    ///< by rank
  std::map<std::string, std::string> values_;
  std::map<std::string, Exchange> exchanges_;
  std::optional<Refusal> refused_;
  std::set<int> informed_;  ///< ranks that have received the refusal, or have ended
  std::optional<std::string> failed_;
  std::optional<Deadline> give_up_;
  Deadline::duration limit_{0};  ///< timeout of the rank that gives up first
  ForeignProcesses foreign_;
  bool begun_ = false;
  int left_ = 0;
};

}  // namespace hvd::rendezvous
