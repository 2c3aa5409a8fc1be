#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/rendezvous_server.h"
#include "reports/report.h"

namespace hvd::launcher {

/// Serves the rendezvous of a job's ranks under hvdrun (core/bootstrap/rendezvous_server.h), one
/// for each time that they call hvd::init(). Ranks join one rendezvous at a time; earlier ones
/// continue beside it until all ranks have left them. Not thread-safe.
///
/// A process without the job's token is refused, and the other ranks are not affected. The same
/// holds for a second process of a rank, if the first has joined and not left. If a process joins
/// with another rank or size than hvdrun has given it, all ranks are refused. Each rank receives
/// this contradiction once, even if it joins later.
class RankRendezvous {
 public:
  using Bytes = std::shared_ptr<const rendezvous::Bytes>;
  using Send = std::function<void(int rank, std::uint32_t session, const Bytes&, bool last)>;

  /// @param job HVD_JOB_NAME of the ranks
  /// @param token HVD_JOB_TOKEN of the ranks
  RankRendezvous(int size, std::string job, std::string token, Send);

  /// Handles bytes from a process of the rank. Sessions are numbered per rank.
  void receive(int rank, const RendezvousBytes& received, Deadline now);
  /// Records that the rank's program has ended or is out of reach, so that it will not join again.
  /// Waiting ranks are refused, with the first rank that has ended as the reason.
  /// @param how for example "exit code 3"
  /// @param after_loss whether the rank has reported the loss of another rank. That rank's end is
  /// then named instead, if it becomes known within a second
  void rank_ended(int rank, const std::string& how, bool after_loss, Deadline now);
  /// Whether the rank has ever sent a join request, even if it was refused. Such a rank uses hvd,
  /// which reports the loss of other ranks to it.
  bool has_requested_join(int rank) const {
    return requested_join_[static_cast<std::size_t>(rank)];
  }
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

 private:
  using ServerPtr = std::shared_ptr<rendezvous::RendezvousServer>;
  struct Session {
    int rank = 0;
    std::uint32_t number = 0;
    std::string incoming = {};
    ServerPtr server = {};  ///< serves the rendezvous that the process has joined; null before
  };

  bool process_frames(int id, Deadline now);
  bool handle(int id, std::string_view frame, Deadline now);
  /// The reason why hvdrun itself refuses a process; nullopt if it accepts the process.
  std::optional<rendezvous::Refusal> find_objection(int id, const rendezvous::JoinRequest&) const;
  std::optional<rendezvous::Refusal> contradiction(int rank, const rendezvous::JoinRequest&) const;
  void refuse_from_now_on(const rendezvous::Refusal&);
  const ServerPtr& joining_server();
  void drop(int id, bool notify);
  void forget(int id);
  void remember_contradiction();
  void tidy_up();

  const int size_;
  const std::string job_, token_;
  const Send send_;
  std::map<int, Session> sessions_;
  std::map<std::pair<int, std::uint32_t>, int> id_of_;  ///< by rank and number
  std::vector<std::set<int>> ids_of_rank_;
  std::vector<bool> requested_join_;
  std::optional<rendezvous::Refusal> contradiction_;
  std::set<int> contradiction_unsent_;        ///< ranks that have not received it
  std::optional<rendezvous::Refusal> ended_;  ///< names the first rank that has ended
  /// Names a rank that has ended after it reported the loss of another. Becomes `ended_` at
  /// `blame_at_`, unless the other rank's end becomes known first.
  std::optional<rendezvous::Refusal> ended_after_loss_;
  std::optional<Deadline> blame_at_;
  ServerPtr joining_;                ///< serves the rendezvous that ranks join now
  std::vector<ServerPtr> servers_;   ///< including `joining_`
  std::vector<int> ended_sessions_;  ///< sessions that have been sent their last frame
  int next_id_ = 0;
};

}  // namespace hvd::launcher
