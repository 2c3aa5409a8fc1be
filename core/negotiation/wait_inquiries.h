#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// The coordinator's answers to ranks that ask which ranks an operation waits for:
///
///   rank that asks        coordinator             ranks that may be missing
///   WaitQuestion -------> WaitProbe ------------> once at the position of the rank that asks
///                <------- WaitAnswer <----------- WaitReply
///
/// Each rank reports its own state, so the answer depends neither on reports that a rank of the
/// tree holds back nor on a replayed schedule, of which the coordinator has no record. Ranks that
/// ask about the same operation share the probes. If replies are missing at the deadline, the
/// answer is sent without them.
///
/// Coordinator only; pure; not thread-safe.
class WaitInquiries {
 public:
  /// The outcome for one operation.
  struct Result {
    wire::Request request = {};
    Duration waited{};  ///< for replies
    RankSet unanswered = {};
    std::map<int, std::string> missing = {};  ///< ranks without it, and their activities
  };
  /// A message to a rank.
  using Outgoing = std::pair<int, wire::AnyMessage>;

  /// Accepts a rank's question.
  /// @param suspects ranks that may not have submitted the operation
  /// @param departed missing ranks that have called shutdown(), which are not asked
  void ask(int rank, const wire::WaitQuestion&, RankSet suspects, const RankSet& departed,
           TimePoint now);
  /// Ignores a reply that arrives too late.
  void accept(int source, const wire::WaitReply&);
  /// Removes and returns the messages that are due.
  /// @param describe makes the text of a WaitAnswer
  template <class Describe>
  std::vector<Outgoing> release(TimePoint now, std::uint64_t last_plan, const Describe& describe) {
    std::vector<Outgoing> messages = std::exchange(probes_, {});
    std::erase_if(inquiries_, [&](Inquiry& inquiry) {
      if (!inquiry.result.unanswered.empty() && now < inquiry.until) return false;
      inquiry.result.waited = now - inquiry.since;
      const std::string text = describe(inquiry.result);
      inquiry.reached.plan = std::max(inquiry.reached.plan, last_plan);
      for (const auto& [rank, question] : inquiry.askers)
        messages.emplace_back(rank, wire::WaitAnswer{question, inquiry.reached, text});
      return true;
    });
    return messages;
  }
  bool empty() const noexcept { return inquiries_.empty() && probes_.empty(); }
  /// The time at which release() may return something even if no reply arrives.
  std::optional<TimePoint> deadline() const;

 private:
  struct Inquiry {
    std::uint64_t probe = 0;
    TimePoint since{};
    TimePoint until{};
    wire::SequencePosition after = {};    ///< of the first rank that asked
    wire::SequencePosition reached = {};  ///< the latest of the ranks that replied
    std::vector<std::pair<int, std::uint64_t>> askers = {};  ///< ranks and their questions
    Result result = {};
  };

  std::vector<Inquiry> inquiries_;
  std::vector<Outgoing> probes_;
  std::uint64_t last_probe_ = 0;
};

}  // namespace hvd::control
