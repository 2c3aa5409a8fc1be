#include "negotiation/wait_inquiries.h"

#include <algorithm>
#include <chrono>

namespace hvd::control {

void WaitInquiries::ask(int rank, const wire::WaitQuestion& question, RankSet suspects,
                        const RankSet& departed, TimePoint now) {
  const wire::Request& request = question.request;
  // A question with another position may be about another use of the name.
  const auto same = std::ranges::find_if(inquiries_, [&](const Inquiry& inquiry) {
    return inquiry.result.request.process_set == request.process_set &&
           inquiry.result.request.name == request.name &&
           inquiry.after == question.sequence_position;
  });
  if (same != inquiries_.end()) {
    same->askers.emplace_back(rank, question.question);
    same->result.unanswered.remove(RankSet(rank));  // it has submitted the operation
    same->result.missing.erase(rank);
    return;
  }
  Inquiry& inquiry = inquiries_.emplace_back();
  inquiry.probe = ++last_probe_;
  inquiry.since = now;
  inquiry.until = now + std::chrono::milliseconds(question.limit_ms);
  inquiry.after = inquiry.reached = question.sequence_position;
  inquiry.askers = {{rank, question.question}};
  inquiry.result.request = request;
  suspects.remove(RankSet(rank));
  for_each_rank(intersection(suspects, departed),
                [&](int gone) { inquiry.result.missing[gone] = "has called shutdown()"; });
  suspects.remove(departed);
  for_each_rank(suspects, [&](int suspect) {
    probes_.emplace_back(
        suspect, wire::WaitProbe{inquiry.probe, inquiry.after, request.process_set, request.name});
  });
  inquiry.result.unanswered = std::move(suspects);
}

void WaitInquiries::accept(int source, const wire::WaitReply& reply) {
  const auto found = std::ranges::find(inquiries_, reply.probe, &Inquiry::probe);
  if (found == inquiries_.end() || !contains(found->result.unanswered, source)) return;
  found->result.unanswered.remove(RankSet(source));
  found->reached = latest(found->reached, reply.sequence_position);
  if (!reply.submitted) found->result.missing[source] = reply.activity;
}

std::optional<TimePoint> WaitInquiries::deadline() const {
  std::optional<TimePoint> next;
  for (const Inquiry& inquiry : inquiries_)
    next = std::min(next.value_or(inquiry.until), inquiry.until);
  return next;
}

}  // namespace hvd::control
