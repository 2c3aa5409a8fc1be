#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bootstrap/messages.h"
#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// The first frame of a session: the process that requests to use the store, and the job that it
/// expects there.
struct StoreHello {
  std::string job = {};
  int rank = 0;
  int size = 1;
  std::string process = {};  ///< for users: "host node7, process 1234"
  std::string nonce = {};    ///< random
};
Bytes encode(const StoreHello&);
/// Also empty for a rank outside 0 to size - 1.
std::optional<StoreHello> decode_store_hello(std::span<const std::byte>);

/// A request after the admission.
///
///   verb            key, value            verdict of the reply (number, value)
///   set             key, value            done
///   get             key                   value (0, value), absent
///   add             key, amount           done (sum); malformed if the value is no number
///   create          key, value            done, exists
///   wait            number of keys, keys  value (index, value), absent, refused (0, Refusal)
///   will            key, value, once, also  done; see Store::publish_on_loss()
///   remove_all_if   key, value            done; ends all waits with `absent` if it removes values
///   close                                 done
struct StoreRequest {
  std::string verb = {}, key = {}, value = {};
  std::string once = {};              ///< of `will`: a key; empty: none
  std::string also = {};              ///< of `will`: a key; empty: none
  std::chrono::milliseconds left{0};  ///< timeout of `wait`
};
struct StoreReply {
  std::string verdict = {};
  std::int64_t number = 0;
  std::string value = {};
};
Bytes encode(const StoreRequest&);
std::optional<StoreReply> decode_store_reply(std::span<const std::byte>);

/// Limit of a frame, without its length.
inline constexpr std::uint32_t kMaxFrameBytes = kMaxValueBytes;
/// The same before the admission.
inline constexpr std::uint32_t kMaxHelloBytes = 8 << 10;
/// Time from the connection to the admission.
inline constexpr auto kTimeToBeAdmitted = std::chrono::seconds(10);

/// Proofs of the token, which both sides send instead of the token. They cover fresh random numbers
/// from both sides, so a recorded proof is useless.
std::string server_proof(const std::string& token, const StoreHello&, const std::string& nonce);
std::string client_proof(const std::string& token, const StoreHello&, const std::string& nonce);

/// Serves a Store to numbered sessions. It has no sockets, threads or clock: the caller passes
/// frames and the time. Not thread-safe.
///
/// A frame is a length of four bytes in the host's byte order, then texts (join_fields). Both sides
/// prove that they have the job's token before the session may use the store. The server proves
/// first, so that a process that only listens at the server's address receives no proof and no
/// value:
///
///   client  hello      {format, job, rank, size, process, nonce}
///   server  challenge  {job, nonce, proof}    or version {format}, if it has another one
///   client  proof      {proof}                or distrust {}, after which the session ends
///   server  admitted   {}                     or refused {Refusal}
///
/// Afterwards each request has one reply. An invalid frame ends only its session.
class StoreServer {
 public:
  using Admit = std::function<std::optional<Refusal>(int id, const StoreHello&)>;
  struct Options {
    std::string name = {};  ///< for error texts
    std::string job = {};
    std::string token = {};
    /// Follows "rank 1 (...) has joined at PLACE twice, first from ...".
    std::string twice_advice = "; start each rank once";
    bool one_session_per_rank = true;  ///< false: processes of several runs may use the store
    Admit admit = {};  ///< returns why a process that has the token is refused; empty: it is not
    std::size_t max_unadmitted = 128;  ///< sessions; the oldest is ended for a further one
  };
  using Frame = std::shared_ptr<const Bytes>;
  /// Sends a frame to a session, which ends after it if `last`; a null frame only ends it. Must not
  /// call the server.
  using Send = std::function<void(int id, const Frame&, bool last)>;

  StoreServer(Options options, Send send) : options_(std::move(options)), send_(std::move(send)) {}

  /// Begins a session. Numbers must ascend.
  void open(int id, Deadline now);
  /// The largest frame that the session may send now.
  std::uint32_t frame_limit(int id) const;
  /// Handles a frame, without its length. Returns false if it is invalid: the caller then ends the
  /// session and calls drop().
  bool handle(int id, std::span<const std::byte> frame, Deadline now);
  /// Records that a session has ended. Unless it has sent `close`, its will is published.
  void drop(int id);
  /// Ends the oldest session that is not admitted yet. Returns false if there is none.
  bool end_oldest_unadmitted();

  /// From now on, a wait for keys without values ends with this refusal. Only the first call
  /// counts.
  void fail(const Refusal&);
  /// The same, but only for the sessions that are admitted now.
  void fail_sessions(const Refusal&);
  /// Ranks with an admitted session.
  bool has_session(int rank) const { return session_of_.contains(rank); }

  /// Describes processes that did not have the job's name and token and claimed one of the ranks;
  /// see Store::remarks().
  std::string remarks(std::span<const int> ranks) const;

  /// The time at which on_time() must be called next.
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

 private:
  /// A value that is published once the session is lost and the key `once` has a value. The key
  /// `also` gets an empty value at the same time.
  struct Will {
    std::string key = {};
    Bytes value = {};
    std::string once = {};  ///< empty: at the loss
    std::string also = {};  ///< empty: none
  };
  struct Session {
    StoreHello hello = {};
    std::string expected_proof = {};  ///< empty: no hello yet
    bool admitted = false;
    std::optional<Deadline> until = {};  ///< of the admission or the wait
    std::vector<std::string> awaited = {};
    std::optional<Refusal> failed = {};
    std::optional<Will> will = {};
  };
  /// A value, stored in the frame of the last reply that contained it, so that many sessions share
  /// one frame.
  struct Value {
    Frame frame = {};
    std::size_t index = 0;
    std::size_t bytes = 0;
    std::span<const std::byte> get() const { return std::span(*frame).last(bytes); }
  };

  bool handle_hello(int id, Session&, std::span<const std::byte> frame);
  bool handle_proof(int id, Session&, std::span<const std::byte> frame);
  bool handle_request(int id, Session&, std::span<const std::byte> frame, Deadline now);
  void publish(const Will&);
  void remove_all();
  bool add(int id, const std::string& key, const std::string& amount);
  bool wait(int id, Session&, const StoreRequest&, Deadline now);
  void store(const std::string& key, std::span<const std::byte> value);
  const Frame& frame_of(Value&, std::size_t index);
  void end_wait(int id, Session&, const Frame&);
  void set_timer(int id, Session&, std::optional<Deadline>);
  void refuse(int id, const Refusal&);
  void end(int id);
  void erase(int id);

  const Options options_;
  const Send send_;
  std::map<int, Session> sessions_;
  std::set<int> unadmitted_;
  std::map<int, int> session_of_;  ///< admitted sessions by rank, the last of each
  std::set<std::pair<Deadline, int>> timers_;
  std::unordered_map<std::string, Value> values_;
  std::unordered_map<std::string, std::set<int>> waiting_;  ///< sessions by key
  std::unordered_map<std::string, Will> dormant_;           ///< of lost sessions, by the key `once`
  std::optional<Refusal> failed_;
  std::map<int, std::string> foreign_;  ///< by the claimed rank
};

}  // namespace hvd::rendezvous
