#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/text.h"
#include "bootstrap/admission.h"
#include "bootstrap/rendezvous.h"
#include "hvd/error.h"

// Note [Keys in the store]
// As in a shared file (Note [Files of an earlier job]): rank 0 makes a place with a new name and
// stores the name under one key. A rank that has joined in the place of an earlier job joins again
// when the name changes.
//
//   hvd/JOB/now              PLACE, the name of the job's place
//   PLACE/count              number of join requests
//   PLACE/join.N             the N-th JoinRequest
//   PLACE/rank.R             JoinRequest of rank R, once all have joined
//   PLACE/accepted.N         the N-th request is accepted
//   PLACE/refused.N          it is refused, and why (Refusal)
//   PLACE/failed             why the job does not begin
//   PLACE/left               number of ranks that have left
//   PLACE/claim.K, key.K     how often a value was put, and the value
//
// A store can neither list keys nor set a key only if it is new, so counters replace both.

namespace hvd::rendezvous {
namespace {

/// Pauses between polls: the store may be a process that many ranks poll.
constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(20);

class StoreRendezvous final : public Rendezvous {
 public:
  StoreRendezvous(KeyValueStore store, const RankInfo& own)
      : store_(std::move(store)),
        now_("hvd/" + own.job + "/now"),
        own_(join_request_of(own)),
        processes_(store_.name) {}

  void join_as_rank_0(Deadline);
  void join(Deadline);  // any other rank

  int rank() const noexcept override { return own_.info.rank; }
  int size() const noexcept override { return own_.info.size; }
  const std::string& place() const noexcept override { return store_.name; }

  void put(std::string_view key, std::span<const std::byte> value) override {
    if (add("claim." + std::string(key), 1) != 1)
      throw Error(text("hvd::init: '", key, "' was put into ", place(), " twice"));
    set("key." + std::string(key), value);
  }
  std::optional<Bytes> get(std::string_view key) override {
    return read("key." + std::string(key));
  }
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 private:
  /// Calls the store, and turns its exceptions, whose types are unknown here, into hvd::Error.
  template <typename Call>
  auto call_store(Call&& call) {
    try {
      return call();
    } catch (const std::exception& error) {
      throw Error(text("hvd::init: the store ", place(), " has failed: ", error.what()));
    }
  }
  void set(const std::string& name, std::span<const std::byte> value) {
    call_store([&] { store_.set(place_ + "/" + name, value); });
  }
  std::optional<Bytes> read(const std::string& name) {
    return call_store([&] { return store_.get(place_ + "/" + name); });
  }
  std::int64_t add(const std::string& name, std::int64_t amount) {
    return call_store([&] { return store_.add(place_ + "/" + name, amount); });
  }
  std::string current_place() {
    const auto name = call_store([&] { return store_.get(now_); });
    return name ? text_of(*name) : std::string();
  }
  /// Polls at growing intervals. Returns false if the deadline has passed.
  template <typename Done>
  static bool poll_store_until(Deadline deadline, Done&& done);

  bool find_joined_ranks();
  std::vector<int> absent() const;
  void handle(std::int64_t number, const JoinRequest&);
  void record(std::int64_t number, const JoinRequest&);
  bool is_of_this_job(const JoinRequest& request) const {
    return same_job(request.info, own_.info);
  }
  void refuse(std::int64_t number, const Refusal& refusal) {
    set(text("refused.", number), encode(refusal));
  }
  [[noreturn]] void refuse_all(const Refusal&);
  void follow_rank_0();
  bool accepted();

  KeyValueStore store_;
  const std::string now_;
  const JoinRequest own_;
  std::string place_;
  RankProcesses processes_;
  Deadline deadline_ = {};
  Deadline::duration limit_{0};  ///< from the call to the deadline
  // Used by rank 0 only.
  Deadline give_up_ = {};
  ForeignProcesses foreign_;
  std::int64_t handled_ = 0;             ///< number of join requests handled so far
  std::vector<std::int64_t> number_of_;  ///< by rank: number of its request; 0: not joined
  std::vector<JoinRequest> joined_;      ///< by rank
  // Used by the other ranks only.
  std::int64_t number_ = 0;  ///< of this rank's request; 0: not requested yet
};

template <typename Done>
bool StoreRendezvous::poll_store_until(Deadline deadline, Done&& done) {
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    if (done()) return true;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) return false;
    std::this_thread::sleep_for(std::min<Deadline::duration>(pause, left));
  }
}

void StoreRendezvous::join_as_rank_0(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  place_ = "hvd/" + own_.info.job + "/" + own_.identity;
  number_of_.assign(static_cast<std::size_t>(size()), 0);
  joined_.resize(number_of_.size());
  call_store([&] { store_.set(now_, bytes_of(place_)); });
  give_up_ = refusal_time(deadline);
  poll_store_until(deadline, [this] {
    return find_joined_ranks() || std::chrono::steady_clock::now() >= give_up_;
  });
  if (!absent().empty()) {
    const std::vector<int> ranks = absent();
    refuse_all(missing(ranks, place(), limit_, kStartAsManyRanks, foreign_.text(ranks)));
  }
  joined_.front() = own_;
  for (int other = 0; other < size(); ++other)
    set(text("rank.", other), encode(joined_[static_cast<std::size_t>(other)]));
  for (int other = 1; other < size(); ++other)
    set(text("accepted.", number_of_[static_cast<std::size_t>(other)]), {});
}

std::vector<int> StoreRendezvous::absent() const {
  std::vector<int> ranks;
  for (int other = 1; other < size(); ++other)
    if (number_of_[static_cast<std::size_t>(other)] == 0) ranks.push_back(other);
  return ranks;
}

/// Handles new join requests; true when all ranks have joined.
bool StoreRendezvous::find_joined_ranks() {
  if (current_place() != place_) {
    refuse_all({.usage = true,
                .text = text("hvd::init: another process has started at ", place(),
                             " as rank 0; start rank 0 once, and give each job a store or a name "
                             "(HVD_JOB_NAME) of its own")});
  }
  while (const auto bytes = read(text("join.", handled_ + 1))) {
    const std::int64_t number = ++handled_;
    const auto request = decode_join_request(*bytes);
    if (!request) {
      refuse(number,
             {.usage = true,
              .text = text("hvd::init: a rank has joined at ", place(),
                           " with another version of hvd; start the same program everywhere")});
      continue;
    }
    handle(number, *request);
  }
  if (const JoinRequest* const lost = processes_.any_ended())
    refuse_all(ended(*lost, place(), absent()));
  return absent().empty();
}

/// Accepts or refuses a request. A process with another job name or token, or whose rank has
/// already joined, is refused without refusing the other ranks.
void StoreRendezvous::handle(std::int64_t number, const JoinRequest& request) {
  const RankInfo& other = request.info;
  if (const auto objection = find_objection(request, own_.info, place())) {
    refuse(number, *objection);
    if (!is_of_this_job(request)) return foreign_.add(request, own_.info);
    record(number, request);
    refuse_all(*objection);
  }
  const auto at = static_cast<std::size_t>(std::clamp(other.rank, 0, size() - 1));
  if (at == 0 || number_of_[at] != 0) {
    return refuse(number,
                  {.usage = true,
                   .text = text("hvd::init: rank ", other.rank, " has joined at ", place(),
                                " twice, first from ", (at == 0 ? own_ : joined_[at]).process(),
                                "; start each rank once")});
  }
  record(number, request);
  give_up_ = earlier_refusal_time(give_up_, request);
  processes_.add(request);
}

/// Records the request of an awaited rank of this job; ignores any other.
void StoreRendezvous::record(std::int64_t number, const JoinRequest& request) {
  const int rank = request.info.rank;
  if (!is_of_this_job(request) || rank < 1 || rank >= size()) return;
  number_of_[static_cast<std::size_t>(rank)] = number;
  joined_[static_cast<std::size_t>(rank)] = request;
}

/// Refuses all ranks that have joined, and those that join soon.
void StoreRendezvous::refuse_all(const Refusal& refusal) {
  for (const std::int64_t number : number_of_)
    if (number != 0) refuse(number, refusal);
  poll_store_until(late_joiner_deadline(deadline_), [&] {
    while (const auto bytes = read(text("join.", handled_ + 1))) {
      refuse(++handled_, refusal);
      if (const auto request = decode_join_request(*bytes)) record(handled_, *request);
    }
    // Later ranks follow the newer rank 0, so stop waiting for them.
    return absent().empty() || current_place() != place_;
  });
  refusal.raise();
}

/// Joins in the place of the newest rank 0, if this rank has not done so yet.
void StoreRendezvous::follow_rank_0() {
  const std::string now = current_place();
  if (now.empty() || now == place_) return;
  place_ = now;
  number_ = add("count", 1);
  set(text("join.", number_), encode(own_, deadline_));
}

bool StoreRendezvous::accepted() {
  if (number_ == 0) return false;
  if (const auto refused = read(text("refused.", number_))) {
    if (const auto refusal = decode_refusal(*refused)) refusal->raise();
  }
  return read(text("accepted.", number_)).has_value();
}

void StoreRendezvous::join(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  const bool begun = poll_store_until(deadline, [this] {
    follow_rank_0();
    return accepted();
  });
  if (begun) return;
  throw PeerLostError(
      text("hvd::init: rank 0 has not ", number_ == 0 ? "joined at " : "answered at ", place(), " ",
           within(limit_), "; give all ranks the same store, and see whether rank 0 has ended"),
      0);
}

std::optional<Bytes> StoreRendezvous::wait(std::string_view key, int from, Deadline deadline) {
  return processes_.wait(from,
                         {.value = [&] { return get(key); },
                          .failure = [this] { return read("failed"); },
                          .join_request = [&] { return read(text("rank.", from)); }},
                         [deadline](const auto& done) { poll_store_until(deadline, done); });
}

void StoreRendezvous::fail(const Failure& failure) noexcept {
  try {
    if (add("failures", 1) == 1) set("failed", encode(failure));
  } catch (const std::exception&) {
    // The other ranks wait until their deadlines.
  }
}

void StoreRendezvous::leave(Deadline deadline) noexcept {
  try {
    if (rank() != 0) {
      add("left", 1);
      return;
    }
    // Wait, because the store may end with this process.
    poll_store_until(deadline, [this] { return add("left", 0) >= size() - 1; });
  } catch (const std::exception&) {
    // The store has ended.
  }
}

}  // namespace

std::unique_ptr<Rendezvous> join_in_store(KeyValueStore store, const RankInfo& own,
                                          Deadline deadline) {
  check(own);
  auto made = std::make_unique<StoreRendezvous>(std::move(store), own);
  if (own.rank == 0) {
    made->join_as_rank_0(deadline);
  } else {
    made->join(deadline);
  }
  return made;
}

}  // namespace hvd::rendezvous
