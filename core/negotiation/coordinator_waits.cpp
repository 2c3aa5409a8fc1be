// The coordinator's answers to ranks whose waits have taken too long.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/coordinator.h"
#include "negotiation/validator.h"

namespace hvd::control {
namespace {

constexpr std::size_t kMaxRanksShown = 8;

}  // namespace

void Coordinator::ask(int rank, const wire::WaitQuestion& question, TimePoint now) {
  const wire::Request& request = question.request;
  RankSet suspects = members_of(request);
  if (!suspects.empty() && !contains(suspects, rank))
    throw Error(
        text("rank ", rank, " asks about ", describe(request), ", in which it takes no part"));
  if (const PendingTensor* const pending = table_.find(request))
    suspects = intersection(suspects, table_.missing(*pending));
  suspects.remove(table_.joined());
  waits_.ask(rank, question, std::move(suspects), departures_.ranks(), now);
}

// Empty for a removed set. A rank that has not applied the removal may still ask about it.
RankSet Coordinator::members_of(const wire::Request& request) const {
  if (request.by_members())
    return intersection(RankSet::of(request.new_set), RankSet(0, static_cast<int>(ranks_) - 1));
  return sets_.contains(request.process_set) ? sets_.rank_set(request.process_set) : RankSet();
}

std::vector<WaitInquiries::Outgoing> Coordinator::wait_messages(TimePoint now) {
  return waits_.release(
      now, sequence_, [&](const WaitInquiries::Result& result) { return wait_text(result, now); });
}

std::optional<TimePoint> Coordinator::next_deadline() const {
  const std::optional<TimePoint> stalls = stalls_.next_deadline(table_);
  const std::optional<TimePoint> waits = waits_.deadline();
  if (!stalls || !waits) return stalls ? stalls : waits;
  return std::min(*stalls, *waits);
}

std::string Coordinator::wait_text(const WaitInquiries::Result& result, TimePoint now) const {
  const std::size_t missing =
      result.missing.size() + static_cast<std::size_t>(count(result.unanswered));
  const wire::Request& request = result.request;
  const int members = count(members_of(request));
  if (members == 0) return text("in process set ", request.process_set, ", which was removed");
  if (missing == 0) {
    const PendingTensor* const pending = table_.find(request);
    if (pending != nullptr && pending->held)
      return "for the rest of " + StallInspector::group_text(*pending);
    if (request.group_size > 0)
      return text("for the rest of group '", request.group_key(),
                  "': every rank has submitted this member");
    return "although every rank has submitted it";
  }
  std::vector<std::string> ranks;
  for (const auto& [rank, activity] : result.missing)
    ranks.push_back(text(stalls_.rank_text(rank), " ", activity));
  for_each_rank(result.unanswered, [&](int rank) {
    ranks.push_back(text(stalls_.rank_text(rank), " has not replied for ", result.waited,
                         ", and as far as rank 0 knows it ",
                         stalls_.activity_text(table_, rank, now)));
  });
  if (ranks.size() > kMaxRanksShown) {
    const std::size_t more = ranks.size() - kMaxRanksShown;
    ranks.resize(kMaxRanksShown);
    ranks.push_back(text("and ", more, more == 1 ? " more rank" : " more ranks"));
  }
  return text("for ", missing, " of ", members, " ranks: ", join_text(ranks, "; "));
}

}  // namespace hvd::control
