#include "bootstrap/store_rendezvous.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "bootstrap/admission.h"
#include "bootstrap/rank_processes.h"
#include "hvd/error.h"

// Note [What is in the store]
// As in a shared file (Note [A file that is left over]): rank 0 makes up a place with a new name
// and says so under one key; who has come to the place of an earlier job goes on when the name
// changes.
//
//   hvd/JOB/now              PLACE, where the job is
//   PLACE/count              how many have come there
//   PLACE/come.N             the N-th that has come: Arrival
//   PLACE/rank.R             who rank R is, when all have come: Arrival
//   PLACE/welcome.N          it may begin
//   PLACE/refused.N          it may not, and why (Refusal)
//   PLACE/failed             why nobody should go on waiting
//   PLACE/left               how many need nothing more
//   PLACE/claim.K, key.K     a value, and how often it was put
//
// A store has neither listing nor "if there is none": numbers that are added to are both.

namespace hvd::rendezvous {
namespace {

/// The store may be another process, which many ranks ask.
constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(20);

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(KeyValueStore store, const Introduction& own)
      : store_(std::move(store)),
        now_("hvd/" + own.job + "/now"),
        own_(arrival_of(own)),
        processes_(store_.name) {}

  void begin(Deadline);  // rank 0
  void come(Deadline);   // another rank

  int rank() const noexcept override { return own_.introduction.rank; }
  int size() const noexcept override { return own_.introduction.size; }
  const std::string& place() const noexcept override { return store_.name; }

  void put(std::string_view key, std::span<const std::byte> value) override {
    if (add("claim." + std::string(key), 1) != 1)
      throw Error("hvd::init: '" + std::string(key) + "' was put into " + place() + " twice");
    set("key." + std::string(key), value);
  }
  std::optional<Bytes> get(std::string_view key) override {
    return read("key." + std::string(key));
  }
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 private:
  /// What the store throws has no type that anybody above knows.
  template <typename Call>
  auto ask(Call&& call) {
    try {
      return call();
    } catch (const std::exception& error) {
      throw Error("hvd::init: the store " + place() + " has failed: " + error.what());
    }
  }
  void set(const std::string& name, std::span<const std::byte> value) {
    ask([&] { store_.set(place_ + "/" + name, value); });
  }
  std::optional<Bytes> read(const std::string& name) {
    return ask([&] { return store_.get(place_ + "/" + name); });
  }
  std::int64_t add(const std::string& name, std::int64_t amount) {
    return ask([&] { return store_.add(place_ + "/" + name, amount); });
  }
  std::string place_in_force() {
    const auto text = ask([&] { return store_.get(now_); });
    return text ? text_of(*text) : std::string();
  }
  /// Asks at growing intervals. False: the deadline has passed.
  template <typename Done>
  static bool ask_until(Deadline deadline, Done&& done);

  bool look_for_ranks();
  std::vector<int> absent() const;
  void look_at(std::int64_t number, const Arrival&);
  void note(std::int64_t number, const Arrival&);
  bool is_of_this_job(const Arrival& arrival) const {
    return is_of_job(arrival.introduction, own_.introduction);
  }
  void refuse(std::int64_t number, const Refusal& refusal) {
    set("refused." + std::to_string(number), encode(refusal));
  }
  [[noreturn]] void refuse_all(const Refusal&);
  void follow();
  bool welcomed();

  KeyValueStore store_;
  const std::string now_;
  const Arrival own_;
  std::string place_;
  RankProcesses processes_;
  Deadline deadline_ = {};
  Deadline::duration limit_{0};  ///< from the beginning to the deadline
  // Of rank 0.
  Deadline give_up_ = {};
  Strangers strangers_;
  std::int64_t looked_at_ = 0;
  std::vector<std::int64_t> number_of_;  ///< by rank; 0: it has not come
  std::vector<Arrival> come_;
  // Of another rank.
  std::int64_t number_ = 0;
};

template <typename Done>
bool StoreRendezvous::ask_until(Deadline deadline, Done&& done) {
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    if (done()) return true;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) return false;
    std::this_thread::sleep_for(std::min<Deadline::duration>(pause, left));
  }
}

void StoreRendezvous::begin(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  place_ = "hvd/" + own_.introduction.job + "/" + own_.identity;
  number_of_.assign(static_cast<std::size_t>(size()), 0);
  come_.resize(number_of_.size());
  ask([&] { store_.set(now_, bytes_of(place_)); });
  give_up_ = time_to_refuse(deadline);
  ask_until(deadline,
            [this] { return look_for_ranks() || std::chrono::steady_clock::now() >= give_up_; });
  if (!absent().empty()) {
    const std::vector<int> ranks = absent();
    refuse_all(missing(ranks, place(), limit_, kStartAsManyRanks, strangers_.text(ranks)));
  }
  come_.front() = own_;
  for (int other = 0; other < size(); ++other)
    set("rank." + std::to_string(other), encode(come_[static_cast<std::size_t>(other)]));
  for (int other = 1; other < size(); ++other)
    set("welcome." + std::to_string(number_of_[static_cast<std::size_t>(other)]), {});
}

std::vector<int> StoreRendezvous::absent() const {
  std::vector<int> ranks;
  for (int other = 1; other < size(); ++other)
    if (number_of_[static_cast<std::size_t>(other)] == 0) ranks.push_back(other);
  return ranks;
}

/// True when all are there.
bool StoreRendezvous::look_for_ranks() {
  if (place_in_force() != place_) {
    refuse_all({.usage = true,
                .text = "hvd::init: another process has begun at " + place() +
                        " as rank 0; start rank 0 once, and give each job a store or a name "
                        "(HVD_JOB_NAME) of its own"});
  }
  while (const auto bytes = read("come." + std::to_string(looked_at_ + 1))) {
    const std::int64_t number = ++looked_at_;
    const auto arrival = decode_arrival(*bytes);
    if (!arrival) {
      refuse(number, {.usage = true,
                      .text = "hvd::init: a rank has come to " + place() +
                              " with another version of hvd; start the same program everywhere"});
      continue;
    }
    look_at(number, *arrival);
  }
  if (const Arrival* const lost = processes_.any_ended())
    refuse_all(ended(*lost, place(), absent()));
  return absent().empty();
}

/// Who comes with another token or as a rank that is there is refused alone.
void StoreRendezvous::look_at(std::int64_t number, const Arrival& arrival) {
  const Introduction& other = arrival.introduction;
  if (const auto objection = object_to(arrival, own_.introduction, place())) {
    refuse(number, *objection);
    if (!is_of_this_job(arrival)) return strangers_.note(arrival, own_.introduction);
    note(number, arrival);
    refuse_all(*objection);
  }
  const auto at = static_cast<std::size_t>(std::clamp(other.rank, 0, size() - 1));
  if (at == 0 || number_of_[at] != 0) {
    return refuse(number, {.usage = true,
                           .text = "hvd::init: rank " + std::to_string(other.rank) +
                                   " has come to " + place() + " twice, first from " +
                                   (at == 0 ? own_ : come_[at]).who() + "; start each rank once"});
  }
  note(number, arrival);
  give_up_ = sooner(give_up_, arrival);
  processes_.add(arrival);
}

/// It has come, if it is one of those that are awaited.
void StoreRendezvous::note(std::int64_t number, const Arrival& arrival) {
  const int rank = arrival.introduction.rank;
  if (!is_of_this_job(arrival) || rank < 1 || rank >= size()) return;
  number_of_[static_cast<std::size_t>(rank)] = number;
  come_[static_cast<std::size_t>(rank)] = arrival;
}

/// Tells all that have come, and those that come soon.
void StoreRendezvous::refuse_all(const Refusal& refusal) {
  for (const std::int64_t number : number_of_)
    if (number != 0) refuse(number, refusal);
  ask_until(time_to_tell_late_comers(deadline_), [&] {
    while (const auto bytes = read("come." + std::to_string(looked_at_ + 1))) {
      refuse(++looked_at_, refusal);
      if (const auto arrival = decode_arrival(*bytes)) note(looked_at_, *arrival);
    }
    // Who comes after another rank 0 does not come here.
    return absent().empty() || place_in_force() != place_;
  });
  refusal.raise();
}

/// Goes where rank 0 is.
void StoreRendezvous::follow() {
  const std::string now = place_in_force();
  if (now.empty() || now == place_) return;
  place_ = now;
  number_ = add("count", 1);
  set("come." + std::to_string(number_), encode(own_, deadline_));
}

bool StoreRendezvous::welcomed() {
  if (number_ == 0) return false;
  const std::string number = std::to_string(number_);
  if (const auto refused = read("refused." + number)) {
    if (const auto refusal = decode_refusal(*refused)) refusal->raise();
  }
  return read("welcome." + number).has_value();
}

void StoreRendezvous::come(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  const bool begun = ask_until(deadline, [this] {
    follow();
    return welcomed();
  });
  if (begun) return;
  throw PeerLostError("hvd::init: rank 0 has not " +
                          std::string(number_ == 0 ? "come to " : "answered at ") + place() + " " +
                          within(limit_) +
                          "; give all ranks the same store, and see whether rank 0 has "
                          "ended",
                      0);
}

std::optional<Bytes> StoreRendezvous::wait(std::string_view key, int from, Deadline deadline) {
  return processes_.wait(from,
                         {.value = [&] { return get(key); },
                          .failure = [this] { return read("failed"); },
                          .arrival = [&] { return read("rank." + std::to_string(from)); }},
                         [deadline](const auto& done) { ask_until(deadline, done); });
}

void StoreRendezvous::fail(const Failure& failure) noexcept {
  try {
    if (add("failures", 1) == 1) set("failed", encode(failure));
  } catch (const std::exception&) {
    // The others wait until their deadline.
  }
}

void StoreRendezvous::leave(Deadline deadline) noexcept {
  try {
    if (rank() != 0) {
      add("left", 1);
      return;
    }
    // The store may end with this process.
    ask_until(deadline, [this] { return add("left", 0) >= size() - 1; });
  } catch (const std::exception&) {
    // There is nobody left to tell.
  }
}

}  // namespace

std::unique_ptr<Rendezvous> meet_in_store(KeyValueStore store, const Introduction& own,
                                          Deadline deadline) {
  check(own);
  auto made = std::make_unique<StoreRendezvous>(std::move(store), own);
  if (own.rank == 0) {
    made->begin(deadline);
  } else {
    made->come(deadline);
  }
  return made;
}

}  // namespace hvd::rendezvous
