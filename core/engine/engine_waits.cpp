// Describes on request why an operation still waits, and replies to the questions of other ranks.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "engine/engine.h"

namespace hvd::runtime {
namespace {

constexpr std::size_t kMaxAnswersShown = 8;

}  // namespace

// Note [Questions about waits]
// A question does not affect the operation. For a collective that waits for other ranks, the
// coordinator answers after it has probed the ranks that may be missing (control::WaitInquiries);
// for a send or recv, the other side answers. Neither changes the state of the negotiation or of a
// replayed schedule.
//
// The states of two ranks are compared at the same position in the set's sequence of operations. A
// probed rank replies when it has reached the position of the rank that asks. The answer is valid
// when the rank that asks has reached the positions of the ranks that replied. Otherwise an
// operation that has just run, or an earlier one of the same name, would be mistaken for a missing
// one.
bool Engine::describe_waits() {
  const bool work = submission_queue_.has_description_requests() || !descriptions_.empty() ||
                    !probes_.empty() || router_.has_wait_inquiries();
  if (!work) return false;
  if (submission_queue_.has_description_requests()) {
    for (auto& requested : submission_queue_.pop_description_requests())
      descriptions_.push_back({.description = std::move(requested)});
  }
  bool moved = answer_probes();
  moved = std::erase_if(descriptions_, [this](RequestedDescription& open) HVD_REQUIRES(
                                           progress_) { return describe(open); }) > 0 ||
          moved;
  while (router_.has_wait_inquiries()) {
    const std::vector<wire::AnyMessage> own = router_.send_wait_messages();
    for (const wire::AnyMessage& message : own) {
      if (const auto* const probe = std::get_if<wire::WaitProbe>(&message))
        probes_.push_back(*probe);
      if (const auto* const answer = std::get_if<wire::WaitAnswer>(&message))
        on_wait_answer(*answer);
    }
    if (own.empty()) break;
    answer_probes();
    moved = true;
  }
  return moved;
}

bool Engine::answer_probes() {
  return std::erase_if(probes_, [&](const wire::WaitProbe& probe) HVD_REQUIRES(progress_) {
           const wire::SequencePosition reached = sequence_position(probe.process_set);
           if (!reached.reached(probe.after)) return false;
           const bool submitted = has_submitted(probe);
           router_.reply({probe.probe, reached, submitted, submitted ? "" : own_activity()});
           return true;
         }) > 0;
}

wire::SequencePosition Engine::sequence_position(int process_set) const {
  return {negotiator_.last_applied(), steady_.position(process_set)};
}

bool Engine::has_submitted(const wire::WaitProbe& probe) const {
  const auto is_it = [&](const OperationPtr& operation) {
    return !operation->message && operation->request.process_set == probe.process_set &&
           operation->request.name == probe.name;
  };
  return std::ranges::any_of(all_outstanding(),
                             [&](const auto& entry) { return is_it(entry.second); }) ||
         std::ranges::any_of(submission_queue_.queued(), is_it);
}

std::string Engine::own_activity() const {
  const std::string last = last_quick_   ? text("last ended ", runtime::describe(*last_quick_))
                           : last_begun_ ? text("last submitted ", last_begun_->title(), " ",
                                                time_.step() - last_begun_at_, " ago")
                                         : "has submitted no operation yet";
  return text(last, " and ", points_.state_text());
}

bool Engine::waits_for_others(const OperationState& operation) const {
  if (outstanding_.contains(operation.order)) return true;
  return std::ranges::any_of(steady_.waiting(),
                             [&](const OperationPtr& waiting) { return &*waiting == &operation; });
}

bool Engine::describe(RequestedDescription& open) {
  WaitDescription& description = *open.description;
  const OperationState& operation = *description.operation();
  if (operation.done()) {
    description.write("");
    return true;
  }
  std::string rest = operation.message ? describe_message(open) : describe_unfinished(open);
  if (rest.empty()) return false;
  description.write(
      text(operation.title(), " has waited ", time_.step() - operation.submitted, " ", rest));
  return true;
}

// Continues "... has waited 1.0 s "; empty: the answer is on its way.
std::string Engine::describe_unfinished(RequestedDescription& open) {
  const OperationState& operation = *open.description->operation();
  const TimePoint now = time_.step();
  const bool late = now >= open.description->until();
  if (!waits_for_others(operation)) {
    for (const auto& [running, state] : executor_.running())
      if (&*running == &operation) return text("although every rank has submitted it: it ", state);
    return late ? "and is queued on this rank" : "";
  }
  if (!open.asked) {
    open.asked = true;
    open.asked_at = now;
    open.inquiry = ++last_question_;
    const auto left = std::max(open.description->until() - now, Duration::zero());
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(left * 2 / 3);
    router_.ask({.question = open.inquiry,
                 .limit_ms = static_cast<std::uint64_t>(limit.count()),
                 .sequence_position = sequence_position(operation.request.process_set),
                 .request = operation.request});
  }
  const bool answered =
      open.answer &&
      (late || sequence_position(operation.request.process_set).reached(open.answer->after));
  if (answered) return open.answer->text;
  if (!late) return "";
  return text(
      "for other ranks; rank 0, which knows which of them are missing, has not replied for ",
      now - open.asked_at);
}

std::string Engine::describe_message(RequestedDescription& open) {
  const OperationState& operation = *open.description->operation();
  const RankSet others = points_.other_sides(operation);
  const TimePoint now = time_.step();
  if (others.empty()) {
    for (const auto& [running, state] : points_.outstanding())
      if (&*running == &operation) return "and has " + state;
    return now >= open.description->until() ? "and is queued on this rank" : "";
  }
  if (!open.asked) {
    open.asked = true;
    open.asked_at = now;
    open.unanswered = difference(others, points_.left());
    open.inquiry = points_.inquire(open.unanswered);
    for_each_rank(intersection(others, points_.left()), [&](int rank) {
      open.answers.push_back(text("rank ", rank, " has called shutdown()"));
    });
  }
  if (!open.unanswered.empty() && now < open.description->until()) return "";
  std::vector<std::string> ranks = std::move(open.answers);
  for_each_rank(open.unanswered, [&](int rank) {
    ranks.push_back(text("rank ", rank, " has not replied for ", now - open.asked_at));
  });
  if (ranks.size() > kMaxAnswersShown) {
    const std::size_t more = ranks.size() - kMaxAnswersShown;
    ranks.resize(kMaxAnswersShown);
    ranks.push_back(text("and ", more, more == 1 ? " more rank" : " more ranks"));
  }
  return text(operation.message->sends() ? "for its recv" : "for its send", ": rank ",
              control_->rank(), " ", points_.state_text(), "; ", join_text(ranks, "; "));
}

void Engine::on_message_answer(std::uint64_t inquiry, int source, const std::string& activity) {
  for (RequestedDescription& open : descriptions_) {
    const bool expected = open.asked && open.description->operation()->message &&
                          open.inquiry == inquiry && contains(open.unanswered, source);
    if (!expected) continue;
    open.unanswered.remove(RankSet(source));
    open.answers.push_back(text("rank ", source, " ", activity));
  }
}

void Engine::on_wait_answer(const wire::WaitAnswer& answer) {
  for (RequestedDescription& open : descriptions_) {
    const bool expected =
        open.asked && !open.description->operation()->message && open.inquiry == answer.question;
    if (expected) open.answer = answer;
  }
}

}  // namespace hvd::runtime
