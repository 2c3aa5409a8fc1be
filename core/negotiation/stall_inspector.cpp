#include "negotiation/stall_inspector.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "negotiation/validator.h"

namespace hvd::control {
namespace {

constexpr std::size_t kMostRanksTold = 8;
constexpr std::size_t kMostNamesTold = 3;

std::string seconds(Duration duration) {
  std::ostringstream out;
  out.setf(std::ios::fixed);
  out.precision(1);
  out << std::chrono::duration<double>(duration).count() << " s";
  return out.str();
}

// Whether it waits for a rank or for the rest of its group. Ready tensors are only held back while
// batches are under way.
bool waits(const PendingTensor& tensor) { return tensor.missing > 0 || tensor.held; }

std::string progress_of_group(const PendingTensor& tensor) {
  const TensorGroup& group = *tensor.groups.front();
  return "group '" + tensor.request.group_key() + "', of whose " + std::to_string(group.size) +
         " members " + std::to_string(group.seen.size()) + " were submitted by some rank and " +
         std::to_string(group.held.size()) + " by every rank";
}

std::string describe_all(const PendingTensor& tensor, std::size_t operations) {
  return describe(tensor.request) +
         (operations > 2   ? " and " + std::to_string(operations - 1) + " more operations"
          : operations > 1 ? " and 1 more operation"
                           : "");
}

// Whether they wait for the same ranks or for the rest of the same group, so that one warning
// covers both.
bool wait_alike(const ReadyTable& table, const PendingTensor& a, const PendingTensor& b) {
  if (a.held || b.held) return a.held && b.held && a.groups.front() == b.groups.front();
  return table.missing(a) == table.missing(b);
}

std::string text_of(const RankSet& ranks) {
  std::string text = count(ranks) == 1 ? "rank " : "ranks ";
  std::size_t told = 0;
  for (const RankRange range : ranks.ranges()) {
    if (told++ == kMostRanksTold) return text + ", ...";
    text += (told > 1 ? ", " : "") + std::to_string(range.first) +
            (range.last > range.first ? "-" + std::to_string(range.last) : "");
  }
  return text;
}

// The operations that a rank has submitted and that have not run yet.
std::string waits_for(const ReadyTable& table, int rank) {
  std::string text;
  std::size_t told = 0;
  for (const PendingTensor& tensor : table.pending()) {
    if (!table.has_reported(tensor, rank)) continue;
    if (told++ == kMostNamesTold) return text + ", ...";
    text += (text.empty() ? "waits for " : ", ") + describe(tensor.request);
  }
  return text.empty() ? "does not wait for hvd" : text;
}

}  // namespace

StallInspector::StallInspector(StallLimits limits, std::vector<std::string> host_of_rank)
    : limits_(limits), hosts_(std::move(host_of_rank)), last_(hosts_.size()) {}

void StallInspector::record_activity(RankSpan ranks, const std::string& name, TimePoint now) {
  // Ranks that do the same share the name, so that equal entries have equal pointers.
  if (!latest_ || *latest_ != name) latest_ = std::make_shared<const std::string>(name);
  last_.assign(ranks, {latest_, now});
}

std::string StallInspector::missing_text(const ReadyTable& table, const PendingTensor& tensor,
                                         TimePoint now) const {
  const std::vector<int> missing = table.missing_ranks(tensor);
  std::string text;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    if (i == kMostRanksTold)
      return text + "; and " + std::to_string(missing.size() - i) +
             (missing.size() - i == 1 ? " more rank" : " more ranks");
    const Activity& activity = last_.at(missing[i]);
    text += (i == 0 ? "rank " : "; rank ") + std::to_string(missing[i]) + " (" +
            hosts_[static_cast<std::size_t>(missing[i])] + ") ";
    text += !activity.name ? "has submitted no operation yet"
                           : "last submitted '" + *activity.name + "' " +
                                 seconds(now - activity.when) + " ago";
    text += " and " + waits_for(table, missing[i]);
  }
  return text;
}

std::string StallInspector::waiting_text(const ReadyTable& table, const PendingTensor& tensor,
                                         std::size_t operations, TimePoint now) const {
  const std::string text = describe_all(tensor, operations) +
                           (operations > 1 ? " have waited " : " has waited ") +
                           seconds(now - tensor.first_seen) + " for ";
  if (tensor.held) return text + "the rest of " + progress_of_group(tensor);
  return text + std::to_string(tensor.missing) + " of " + std::to_string(tensor.members) +
         " ranks: " + missing_text(table, tensor, now);
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
  if (oldest) resumptions_.push_back(resumption_text(**oldest, resumed, now));
}

/// @param operations of which this is the oldest
std::string StallInspector::resumption_text(const PendingTensor& tensor, std::size_t operations,
                                            TimePoint now) const {
  return describe_all(tensor, operations) + (operations > 1 ? " go on" : " goes on") + " after " +
         seconds(now - tensor.first_seen) + ": every rank has submitted " +
         (operations > 1 ? "them" : "it") + " by now";
}

std::string StallInspector::deadlock_text(const ReadyTable& table, const RankSet& shut_down,
                                          Duration since) const {
  std::vector<std::pair<std::string, RankSet>> alike;
  for (int rank = 0; rank < static_cast<int>(hosts_.size()); ++rank) {
    std::string text = contains(shut_down, rank) ? "has called shutdown()" : waits_for(table, rank);
    const auto same = std::find_if(alike.begin(), alike.end(),
                                   [&](const auto& entry) { return entry.first == text; });
    if (same != alike.end()) {
      same->second.add(RankSet(rank));
    } else {
      alike.emplace_back(std::move(text), RankSet(rank));
    }
  }
  std::string text = "every rank waits for another, and none has submitted anything for " +
                     seconds(since) + " (deadlock_timeout): ";
  for (std::size_t i = 0; i < alike.size(); ++i) {
    if (i == kMostRanksTold) {
      text += "; and so on";
      break;
    }
    const auto& [does, ranks] = alike[i];
    text += (i > 0 ? "; " : "") + text_of(ranks);
    if (count(ranks) == 1) text += " (" + hosts_[static_cast<std::size_t>(ranks.lowest())] + ")";
    text += ": " + does;
  }
  return text + "; every rank must submit the same operations before it waits";
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
    return describe(tensor.request) +
           ": the rest of its group was not submitted by every rank within " +
           seconds(limits_.shutdown) + " (stall_shutdown): " + progress_of_group(tensor) +
           "; every rank must submit all members of a group";
  }
  return describe(tensor.request) + ": not submitted by every rank within " +
         seconds(limits_.shutdown) +
         " (stall_shutdown); missing: " + missing_text(table, tensor, now) +
         "; every rank of the process set must submit the same operations";
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
