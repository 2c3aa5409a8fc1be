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

/// What a rank asks of whoever serves a meeting, and what it is answered. A frame is four bytes of
/// length, as the host has them, then texts (join_fields).
///
///   verb      value                     verdict
///   come      an Arrival                welcome, refused (a Refusal)
///   put       what stands at the key    done, exists
///   get                                 value, nothing
///   wait                                value, nothing, failed
///   exchange  this rank's part          all (N parts: join_fields), absent (who), exists, failed
///   fail      the reason                done
///   leave                               done
///
/// `failed` has the reason: a text, or a Refusal where a rank is lost. Each request has one answer,
/// and a rank sends one request at a time.
struct Request {
  std::string verb = {}, key = {}, value = {};
  std::chrono::milliseconds left{0};  ///< of come, wait, exchange: until it is given up
};
struct Answer {
  std::string verdict = {}, value = {};
};
inline constexpr std::uint32_t kMostFrameBytes = 64 << 20;
/// Of who has not been admitted.
inline constexpr std::uint32_t kMostArrivalBytes = 64 << 10;
/// Is put when all ranks but 0 have left or ended.
inline constexpr const char* kAllLeft = "\1left";

/// Without the length before it.
Bytes encode(const Request&);
std::optional<Request> decode_request(std::span<const std::byte>);
std::optional<Answer> decode_answer(std::span<const std::byte>);
/// A whole answer as it is sent, to one or to many.
std::shared_ptr<const Bytes> frame_of(const std::string& verdict, std::span<const std::byte> value);

/// One meeting of a job's ranks, from the first that comes to the last that leaves, as whoever
/// serves it keeps it: rank 0, in a tcp rendezvous, or hvdrun. It has neither sockets nor threads
/// nor a clock; who asks is a session, a number that the caller gives. Not thread-safe.
///
/// Who comes for another job, with another token or as a rank that is there is refused alone: a
/// stranger disturbs no job. Other contradictions, a rank that ends before all have come, and one
/// that does not come in time refuse all. The time is that of the rank that has the least.
class Meeting {
 public:
  struct Rules {
    std::string place = {};  ///< for messages
    /// Whom the others may not contradict. Nothing: the first that comes.
    std::optional<Introduction> reference = {};
    int size = 1;
    /// What to do where ranks have not come.
    std::string advice = {};
  };
  /// `last`: the session ends with it. May not call back.
  using Send = std::function<void(int session, const std::shared_ptr<const Bytes>&, bool last)>;

  Meeting(Rules, Send);

  /// False: that was none, or not its turn, and the session is to be dropped.
  bool handle(int session, std::span<const std::byte> request, Deadline now);
  /// The session is over.
  void drop(int session);
  /// Everybody who has come, or will, hears this.
  void refuse_all(const Refusal&);
  /// When on_time() has something to do.
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

  /// It was refused, and all ranks have been told, or have ended.
  bool everybody_knows() const { return refused_ && static_cast<int>(told_.size()) >= rules_.size; }
  /// Neither have all come, nor has it been refused.
  bool gathering() const noexcept { return !begun_ && !refused_; }
  const std::optional<Refusal>& refused() const noexcept { return refused_; }
  /// Nobody is here who would ask for anything.
  bool over() const;
  /// "host h, process 17" of a session that has come.
  std::optional<std::string> who(int session) const;

 private:
  struct Visitor {
    Arrival arrival = {};
    std::string awaited = {};  ///< a key, or an exchange; empty: it waits for neither
    bool exchanges = false;
    Deadline until = {};
    bool left = false;
  };
  using Exchange = std::map<int, std::string>;  ///< parts by rank

  void come(int session, const Request&, Deadline now);
  void put(int session, const std::string& key, const std::string& value);
  void wait(int session, const std::string& key, Deadline until);
  void exchange(int session, const Request&, Deadline until);
  void complete(const std::string& what);
  void leave(int session);
  void count_as_left();
  void fail(const std::string& reason);
  void answer(int session, const std::string& verdict, const std::string& value = {});
  void refuse(int session, const Refusal&);
  /// Those who wait for it, and no longer do.
  std::vector<int> release(const std::string& awaited, bool exchanges);
  /// Ranks that have not come.
  std::vector<int> absent() const;
  std::string absent_from(const std::string& what) const;

  Rules rules_;
  const Send send_;
  std::map<int, Visitor> visitors_;  ///< by session: who has come
  std::map<int, int> session_of_;    ///< by rank
  std::map<std::string, std::string> values_;
  std::map<std::string, Exchange> exchanges_;
  std::optional<Refusal> refused_;
  std::set<int> told_;  ///< ranks that were there to hear it
  std::optional<std::string> failed_;
  std::optional<Deadline> give_up_;
  Deadline::duration limit_{0};  ///< the time of the rank that gives up first
  Strangers strangers_;
  bool begun_ = false;
  int left_ = 0;
};

}  // namespace hvd::rendezvous
