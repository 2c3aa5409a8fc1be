#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/store_server.h"
#include "reports/report.h"

namespace hvd::launcher {

/// Serves the store in which a job's ranks find each other under hvdrun
/// (core/bootstrap/store_server.h), for all their calls of hvd::init(). Not thread-safe.
///
/// A process without the job's token is refused, and the other ranks are not affected. The same
/// holds for a second process of a rank while the first one is in the job. If a process joins with
/// a rank or size other than hvdrun has assigned to it, all ranks are refused. Each rank receives
/// this error once, even if it joins later.
class RankRendezvous {
 public:
  using Bytes = rendezvous::StoreServer::Frame;
  using Send = std::function<void(int rank, std::uint32_t session, const Bytes&, bool last)>;

  /// @param job HVD_JOB_NAME of the ranks
  /// @param token HVD_JOB_TOKEN of the ranks
  RankRendezvous(int size, std::string job, std::string token, Send);

  /// Handles bytes from a process of the rank. Sessions are numbered per rank. A session that
  /// hvdrun has ended is forgotten once the last bytes of the process have been received.
  void receive(int rank, const RendezvousBytes& received, Deadline now);
  /// Records that the rank's program has ended or is out of reach, so that it will not join again.
  /// Waiting ranks are refused, with the first rank that has ended as the reason. If the rank had
  /// left the store in order, as a refused rank does, this happens after a second, so that rank 0
  /// can report the cause to the ranks first.
  /// @param how for example "exit code 3"
  /// @param after_loss whether the rank has reported the loss of another rank. That rank's end is
  /// then named instead, if it becomes known within a second
  void rank_ended(int rank, const std::string& how, bool after_loss, Deadline now);
  /// Whether a process of the rank has ever joined, even if it was refused afterwards. Such a rank
  /// uses hvd, which reports the loss of other ranks to it.
  bool has_requested_join(int rank) const {
    return requested_join_[static_cast<std::size_t>(rank)];
  }
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

 private:
  using Key = std::pair<int, std::uint32_t>;  ///< rank and number of a session
  struct Session {
    int id = 0;  ///< at the server
    std::string incoming = {};
    bool ended = false;
  };

  bool process_frames(Session&, Deadline now);
  std::optional<rendezvous::Refusal> objection(int id, const rendezvous::StoreHello&);
  void send(int id, const Bytes& frame, bool last);

  const int size_;
  const Send send_;
  std::map<Key, Session> sessions_;
  std::map<int, Key> keys_;  ///< of the sessions that have not ended, by number at the server
  int next_id_ = 0;
  std::vector<bool> requested_join_;
  std::optional<rendezvous::Refusal> contradiction_;
  std::set<int> contradiction_unsent_;  ///< ranks that have not received the contradiction
  std::vector<bool> left_;  ///< by rank: a process of the rank has left the store in order
  /// Names a rank whose end another rank may have caused. The ranks are refused for this reason at
  /// `report_suspicion_at_`, unless they receive the cause first.
  std::optional<rendezvous::Refusal> suspected_cause_;
  std::optional<Deadline> report_suspicion_at_;
  bool failed_ = false;
  rendezvous::StoreServer server_;
};

}  // namespace hvd::launcher
