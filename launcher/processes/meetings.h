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

#include "bootstrap/meeting.h"
#include "reports/report.h"

namespace hvd::launcher {

/// Serves the meetings of a job's ranks under hvdrun (core/bootstrap/meeting.h), one for each time
/// that they call hvd::init(). One gathers at a time; those that have begun go on beside it until
/// all have left. Not thread-safe.
///
/// Who comes is heard if he has the job's token. Who comes as a rank, or with a size, that hvdrun
/// has not started contradicts all; who comes as a rank that another process has begun as, and has
/// not left since, is refused alone. A contradiction is told to each rank once, whenever it comes.
class Meetings {
 public:
  using Bytes = std::shared_ptr<const rendezvous::Bytes>;
  using Send = std::function<void(int rank, std::uint32_t session, const Bytes&, bool last)>;

  /// `job`, `token`: as the ranks have them.
  Meetings(int size, std::string job, std::string token, Send);

  /// What a process of the rank says. Sessions are numbered per rank.
  void take(int rank, const MeetingBytes& said, Deadline now);
  /// The rank's program has ended, or nothing is known of it any more: it will not come again. Who
  /// waits for it, or will, hears of the first.
  /// @param how "exit code 3"
  /// @param of_another it has been told that another rank is lost, whose end is about to be known.
  /// If it is not, this one is named after a second
  void rank_ended(int rank, const std::string& how, bool of_another, Deadline now);
  /// Ever, and were it refused: then it hears from hvd what happens.
  bool has_come(int rank) const { return has_come_[static_cast<std::size_t>(rank)]; }
  std::optional<Deadline> next_deadline() const;
  void on_time(Deadline now);

 private:
  using MeetingPtr = std::shared_ptr<rendezvous::Meeting>;
  struct Session {
    int rank = 0;
    std::uint32_t number = 0;
    std::string incoming = {};
    MeetingPtr meeting = {};  ///< once it has come to one
  };
  using Key = std::pair<int, std::uint32_t>;  ///< rank and number

  bool cut_frames(int id, Deadline now);
  bool handle(int id, std::string_view frame, Deadline now);
  /// What hvdrun itself has against one that comes.
  std::optional<rendezvous::Refusal> object_to(int id, const rendezvous::Arrival&) const;
  std::optional<rendezvous::Refusal> contradiction(int rank, const rendezvous::Arrival&) const;
  void cannot_begin(const rendezvous::Refusal&);
  const MeetingPtr& gathering();
  void drop(int id, bool tell);
  void end(int id);
  void note_contradiction();
  void tidy_up();

  const int size_;
  const std::string job_, token_;
  const Send send_;
  std::map<int, Session> sessions_;
  std::map<Key, int> id_of_;
  std::vector<std::set<int>> ids_of_rank_;
  std::vector<bool> has_come_;
  std::optional<rendezvous::Refusal> contradiction_;
  std::set<int> untold_;                      ///< of it: ranks that have not come since
  std::optional<rendezvous::Refusal> ended_;  ///< the first rank that has
  std::optional<rendezvous::Refusal> ended_of_another_;
  std::optional<Deadline> name_it_at_;  ///< the latter
  MeetingPtr gathering_;
  std::vector<MeetingPtr> meetings_;  ///< with the one that gathers
  std::vector<int> told_;             ///< sessions that have been sent their last
  int next_id_ = 0;
};

}  // namespace hvd::launcher
