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
/// A process without the job's token is refused alone, as is one of a rank that another process has
/// joined as and not left. A process with a rank or a size that hvdrun has not started is a
/// contradiction: all ranks are refused. Each rank receives a contradiction once, whenever it
/// joins.
class Meetings {
 public:
  using Bytes = std::shared_ptr<const rendezvous::Bytes>;
  using Send = std::function<void(int rank, std::uint32_t session, const Bytes&, bool last)>;

  /// @param job HVD_JOB_NAME of the ranks
  /// @param token HVD_JOB_TOKEN of the ranks
  Meetings(int size, std::string job, std::string token, Send);

  /// Handles bytes from a process of the rank. Sessions are numbered per rank.
  void take(int rank, const MeetingBytes& said, Deadline now);
  /// Records that the rank's program has ended or is out of reach, so that it will not join again.
  /// Ranks that wait for others receive the first end.
  /// @param how "exit code 3"
  /// @param of_another the rank has reported the loss of another rank, whose end is about to be
  /// known. If it is not known after a second, this rank is named
  void rank_ended(int rank, const std::string& how, bool of_another, Deadline now);
  /// Whether the rank has ever sent a join request, even if it was refused: hvd then reports to it
  /// what happens.
  bool has_come(int rank) const { return has_come_[static_cast<std::size_t>(rank)]; }
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

 private:
  using MeetingPtr = std::shared_ptr<rendezvous::RendezvousServer>;
  struct Session {
    int rank = 0;
    std::uint32_t number = 0;
    std::string incoming = {};
    MeetingPtr meeting = {};  ///< once it has joined one
  };
  using Key = std::pair<int, std::uint32_t>;  ///< rank and number

  bool cut_frames(int id, Deadline now);
  bool handle(int id, std::string_view frame, Deadline now);
  /// The reason for which hvdrun itself refuses a process; nullopt if it accepts the process.
  std::optional<rendezvous::Refusal> find_objection(int id, const rendezvous::JoinRequest&) const;
  std::optional<rendezvous::Refusal> contradiction(int rank, const rendezvous::JoinRequest&) const;
  void cannot_begin(const rendezvous::Refusal&);
  const MeetingPtr& gathering();
  void drop(int id, bool tell);
  void end(int id);
  void remember_contradiction();
  void tidy_up();

  const int size_;
  const std::string job_, token_;
  const Send send_;
  std::map<int, Session> sessions_;
  std::map<Key, int> id_of_;
  std::vector<std::set<int>> ids_of_rank_;
  std::vector<bool> has_come_;
  std::optional<rendezvous::Refusal> contradiction_;
  std::set<int> untold_;                      ///< ranks that have not received it
  std::optional<rendezvous::Refusal> ended_;  ///< names the first rank that has ended
  std::optional<rendezvous::Refusal> ended_of_another_;
  std::optional<Deadline> name_it_at_;  ///< when `ended_of_another_` counts
  MeetingPtr gathering_;
  std::vector<MeetingPtr> meetings_;  ///< including `gathering_`
  std::vector<int> told_;             ///< sessions that have been sent their last frame
  int next_id_ = 0;
};

}  // namespace hvd::launcher
