#include "bootstrap/rank_zero.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bootstrap/arrivals.h"

namespace hvd::rendezvous {
namespace {

using Clock = std::chrono::steady_clock;

/// Limit of the keys of one kind for which rank 0 waits at the same time.
constexpr std::size_t kMaxKeys = 16;
/// Time for a refused process to read its answer before the values are removed.
constexpr auto kTimeToReadRefusal = std::chrono::seconds(1);
/// Limit of the arrivals that were counted but not stored yet and that rank 0 remembers.
constexpr std::size_t kMaxOpenArrivals = 4096;

/// Rank 0: begins the run, decides which processes take part, and collects the parts.
class RankZero final : public Rendezvous {
 public:
  RankZero(std::unique_ptr<Store>, const RankInfo&, std::span<const std::byte> payload, Deadline,
           Deadline::duration limit);

  void contribute(const std::string& what, std::span<const std::byte> mine, Deadline,
                  Turn) override;
  bool step(Deadline until) override;
  void leave(Deadline) noexcept override;

 private:
  std::optional<Store::Found> serve(std::vector<std::string> keys, Deadline until);
  void find_open_arrivals();
  void handle_arrival(std::int64_t number, const Bytes&);
  bool collect(Deadline until);
  void publish(const std::vector<std::string>& parts);
  void check_obstacles();
  std::optional<Refusal> find_obstacle();
  bool replaced();
  [[noreturn]] void raise_failure(std::span<const std::byte> failure);
  [[noreturn]] void fail_all(const Refusal& reason);
  void forget_leaver(int rank);
  void wait_until_left(Deadline);

  Bytes notice_;
  Arrivals arrivals_;
  std::int64_t counted_ = 0;        ///< the arrivals up to this number have been read or are open
  std::set<std::int64_t> open_;     ///< arrivals that were counted and not stored yet
  std::int64_t next_open_ = 0;      ///< serve() waits for this one and later ones first
  std::optional<Refusal> refusal_;  ///< the answer to all arrivals from now on
  Deadline give_up_;                ///< when ranks that have not arrived are missing
  Deadline next_check_ = {};
  std::set<int> awaited_;     ///< ranks whose part is missing
  std::set<int> uninformed_;  ///< while the run fails: ranks that have not arrived
  struct Leaver {
    int rank = -1;        ///< -1: a process that was refused
    Deadline until = {};  ///< rank 0 waits for the process until then
  };
  std::map<std::int64_t, Leaver> leavers_;  ///< by arrival: processes that have not left
  std::vector<std::string> collected_;
};

RankZero::RankZero(std::unique_ptr<Store> store, const RankInfo& own,
                   std::span<const std::byte> payload, Deadline deadline, Deadline::duration limit)
    : Rendezvous(std::move(store), own, deadline, limit),
      arrivals_(own, run_ = random_id(), url_, text_of(payload), !store_->notices_loss()),
      give_up_(refusal_time(deadline)) {
  notice_ = encode(RunNotice{.run = run_, .process = process_});
  store_->publish_on_loss(key("outcome"), encode(ended_early(0, process_, url_)), "", "", deadline);
  store_->set(run_key(), notice_, deadline);
}

/// Waits for one of the keys, and answers an arrival instead if one is there first.
std::optional<Store::Found> RankZero::serve(std::vector<std::string> keys, Deadline until) {
  const std::size_t own_keys = keys.size();
  std::vector<std::int64_t> numbers;
  // Some arrivals may never be stored, so after a wait without a result the next wait is for later
  // ones.
  auto open = open_.lower_bound(next_open_);
  while (numbers.size() < std::min(kMaxKeys, open_.size())) {
    if (open == open_.end()) open = open_.begin();
    numbers.push_back(*open++);
  }
  if (!numbers.empty()) next_open_ = numbers.back() + 1;
  if (open_.size() < kMaxOpenArrivals) numbers.push_back(counted_ + 1);
  for (const std::int64_t number : numbers) keys.push_back(key("arrival.", number));
  auto found = store_->wait(keys, until);
  if (!found) {
    find_open_arrivals();
  } else if (found->index >= own_keys) {
    handle_arrival(numbers[found->index - own_keys], found->value);
    found.reset();
  }
  return found;
}

/// Finds arrivals that were counted but not stored. They may never be stored, so later arrivals
/// must not wait for them.
void RankZero::find_open_arrivals() {
  const std::int64_t count = store_->add(key("arrivals"), 0, call_deadline());
  while (counted_ < count && open_.size() < kMaxOpenArrivals) open_.insert(++counted_);
}

void RankZero::handle_arrival(std::int64_t number, const Bytes& bytes) {
  if (number > counted_) counted_ = number;
  open_.erase(number);
  const auto now = Clock::now();
  Answer answer;
  if (refusal_) {
    answer.refusal = *refusal_;
    if (const auto arrival = decode_arrival(bytes)) uninformed_.erase(arrival->rank);
  } else {
    answer = arrivals_.decide(bytes);
    if (const auto left = arrivals_.shortest_time())
      give_up_ = std::min(give_up_, refusal_time(now + *left, now));
  }
  if (answer.accepted) {
    leavers_[number] = {answer.rank, Deadline::max()};
    store_->set(key("accepted.", number), bytes_of(answer.proof), call_deadline());
  } else {
    leavers_[number] = {-1, now + kTimeToReadRefusal};
    store_->set(key("refused.", number), encode(answer.refusal), call_deadline());
  }
}

bool RankZero::step(Deadline until) {
  if (exchange_ > 1) return collect(std::min(until, deadline_));
  if (!arrivals_.complete()) {
    if (const auto failed = serve({key("outcome")}, std::min(until, give_up_)))
      fail_all(decode_failure(failed->value));
    if (const auto objection = arrivals_.objection()) fail_all(*objection);
    check_obstacles();
  }
  if (!arrivals_.complete()) {
    if (Clock::now() < give_up_) return false;
    const std::vector<int> ranks = arrivals_.absent();
    fail_all(missing(ranks, url_, limit_, arrivals_.refused(ranks) + store_->remarks(ranks)));
  }
  publish(arrivals_.take_payloads());
  return true;
}

void RankZero::contribute(const std::string& what, std::span<const std::byte> mine,
                          Deadline deadline, Turn turn) {
  ++exchange_;
  last_ = turn == Turn::kLast;
  what_ = what;
  deadline_ = deadline;
  collected_.assign(static_cast<std::size_t>(size()), {});
  collected_.front() = text_of(mine);
  for (int other = 1; other < size(); ++other) awaited_.insert(awaited_.end(), other);
}

bool RankZero::collect(Deadline until) {
  if (!awaited_.empty()) {
    // The failure is the first key, so that rank 0 fails as soon as the others do.
    std::vector<std::string> keys = {key("outcome")};
    for (const int rank : awaited_)
      if (keys.size() <= kMaxKeys) keys.push_back(key("part.", exchange_, ".", rank));
    if (auto found = serve(std::move(keys), until)) {
      if (found->index == 0) raise_failure(found->value);
      const auto rank = std::next(awaited_.begin(), static_cast<std::ptrdiff_t>(found->index - 1));
      collected_[static_cast<std::size_t>(*rank)] = text_of(found->value);
      awaited_.erase(rank);
    } else {
      check_obstacles();
    }
  }
  if (!awaited_.empty()) {
    if (Clock::now() < deadline_) return false;
    const auto absent =
        Refusal::lost(*awaited_.begin(),
                      text("hvd::init: rank ", *awaited_.begin(), " joined at ", url_,
                           " and has not sent its ", what_, " in time; see whether it has ended"));
    fail(absent);
    absent.raise();
  }
  publish(collected_);
  return true;
}

void RankZero::publish(const std::vector<std::string>& parts) {
  Bytes value = join_fields(parts);
  std::string proof;
  if (exchange_ == 1)
    proof = own_.token.empty() ? std::string(kProofBytes, '0')
                               : proof_of_parts(run_, value, own_.token);
  const auto head = last_ ? success_mark() : bytes_of(proof);
  value.insert(value.begin(), head.begin(), head.end());
  if (!last_) {
    store_->set(parts_key(), value, call_deadline());
  } else if (!store_->create(parts_key(), value, call_deadline())) {
    raise_failure(store_->get(parts_key(), call_deadline()).value_or(Bytes()));
  }
  parts_ = *Parts::decode(std::move(value), head.size(), parts.size());
}

/// @param failure the outcome of the run
void RankZero::raise_failure(std::span<const std::byte> failure) {
  failure_known_ = true;
  decode_failure(failure).raise();
}

bool RankZero::replaced() {
  const auto now = store_->get(run_key(), call_deadline());
  return now && !now->empty() && *now != notice_;
}

/// Checks from time to time whether the run can still begin.
void RankZero::check_obstacles() {
  if (Clock::now() < next_check_) return;
  next_check_ = Clock::now() + kCheckInterval;
  const auto obstacle = find_obstacle();
  if (!obstacle) return;
  if (exchange_ == 1) fail_all(*obstacle);
  if (obstacle->kind == Refusal::Kind::kLost) fail(*obstacle);
  obstacle->raise();
}

std::optional<Refusal> RankZero::find_obstacle() {
  if (replaced()) {
    return Refusal::usage(text("hvd::init: another process has started at ", url_,
                               " as rank 0; start rank 0 once, and give each job its own "
                               "rendezvous address or name (HVD_JOB_NAME)"));
  }
  const Arrival* const lost = arrivals_.find_ended([this](int rank) {
    // The rank may have contributed before its end.
    return exchange_ == 1 || (awaited_.contains(rank) &&
                              !store_->get(key("part.", exchange_, ".", rank), call_deadline()));
  });
  if (lost == nullptr) return std::nullopt;
  return ended_early(lost->rank, lost->process, url_, arrivals_.absent());
}

/// Refuses all ranks that have arrived, and those that arrive soon.
void RankZero::fail_all(const Refusal& reason) {
  refusal_ = reason;
  for (int other = 1; other < size(); ++other)
    if (!arrivals_.has_arrived(other) && !arrivals_.was_refused(other))
      uninformed_.insert(uninformed_.end(), other);
  forget_leaver(reason.rank);  // it has ended
  failure_known_ = true;
  try {
    store_->create(key("outcome"), encode(reason), call_deadline());
    wait_until_left(late_joiner_deadline(deadline_));
  } catch (const std::exception&) {
    // hvdrun may report the end of a missing rank meanwhile, but the reason is already known.
  }
  reason.raise();
}

void RankZero::forget_leaver(int rank) {
  if (rank < 0) return;  // several ranks, or none
  std::erase_if(leavers_, [rank](const auto& leaver) { return leaver.second.rank == rank; });
}

/// Waits until all processes have left or ended, and removes the values if that happens in time.
/// Ranks that arrive later find no values and wait for another run.
void RankZero::wait_until_left(Deadline deadline) {
  deadline_ = deadline;
  while (!leavers_.empty() || !uninformed_.empty()) {
    const auto now = Clock::now();
    if (replaced() || (now >= deadline && !leavers_.empty())) return;  // they may still read
    if (now >= deadline) break;
    std::vector<std::string> keys;
    std::vector<std::int64_t> numbers;
    for (const auto& [number, leaver] : leavers_) {
      if (numbers.size() == kMaxKeys) break;
      numbers.push_back(number);
      keys.push_back(key("left.", number));
    }
    const Deadline until = std::min<Deadline>(deadline, now + kCheckInterval);
    const auto found = refusal_ ? serve(std::move(keys), until) : store_->wait(keys, until);
    if (found) {
      leavers_.erase(numbers[found->index]);
    } else {
      std::erase_if(leavers_, [&](const auto& each) {
        return each.second.until <= now || arrivals_.has_ended(each.second.rank);
      });
    }
  }
  store_->remove_all_if(run_key(), notice_, call_deadline());
}

void RankZero::leave(Deadline deadline) noexcept {
  try {
    wait_until_left(deadline);
  } catch (const std::exception&) {
    // Values that remain do no harm: see Note [Interleavings].
  }
}

}  // namespace

std::unique_ptr<Rendezvous> make_rank_zero(std::unique_ptr<Store> store, const RankInfo& own,
                                           std::span<const std::byte> payload, Deadline deadline,
                                           Deadline::duration limit) {
  return std::make_unique<RankZero>(std::move(store), own, payload, deadline, limit);
}

}  // namespace hvd::rendezvous
