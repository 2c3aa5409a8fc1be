#include "fault/campaign_judge.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>

#include "base/text.h"

namespace hvd::campaign {
namespace {

// Extra time for a machine with fewer cores than ranks.
constexpr double kSlack = 1;
constexpr double kAtOnce = 1;

std::string rest_of(std::istringstream& words) {
  std::string text;
  std::getline(words >> std::ws, text);
  return text;
}

std::vector<int> read_list(const std::string& text) {
  std::vector<int> list;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) list.push_back(std::stoi(item));
  return list;
}

class Judge {
 public:
  Judge(const Plan& plan, const Run& run) : plan_(plan), run_(run) {}
  testing::JudgedJob judge();

 private:
  template <class... Parts>
  void blame(int rank, const Parts&... parts) {
    verdict_.defects.push_back(text("rank ", rank, " ", parts...));
  }
  const Witness& witness(int rank) const {
    static const Witness silent;
    const auto found = run_.ranks.find(rank);
    return found == run_.ranks.end() ? silent : found->second;
  }
  bool dies() const {
    return plan_.fault == Fault::kKill || plan_.fault == Fault::kStop ||
           plan_.fault == Fault::kThrow;
  }
  bool departs() const { return plan_.fault == Fault::kExit || plan_.fault == Fault::kLeave; }
  /// Whether a survivor may have received everything that it needed from the victim.
  bool may_be_done() const { return plan_.by_timer() && witness(plan_.victim).final; }

  void expect_end(int rank, const std::string& end);
  void expect_no_failures(int rank);
  void expect_loss(int rank);
  void expect_departure(int rank);
  void expect_failures(const std::string& error);
  void expect_fast(int rank, const Loss&, double limit);

  const Plan& plan_;
  const Run& run_;
  testing::JudgedJob verdict_;
};

void Judge::expect_end(int rank, const std::string& end) {
  const std::string& found = witness(rank).end;
  if (found != end)
    blame(rank, found.empty() ? "did not end" : text("ended as '", found, "'"), ", expected '", end,
          "'");
  for (const Loss& loss : witness(rank).losses) {
    if (end != "lost") blame(rank, "got ", loss.error, ": ", loss.message);
  }
}

void Judge::expect_no_failures(int rank) {
  for (const Failure& failure : witness(rank).failures) {
    blame(rank, "got ", failure.error, " for ", failure.key, ": ", failure.message);
  }
}

void Judge::expect_fast(int rank, const Loss& loss, double limit) {
  const double seconds = loss.time - witness(plan_.victim).fault;
  verdict_.detection = std::max(verdict_.detection, seconds);
  if (seconds > limit) blame(rank, "detected it after ", seconds, " s, expected ", limit);
}

void Judge::expect_loss(int rank) {
  expect_no_failures(rank);
  if (may_be_done() && witness(rank).end == "done") return;
  expect_end(rank, "lost");
  if (witness(rank).losses.empty()) return;
  const Loss& loss = witness(rank).losses.front();
  if (loss.error != "PeerLostError")
    blame(rank, "got ", loss.error, ", expected PeerLostError: ", loss.message);
  const bool named = loss.rank == plan_.victim || (loss.in_init && loss.rank == -1);
  if (!named) blame(rank, "blames rank ", loss.rank, ": ", loss.message);
  const bool seen_by_all = plan_.hosts.empty() && plan_.fault != Fault::kStop;
  // The shutdown() of an earlier epoch may have waited to detect the loss, and init() waits again.
  double earlier = 0;
  if (loss.in_init && !witness(rank).shutdowns.empty()) {
    earlier = std::accumulate(witness(rank).shutdowns.begin(),
                              std::prev(witness(rank).shutdowns.end()), 0.0);
  }
  expect_fast(rank, loss,
              kSlack + earlier +
                  (loss.in_init  ? kStartTimeout
                   : seen_by_all ? kAtOnce
                                 : kPeerTimeout));
  if (!witness(rank).shutdowns.empty() && witness(rank).shutdowns.back() > kAtOnce)
    blame(rank, "waited in shutdown() after the loss");
}

void Judge::expect_departure(int rank) {
  expect_no_failures(rank);
  if (rank == plan_.victim && plan_.fault == Fault::kExit) return;
  if (plan_.moment == Moment::kInInit) return expect_loss(rank);
  expect_end(rank, "left");
  if (rank == plan_.victim) return;
  for (const Loss& departure : witness(rank).departures) {
    expect_fast(rank, departure, kAtOnce + kSlack);
    if (departure.message.find(text("rank ", plan_.victim, " (")) == std::string::npos)
      blame(rank, "has an error that does not name the rank that left: ", departure.message);
  }
}

/// Expects that the same operations failed on all their members, with this class of error, and that
/// all other results were right.
void Judge::expect_failures(const std::string& error) {
  std::map<std::string, std::set<int>> failed;
  std::map<std::string, std::vector<int>> members;
  for (const auto& [rank, witness] : run_.ranks) {
    expect_end(rank, "done");
    for (const Failure& failure : witness.failures) {
      if (failure.error != error) {
        blame(rank, "got ", failure.error, ", expected ", error, ", for ", failure.key, ": ",
              failure.message);
      }
      failed[failure.key].insert(rank);
      members[failure.key] = failure.members;
      const double limit =
          plan_.fault == Fault::kLongDelay && rank != plan_.victim ? kStallShutdown : 0;
      if (failure.seconds > limit + kAtOnce + kSlack)
        blame(rank, "waited ", failure.seconds, " s for ", failure.key);
      if (rank != plan_.victim) verdict_.detection = std::max(verdict_.detection, failure.seconds);
    }
  }
  if (failed.empty()) verdict_.defects.push_back("no rank got a " + error);
  for (const auto& [key, ranks] : failed) {
    for (const int rank : members[key]) {
      if (!ranks.contains(rank)) blame(rank, "got no error for ", key);
    }
  }
}

testing::JudgedJob Judge::judge() {
  if (run_.cut_off)
    verdict_.defects.push_back(
        text("the run did not end and was cut off after ", run_.seconds, " s"));
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    for (const auto& wrong : witness(rank).wrong) blame(rank, wrong);
  }
  verdict_.plan = describe(plan_);
  verdict_.row = text(to_string(plan_.fault), ", ", plan_.ranks, " ranks");
  verdict_.output = run_.output;
  verdict_.happened = witness(plan_.victim).fault > 0;
  if (verdict_.happened && plan_.fault == Fault::kLongDelay) {
    expect_failures("StalledError");
    return verdict_;
  }
  if (plan_.fault == Fault::kDisagree || plan_.fault == Fault::kWrongKind) {
    if (!verdict_.happened) verdict_.defects.push_back("no operation was disputed");
    expect_failures("MismatchError");
    return verdict_;
  }
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    if (verdict_.happened && dies()) {
      if (rank != plan_.victim) expect_loss(rank);
    } else if (verdict_.happened && departs()) {
      expect_departure(rank);
    } else {
      expect_no_failures(rank);
      expect_end(rank, "done");
    }
  }
  return verdict_;
}

}  // namespace

void read_line(const std::string& line, std::map<int, Witness>& ranks) {
  const auto begin = line.find("@hvd ");
  if (begin == std::string::npos) return;
  std::istringstream words(line.substr(begin + 5));
  std::string event;
  int rank = -1;
  words >> event >> rank;
  Witness& witness = ranks[rank];
  if (event == "PID") words >> witness.pid;
  if (event == "FAULT") words >> witness.fault;
  if (event == "FINAL") witness.final = true;
  if (event == "WRONG") witness.wrong.push_back(rest_of(words));
  if (event == "SHUTDOWN") words >> witness.shutdowns.emplace_back();
  if (event == "END") words >> witness.end;
  if (event == "OP") {
    Failure& failure = witness.failures.emplace_back();
    std::string members;
    words >> failure.error >> failure.key >> members >> failure.seconds;
    failure.members = read_list(members);
    failure.message = rest_of(words);
  }
  if (event == "LOST") {
    Loss& loss = witness.losses.emplace_back();
    std::string where;
    words >> loss.error >> loss.time >> where >> loss.rank;
    loss.in_init = where == "init";
    loss.message = rest_of(words);
  }
  if (event == "LEFT") {
    Loss& departure = witness.departures.emplace_back();
    words >> departure.time;
    departure.message = rest_of(words);
  }
}

testing::JudgedJob judge(const Plan& plan, const Run& run) { return Judge(plan, run).judge(); }

}  // namespace hvd::campaign
