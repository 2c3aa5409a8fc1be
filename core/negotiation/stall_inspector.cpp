#include "negotiation/stall_inspector.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"
#include "base/text.h"
#include "negotiation/validator.h"

namespace hvd::control {
namespace {

constexpr std::size_t kMaxRanksShown = 8;
constexpr std::size_t kMaxNamesShown = 3;

// Whether it waits for a rank or for the rest of its group. Ready tensors do not count: they are
// held back only while batches are under way.
bool waits(const PendingTensor& tensor) { return tensor.missing > 0 || tensor.held; }

std::string describe_all(const PendingTensor& tensor, std::size_t operations) {
  std::string first = describe(tensor.request);
  if (operations == 1) return first;
  return text(first, " and ", operations - 1,
              operations > 2 ? " more operations" : " more operation");
}

// Whether the two operations wait for the same ranks or for the rest of the same group, so that one
// warning covers both.
bool wait_alike(const ReadyTable& table, const PendingTensor& a, const PendingTensor& b) {
  if (a.held || b.held) return a.held && b.held && a.groups.front() == b.groups.front();
  return table.missing(a) == table.missing(b);
}

// The operations that a rank has submitted and that have not run yet.
std::string waits_for(const ReadyTable& table, int rank) {
  std::vector<std::string> names;
  for (const PendingTensor& tensor : table.pending()) {
    if (!table.has_reported(tensor, rank)) continue;
    if (names.size() == kMaxNamesShown) {
      names.push_back("...");
      break;
    }
    names.push_back(describe(tensor.request));
  }
  return names.empty() ? "does not wait for hvd" : "waits for " + join_text(names, ", ");
}

}  // namespace

StallInspector::StallInspector(StallLimits limits, std::vector<std::string> host_of_rank)
    : limits_(limits), hosts_(std::move(host_of_rank)), last_(hosts_.size()) {}

void StallInspector::record_activity(RankSpan ranks, const std::string& name, TimePoint now) {
  // Ranks that submit the same operation share its name, so that equal entries have equal pointers.
  if (!latest_ || *latest_ != name) latest_ = std::make_shared<const std::string>(name);
  last_.assign(ranks, {latest_, now});
}

std::string StallInspector::missing_text(const ReadyTable& table, const PendingTensor& tensor,
                                         TimePoint now) const {
  const std::vector<int> missing = table.missing(tensor).to_vector();
  std::vector<std::string> ranks;
  for (const int rank : missing) {
    if (ranks.size() == kMaxRanksShown) {
      const std::size_t more = missing.size() - ranks.size();
      ranks.push_back(text("and ", more, more == 1 ? " more rank" : " more ranks"));
      break;
    }
    ranks.push_back(text(rank_text(rank), " ", activity_text(table, rank, now)));
  }
  return join_text(ranks, "; ");
}

std::string StallInspector::activity_text(const ReadyTable& table, int rank, TimePoint now) const {
  const Activity& activity = last_.at(rank);
  return text(activity.name
                  ? text("last submitted '", *activity.name, "' ", now - activity.when, " ago")
                  : "has submitted no operation yet",
              " and ", waits_for(table, rank));
}

std::string StallInspector::group_text(const PendingTensor& tensor) {
  HVD_EXPECT(!tensor.groups.empty(), "the operation is a member of a group");
  const TensorGroup& group = *tensor.groups.front();
  return text("group '", tensor.request.group_key(), "', of whose ", group.size, " members ",
              group.seen.size(), " were submitted by some rank and ", group.held.size(),
              " by every rank");
}

std::string StallInspector::rank_text(int rank) const {
  return text("rank ", rank, " (", hosts_[static_cast<std::size_t>(rank)], ")");
}

std::string StallInspector::waiting_text(const ReadyTable& table, const PendingTensor& tensor,
                                         std::size_t operations, TimePoint now) const {
  const std::string missing = tensor.held ? "the rest of " + group_text(tensor)
                                          : text(tensor.missing, " of ", tensor.members,
                                                 " ranks: ", missing_text(table, tensor, now));
  return text(describe_all(tensor, operations), operations > 1 ? " have waited " : " has waited ",
              now - tensor.first_seen, " for ", missing);
}

std::vector<std::string> StallInspector::warnings(ReadyTable& table, TimePoint now) {
  std::vector<std::string> texts;
  if (limits_.warning == Duration::zero()) return texts;
  for (PendingTensor& tensor : table.pending()) {
    if (now - tensor.first_seen < limits_.warning) break;  // the rest is younger
    if (tensor.warned || !waits(tensor)) continue;
    std::size_t operations = 0;
    for (PendingTensor& other : table.pending()) {
      if (other.warned || !waits(other) || !wait_alike(table, tensor, other)) continue;
      other.warned = true;
      ++operations;
    }
    texts.push_back(waiting_text(table, tensor, operations, now));
  }
  return texts;
}

void StallInspector::record_resumed(std::span<const PendingRef> tensors, TimePoint now) {
  std::size_t resumed = 0;
  std::optional<PendingRef> oldest;
  for (const PendingRef tensor : tensors) {
    if (!tensor->warned) continue;
    if (++resumed == 1 || tensor->first_seen < (*oldest)->first_seen) oldest = tensor;
  }
  if (!oldest) return;
  resumptions_.push_back(text(describe_all(**oldest, resumed),
                              resumed > 1 ? " go on after " : " goes on after ",
                              now - (*oldest)->first_seen, ": every rank has submitted ",
                              resumed > 1 ? "them" : "it", " by now"));
}

std::string StallInspector::deadlock_text(const ReadyTable& table, const RankSet& shut_down,
                                          Duration since) const {
  std::vector<std::pair<std::string, RankSet>> alike;
  for (int rank = 0; rank < static_cast<int>(hosts_.size()); ++rank) {
    std::string waits =
        contains(shut_down, rank) ? "has called shutdown()" : waits_for(table, rank);
    const auto same = std::ranges::find(alike, waits, &std::pair<std::string, RankSet>::first);
    if (same != alike.end()) {
      same->second.add(RankSet(rank));
    } else {
      alike.emplace_back(std::move(waits), RankSet(rank));
    }
  }
  std::vector<std::string> lines;
  for (const auto& [waits, ranks] : alike) {
    if (lines.size() == kMaxRanksShown) {
      lines.push_back("and so on");
      break;
    }
    const bool one = count(ranks) == 1;
    lines.push_back(text(
        rank_list(ranks),
        one ? text(" (", hosts_[static_cast<std::size_t>(ranks.lowest())], ")") : "", ": ", waits));
  }
  return text("every rank waits for another, and none has submitted anything for ", since,
              " (deadlock_timeout): ", join_text(lines, "; "),
              "; every rank must submit the same operations before it waits");
}

std::vector<std::string> StallInspector::waiting_texts(const ReadyTable& table, TimePoint now,
                                                       std::size_t most) const {
  std::vector<std::string> texts;
  for (const PendingTensor& tensor : table.pending()) {
    if (texts.size() == most) break;
    if (waits(tensor)) texts.push_back(waiting_text(table, tensor, 1, now));
  }
  return texts;
}

std::vector<PendingRef> StallInspector::expired(ReadyTable& table, TimePoint now) {
  std::vector<PendingRef> found;
  if (limits_.shutdown == Duration::zero()) return found;
  for (PendingRef tensor = table.pending().begin(); tensor != table.pending().end(); ++tensor) {
    if (now - tensor->first_seen < limits_.shutdown) break;
    if (waits(*tensor)) found.push_back(tensor);
  }
  return found;
}

std::string StallInspector::error_text(const ReadyTable& table, const PendingTensor& tensor,
                                       TimePoint now) const {
  if (tensor.held) {
    return text(describe(tensor.request),
                ": the rest of its group was not submitted by every rank within ", limits_.shutdown,
                " (stall_shutdown): ", group_text(tensor),
                "; every rank must submit all members of a group");
  }
  return text(describe(tensor.request), ": not submitted by every rank within ", limits_.shutdown,
              " (stall_shutdown); missing: ", missing_text(table, tensor, now),
              "; every rank of the process set must submit the same operations");
}

std::optional<TimePoint> StallInspector::next_deadline(const ReadyTable& table) const {
  std::optional<TimePoint> next;
  const auto consider = [&next](TimePoint when) { next = next ? std::min(*next, when) : when; };
  for (const PendingTensor& tensor : table.pending()) {
    if (!waits(tensor)) continue;
    if (limits_.shutdown != Duration::zero()) consider(tensor.first_seen + limits_.shutdown);
    if (limits_.warning == Duration::zero()) break;
    if (tensor.warned) continue;
    consider(tensor.first_seen + limits_.warning);
    break;  // the rest is younger
  }
  return next;
}

}  // namespace hvd::control
