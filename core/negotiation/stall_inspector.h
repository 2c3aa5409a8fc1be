#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/ready_table.h"

namespace hvd::control {

struct StallLimits {
  Duration warning{};   ///< zero: never
  Duration shutdown{};  ///< zero: never
  Duration deadlock{};  ///< zero: never
};

/// Watches for operations that some ranks never submit, and describes these ranks and their last
/// operations. Coordinator only; pure.
class StallInspector {
 public:
  StallInspector(StallLimits limits, std::vector<std::string> host_of_rank);

  /// Records that these ranks have submitted operations, the last of which is `name`.
  void record_activity(RankSpan ranks, const std::string& name, TimePoint now);
  void record_activity(int rank, const std::string& name, TimePoint now) {
    record_activity(RankSet(rank), name, now);
  }
  /// One text per set of missing ranks, or per incomplete group, for operations that have exceeded
  /// the warning time since the last call.
  std::vector<std::string> warnings(ReadyTable&, TimePoint now);
  /// One sentence per waiting operation, oldest first, however short its wait. At most `most`
  /// sentences.
  std::vector<std::string> waiting_texts(const ReadyTable&, TimePoint now, std::size_t most) const;
  /// Operations that have waited for ranks, or for the rest of their group, for longer than the
  /// shutdown time.
  std::vector<PendingRef> expired(ReadyTable&, TimePoint now);
  /// The text of a StalledError.
  std::string error_text(const ReadyTable&, const PendingTensor&, TimePoint now) const;
  /// The text of a StalledError, after the operation's name, when every rank waits for another.
  std::string deadlock_text(const ReadyTable&, const RankSet& shut_down, Duration since) const;
  /// The last report of a rank, and the operations of the table that it waits for. Continues
  /// "rank 1 ...".
  std::string activity_text(const ReadyTable&, int rank, TimePoint now) const;
  /// "rank 1 (its host)".
  std::string rank_text(int rank) const;
  /// "group 'g', of whose 3 members 2 were submitted by some rank and 1 by every rank".
  /// @pre the operation is a member of a group
  static std::string group_text(const PendingTensor&);
  /// Records that these operations run now. There may have been warnings about some of them.
  void record_resumed(std::span<const PendingRef>, TimePoint now);
  /// Returns, once, a sentence for each record_resumed() whose operations had caused a warning.
  std::vector<std::string> release_resumptions() { return std::exchange(resumptions_, {}); }
  /// When one of the functions above may next return something.
  std::optional<TimePoint> next_deadline(const ReadyTable&) const;

 private:
  struct Activity {
    std::shared_ptr<const std::string> name = {};
    TimePoint when{};
    friend bool operator==(const Activity&, const Activity&) = default;
  };
  std::string waiting_text(const ReadyTable&, const PendingTensor&, std::size_t operations,
                           TimePoint now) const;
  std::string missing_text(const ReadyTable&, const PendingTensor&, TimePoint now) const;

  StallLimits limits_;
  std::vector<std::string> hosts_;
  RankMap<Activity> last_;
  std::shared_ptr<const std::string> latest_;
  std::vector<std::string> resumptions_;
};

}  // namespace hvd::control
