#include "bootstrap/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "base/sha256.h"
#include "base/text.h"
#include "bootstrap/arrivals.h"
#include "bootstrap/rank_zero.h"
#include "hvd/error.h"

// Note [The protocol]
// The keys begin with hvd/JOB/. R is the id of the run, which rank 0 draws.
//
//   run                  RunNotice of rank 0
//   R/arrivals           number of arrivals
//   R/arrival.K          the K-th Arrival
//   R/accepted.K         rank 0's answer to it, with a proof of the token; or
//   R/refused.K          the Refusal
//   R/part.E.r           part of rank r in exchange E = 2, 3
//   R/all.E              the parts of all ranks in exchange E = 1, 2. The parts of exchange 1 are
//                        in the arrivals, and R/all.1 begins with a proof of the token
//   R/outcome            created once: why the run fails (Refusal), which ends all waits; or a mark
//                        of success and the parts of all ranks in the last exchange
//   R/left.K             the process of the K-th arrival has read its last value
//
// A rank reads `run`, arrives there and waits for its answer. Only rank 0 waits for several ranks,
// so it makes O(N) requests, and each other rank a constant number.
//
// Note [Interleavings]
// Rank 0 may be killed before or after each of its writes, and ranks of this or an earlier run may
// be left behind.
// - A rank without an answer follows a newer `run`, because the run that it has found may have
//   ended long ago. A rank with an answer never does: if it sees another `run`, or the end of rank
//   0's process or connection, it ends with PeerLostError.
// - Rank 0 ends between an arrival and its answer. The rank has found rank 0's process alive when
//   it arrived, so it ends too, unless the run had already begun or failed (R/all.1, R/outcome):
//   then the arrival was meant for the next run. On another host the rank cannot check this, and
//   follows the next run.
// - A notice whose process is dead at first sight is ignored.
// - Rank 0 ends after R/all.E: the others have all parts, and detect its end in the next exchange
//   or, after the last one, through the job's own connections.
// - A process ends between its arrival and the answer, and its connection is watched. Its will
//   names it in R/outcome once R/accepted.K is stored, so the end of a process that is refused does
//   not affect the run. The will also stores R/left.K, for which rank 0 waits.
// - A rank ends between counting and storing its arrival. Rank 0 remembers K, continues with K + 1,
//   and does not wait for K.
// - A rank stores its part and ends. The exchange completes without it, and the next one fails.
// - R/all.E and a failure are stored at nearly the same time. Some ranks go on to the next exchange
//   and fail there with the same reason.
// - A rank ends in the last exchange. Only one value of R/outcome can be created, so either all
//   ranks fail with the reason, or all begin the job, in which they detect the loss themselves. If
//   some of them failed, the others could take the end of those for the first loss.
// - Two ranks 0: the later one replaces `run`. The earlier one detects this at its next check and
//   ends, and so do its accepted ranks. Its other ranks follow the later one.
// - A process arrives after the run has begun. In the later exchanges rank 0 refuses it, because
//   its rank has arrived. While rank 0 leaves, the process gets no answer and follows the next run.
//   If the run has failed, it gets the same reason as the others.
// - A copied arrival is refused: its proof is for another R, or its rank has arrived.
// - Rank 0 leaves once all others have left, and refused processes have read their answers. It then
//   removes the values, but only if `run` is still its own.

namespace hvd::rendezvous {
namespace {

using Clock = std::chrono::steady_clock;

/// Any rank but 0.
class OtherRank final : public Rendezvous {
 public:
  OtherRank(std::unique_ptr<Store> store, const RankInfo& own, std::span<const std::byte> payload,
            Deadline deadline, Deadline::duration limit)
      : Rendezvous(std::move(store), own, deadline, limit), payload_(text_of(payload)) {}

  void contribute(const std::string& what, std::span<const std::byte> mine, Deadline deadline,
                  Turn turn) override {
    ++exchange_;
    last_ = turn == Turn::kLast;
    what_ = what;
    deadline_ = deadline;
    store_->set(key("part.", exchange_, ".", rank()), mine, deadline);
  }
  bool step(Deadline until) override;
  void leave(Deadline deadline) noexcept override;

 private:
  void follow_newest_run(Deadline until);
  void arrive(const RunNotice&);
  void ignore_run();
  bool on_value(Store::Found);
  void read_answer(const Store::Found&);
  void read_parts(Bytes);
  std::vector<std::string> awaited() const;
  bool check_rank_0();
  std::optional<ProcessInfo> find_rival();
  [[noreturn]] void give_up();
  Deadline::duration check_interval() const noexcept override;
  void abandon(const std::exception&) noexcept override;

  std::string payload_;
  Bytes notice_ = {};  ///< of the run that this rank has joined or ignores
  ProcessInfo of_rank_0_ = {};
  ProcessWatch rank_0_;
  std::string nonce_;
  std::int64_t number_ = 0;  ///< of this rank's arrival in the run; 0: not arrived
  bool accepted_ = false;
  std::string obstacle_ = {};  ///< why a run was ignored
};

bool OtherRank::step(Deadline until) {
  if (Clock::now() >= deadline_) give_up();
  until = std::min(until, deadline_);
  if (!accepted_) follow_newest_run(until);
  if (number_ == 0) return false;
  if (auto found = store_->wait(awaited(), until)) return on_value(std::move(*found));
  return check_rank_0();
}

std::vector<std::string> OtherRank::awaited() const {
  if (!accepted_) return {key("accepted.", number_), key("refused.", number_)};
  if (last_) return {parts_key()};
  return {parts_key(), key("outcome")};
}

void OtherRank::follow_newest_run(Deadline until) {
  std::optional<Bytes> now = store_->get(run_key(), call_deadline());
  if (!now || now->empty()) {
    if (number_ != 0) return;  // rank 0 may have removed the values, or is about to begin
    const std::string keys[] = {run_key()};
    if (auto found = store_->wait(keys, until)) now = std::move(found->value);
  }
  if (!now || now->empty() || *now == notice_) {
    const auto left = until - Clock::now();
    if (number_ == 0 && left > left.zero() && now)  // wait for another run
      std::this_thread::sleep_for(std::min<Deadline::duration>(left, kCheckInterval / 4));
    return;
  }
  const auto notice = decode_notice(*now);
  notice_ = std::move(*now);
  number_ = 0;
  if (notice) return arrive(*notice);
  obstacle_ = "; rank 0 there has another version of hvd";
}

void OtherRank::arrive(const RunNotice& notice) {
  of_rank_0_ = notice.process;
  rank_0_ = store_->notices_loss() ? ProcessWatch() : watch(notice.process);
  if (rank_0_.ended()) return;
  run_ = notice.run;
  obstacle_.clear();
  nonce_ = random_id();
  const auto left = std::max<Deadline::duration>(deadline_ - Clock::now(), Deadline::duration(0));
  const Arrival arrival{.rank = rank(),
                        .size = size(),
                        .build = own_.build,
                        .process = process_,
                        .nonce = nonce_,
                        .left = std::chrono::ceil<std::chrono::milliseconds>(left),
                        .payload = payload_};
  number_ = store_->add(key("arrivals"), 1, call_deadline());
  store_->publish_on_loss(key("outcome"), encode(ended_early(rank(), process_, url_)),
                          key("accepted.", number_), key("left.", number_), call_deadline());
  store_->set(key("arrival.", number_), encode(arrival, run_, own_.token), call_deadline());
}

/// Waits for a newer run instead.
void OtherRank::ignore_run() {
  number_ = 0;
  rank_0_ = ProcessWatch();
}

bool OtherRank::on_value(Store::Found found) {
  if (!accepted_) {
    read_answer(found);
    return false;
  }
  if (found.index == 1 || (last_ && !is_success(found.value))) {
    failure_known_ = true;
    decode_failure(found.value).raise();
  }
  read_parts(std::move(found.value));
  return true;
}

void OtherRank::read_answer(const Store::Found& found) {
  if (found.index == 1) {
    leave(deadline_);
    decode_failure(found.value).raise();
  }
  accepted_ = same_secret(text_of(found.value), proof_of_acceptance(run_, nonce_, own_.token));
  if (accepted_) return;
  obstacle_ =
      "; the process that answered there as rank 0 does not know the job's token "
      "(HVD_JOB_TOKEN)";
  ignore_run();
}

void OtherRank::read_parts(Bytes bytes) {
  const std::size_t begin = exchange_ == 1 ? kProofBytes : last_ ? success_mark().size() : 0;
  bool proven = bytes.size() >= begin;
  // Without a token there is no secret to prove.
  if (proven && exchange_ == 1 && !own_.token.empty()) {
    const auto whole = std::span(std::as_const(bytes));
    proven = same_secret(text_of(whole.first(begin)),
                         proof_of_parts(run_, whole.subspan(begin), own_.token));
  }
  auto parts = proven ? Parts::decode(std::move(bytes), begin, static_cast<std::size_t>(size()))
                      : std::nullopt;
  if (!parts) {
    throw Error(text("hvd::init: the ", what_, " of the ranks at ", url_,
                     " was changed by another program than rank 0; give each job its own "
                     "rendezvous address and token (HVD_JOB_TOKEN)"));
  }
  parts_ = std::move(*parts);
}

/// Called when an awaited value is missing. Returns true if the value has been stored meanwhile and
/// completes the exchange.
bool OtherRank::check_rank_0() {
  if (store_->notices_loss()) return false;
  if (accepted_) {
    const auto now = store_->get(run_key(), call_deadline());
    if (now && !now->empty() && *now != notice_) {
      throw PeerLostError(
          text("hvd::init: rank 0 (", to_string(of_rank_0_), ") has begun a run at ", url_,
               " that another rank 0 has replaced; give each job its own rendezvous address, and "
               "start all ranks again"),
          0);
    }
  }
  if (!rank_0_.ended()) return false;
  // Rank 0 may have stored the value before its end.
  if (auto found = store_->wait(awaited(), Clock::now())) return on_value(std::move(*found));
  if (accepted_ || (!store_->get(key("all.1"), call_deadline()) &&
                    !store_->get(key("outcome"), call_deadline())))
    ended_early(0, of_rank_0_, url_).raise();
  ignore_run();
  return false;
}

/// Returns an earlier process of this rank among the last arrivals, if there is one.
std::optional<ProcessInfo> OtherRank::find_rival() {
  constexpr std::int64_t kMaxArrivals = 64;
  try {
    for (std::int64_t number = number_ - 1;
         number > std::max<std::int64_t>(0, number_ - kMaxArrivals); --number) {
      const auto other =
          decode_arrival(store_->get(key("arrival.", number), call_deadline()).value_or(Bytes()));
      if (other && other->rank == rank()) return other->process;
    }
  } catch (const Error&) {
    // The caller has a better error.
  }
  return std::nullopt;
}

void OtherRank::give_up() {
  if (accepted_) {
    throw PeerLostError(
        text("hvd::init: rank 0 (", to_string(of_rank_0_), ") joined at ", url_,
             " and has not sent the ", what_, " of all ranks in time; see whether it has ended"),
        0);
  }
  if (const auto other = find_rival()) {
    throw UsageError(text("hvd::init: rank ", rank(), " has joined at ", url_,
                          " twice, first from ", to_string(*other),
                          "; start each rank once, and rank 0 too"));
  }
  throw PeerLostError(
      text("hvd::init: rank 0 has not ", number_ == 0 ? "joined at " : "answered at ", url_, " ",
           within(limit_), obstacle_,
           "; give all ranks the same place, and see whether rank 0 has "
           "ended"),
      0);
}

/// A server that detects losses ends the waits of ranks itself, also when it removes a run's
/// values.
Deadline::duration OtherRank::check_interval() const noexcept {
  if (!store_->notices_loss()) return kCheckInterval;
  return accepted_ ? Deadline::duration(std::chrono::hours(1)) : std::chrono::seconds(1);
}

void OtherRank::abandon(const std::exception& cause) noexcept {
  if (!accepted_) return;
  Rendezvous::abandon(cause);
  leave(Clock::now() + std::chrono::seconds(1));
}

void OtherRank::leave(Deadline deadline) noexcept {
  try {
    if (number_ != 0)
      store_->set(key("left.", number_), {},
                  std::max<Deadline>(deadline, Clock::now() + kMinCallTimeout));
  } catch (const std::exception&) {
    // Rank 0 stops waiting at its deadline.
  }
}

}  // namespace

std::optional<Parts> Parts::decode(Bytes bytes, std::size_t begin, std::size_t count) {
  Parts parts;
  parts.bytes_ = std::move(bytes);
  parts.parts_.reserve(count);
  auto rest = std::span<const std::byte>(parts.bytes_).subspan(begin);
  while (parts.parts_.size() < count) {
    const auto part = read_field(rest);
    if (!part) return std::nullopt;
    parts.parts_.push_back(*part);
  }
  if (!rest.empty()) return std::nullopt;
  return parts;
}

Rendezvous::Rendezvous(std::unique_ptr<Store> store, const RankInfo& own, Deadline deadline,
                       Deadline::duration limit)
    : store_(std::move(store)),
      own_(own),
      url_(store_->url()),
      jobs_keys_(text("hvd/", short_name(own.job), "/")),
      deadline_(deadline),
      limit_(limit > limit.zero() ? limit : deadline - Clock::now()) {}

Deadline Rendezvous::call_deadline() const {
  return std::max<Deadline>(deadline_, Clock::now() + kMinCallTimeout);
}

Rendezvous::~Rendezvous() { store_->close(Clock::now() + std::chrono::seconds(1)); }

std::unique_ptr<Rendezvous> Rendezvous::begin(std::unique_ptr<Store> store, const RankInfo& own,
                                              std::span<const std::byte> payload, Deadline deadline,
                                              Deadline::duration limit) {
  check(own);
  if (own.rank == 0) return make_rank_zero(std::move(store), own, payload, deadline, limit);
  return std::make_unique<OtherRank>(std::move(store), own, payload, deadline, limit);
}

std::unique_ptr<Rendezvous> Rendezvous::join(std::unique_ptr<Store> store, const RankInfo& own,
                                             std::span<const std::byte> payload, Deadline deadline,
                                             Deadline::duration limit,
                                             const std::function<void()>& joined) {
  auto rank = begin(std::move(store), own, payload, deadline, limit);
  try {
    rank->finish();
    if (joined) joined();
  } catch (const std::exception& error) {
    rank->abandon(error);
    throw;
  }
  return rank;
}

Deadline::duration Rendezvous::check_interval() const noexcept { return kCheckInterval; }

void Rendezvous::finish() {
  while (!step(std::min<Deadline>(deadline_, Clock::now() + check_interval()))) {
  }
}

std::span<const std::byte> Rendezvous::success_mark() {
  static const std::string mark = "hvd begun 1\n";
  return bytes_of(mark);
}

bool Rendezvous::is_success(std::span<const std::byte> outcome) {
  const auto mark = success_mark();
  return outcome.size() >= mark.size() && std::equal(mark.begin(), mark.end(), outcome.begin());
}

const Parts& Rendezvous::exchange(const std::string& what, std::span<const std::byte> mine,
                                  Deadline deadline, Turn turn) {
  contribute(what, mine, deadline, turn);
  finish();
  return parts_;
}

void Rendezvous::abandon(const std::exception& cause) noexcept { fail(Refusal::of(cause)); }

void Rendezvous::fail(const Refusal& reason) noexcept {
  if (run_.empty() || std::exchange(failure_known_, true)) return;
  try {
    store_->create(key("outcome"), encode(reason), Clock::now() + std::chrono::seconds(1));
  } catch (const std::exception&) {
    // The other ranks wait until their deadlines.
  }
}

}  // namespace hvd::rendezvous
