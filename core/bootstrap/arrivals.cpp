#include "bootstrap/arrivals.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"
#include "base/sha256.h"
#include "base/text.h"

namespace hvd::rendezvous {
namespace {

/// Versions of the values, so that another version of hvd gets an appropriate error.
constexpr const char* kNoticeFormat = "hvd run 1";
constexpr const char* kArrivalFormat = "hvd arrival 1";

std::string proof_of_arrival(const Arrival& arrival, const std::string& run,
                             const std::string& token) {
  return proof(
      token, {"arrival", run, text(arrival.rank), text(arrival.size), arrival.build,
              encode(arrival.process), arrival.nonce, text(arrival.left.count()), arrival.payload});
}

Refusal usage(const std::string& reason) { return Refusal::usage("hvd::init: " + reason); }

std::string described(const Arrival& arrival) {
  return text("rank ", arrival.rank, " (", to_string(arrival.process), ")");
}

}  // namespace

Bytes encode(const RunNotice& notice) {
  return join_fields({kNoticeFormat, notice.run, encode(notice.process)});
}

std::optional<RunNotice> decode_notice(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 3);
  if (!fields || fields->front() != kNoticeFormat) return std::nullopt;
  const auto process = decode_process((*fields)[2]);
  // The run's id is a part of keys.
  const bool valid = (*fields)[1].size() == 32 && (*fields)[1].find('/') == std::string::npos;
  if (!process || !valid) return std::nullopt;
  return RunNotice{.run = (*fields)[1], .process = *process};
}

Bytes encode(Arrival arrival, const std::string& run, const std::string& token) {
  arrival.proof = proof_of_arrival(arrival, run, token);
  return join_fields({kArrivalFormat, text(arrival.rank), text(arrival.size), arrival.build,
                      encode(arrival.process), arrival.nonce, text(arrival.left.count()),
                      arrival.payload, arrival.proof});
}

std::optional<Arrival> decode_arrival(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, 9);
  if (!fields || fields->front() != kArrivalFormat) return std::nullopt;
  const auto rank = parse_number<int>((*fields)[1]);
  const auto size = parse_number<int>((*fields)[2]);
  const auto process = decode_process((*fields)[4]);
  const auto left = parse_number<std::int64_t>((*fields)[6]);
  if (!rank || !size || !process || !left) return std::nullopt;
  return Arrival{
      .rank = *rank,
      .size = *size,
      .build = std::move((*fields)[3]),
      .process = *process,
      .nonce = std::move((*fields)[5]),
      .left = std::chrono::milliseconds(std::clamp<std::int64_t>(*left, 0, kMaxMilliseconds)),
      .payload = std::move((*fields)[7]),
      .proof = std::move((*fields)[8])};
}

bool proven(const Arrival& arrival, const std::string& run, const std::string& token) {
  return same_secret(arrival.proof, proof_of_arrival(arrival, run, token));
}

std::string proof_of_acceptance(const std::string& run, const std::string& nonce,
                                const std::string& token) {
  return proof(token, {"accepted", run, nonce});
}

std::string proof_of_parts(const std::string& run, std::span<const std::byte> parts,
                           const std::string& token) {
  return proof(token, {"parts", run, text_of(parts)});
}

Refusal ended_early(int rank, const ProcessInfo& process, const std::string& url,
                    const std::vector<int>& absent) {
  const std::string others =
      absent.empty() ? "" : text(", while ", rank_list(absent), " had not joined");
  return Refusal::lost(rank,
                       text("hvd::init: rank ", rank, " (", to_string(process), ") joined at ", url,
                            " and ended before the job began", others, "; see what it last wrote"));
}

Arrivals::Arrivals(const RankInfo& own, std::string run, std::string url, std::string payload,
                   bool watches)
    : own_(own), run_(std::move(run)), url_(std::move(url)), watches_(watches) {
  Arrival first{.rank = own.rank, .size = own.size, .build = own.build, .process = this_process()};
  first.payload = std::move(payload);
  arrived_.emplace(own.rank, Present{std::move(first), {}});
}

/// The reason why this process may not join; empty if it may.
std::optional<Refusal> Arrivals::find_refusal(const std::optional<Arrival>& arrival) {
  constexpr std::size_t kMaxRefused = 1000;
  const auto remember = [this](int rank, const std::string& reason) {
    if (refused_processes_.size() < kMaxRefused) refused_processes_[rank] = reason;
  };
  if (!arrival) {
    remember(-1, "; a process was refused: it has another version of hvd");
    return usage(text("a rank has joined at ", url_,
                      " with another version of hvd; start the same program everywhere"));
  }
  const int rank = arrival->rank;
  if (!proven(*arrival, run_, own_.token)) {
    remember(rank, text("; a process (", to_string(arrival->process), ") that joined as rank ",
                        rank, " was refused: it has another token (HVD_JOB_TOKEN)"));
    return usage(
        text(described(*arrival), " has joined at ", url_, " for job '", own_.job,
             "' with another token than rank 0's; give each job its own rendezvous address"));
  }
  std::string contradiction;
  if (arrival->build != own_.build) {
    contradiction = text(described(*arrival), " has hvd ", arrival->build, ", rank 0 has ",
                         own_.build, "; start the same program everywhere");
  } else if (arrival->size != own_.size) {
    contradiction = text(described(*arrival), " expects ", arrival->size, " ranks, rank 0 ",
                         own_.size, "; give all ranks the same world size");
  }
  if (!contradiction.empty()) {
    const Refusal refusal = usage(contradiction);
    remember(rank, text("; a process was refused: ", contradiction));
    if (rank > 0 && rank < own_.size) contradictions_.try_emplace(rank, refusal);
    return refusal;
  }
  if (rank < 0 || rank >= own_.size) {
    return usage(text(described(*arrival), " has joined at ", url_, ", expected a rank from 0 to ",
                      own_.size - 1));
  }
  if (const auto first = arrived_.find(rank); first != arrived_.end()) {
    return usage(text("rank ", rank, " has joined at ", url_, " twice, first from ",
                      to_string(first->second.arrival.process), "; start each rank once"));
  }
  return std::nullopt;
}

Answer Arrivals::decide(std::span<const std::byte> bytes) {
  auto arrival = decode_arrival(bytes);
  const int rank = arrival ? arrival->rank : -1;
  if (auto refusal = find_refusal(arrival)) return {.rank = rank, .refusal = std::move(*refusal)};
  Answer answer{.rank = rank,
                .accepted = true,
                .proof = proof_of_acceptance(run_, arrival->nonce, own_.token)};
  if (arrival->left.count() > 0)
    shortest_ = std::min(shortest_.value_or(arrival->left), arrival->left);
  ProcessWatch end = watches_ ? watch(arrival->process) : ProcessWatch();
  arrived_.emplace(rank, Present{std::move(*arrival), std::move(end)});
  return answer;
}

std::optional<Refusal> Arrivals::objection() const {
  std::size_t accounted = arrived_.size();
  const Refusal* first = nullptr;
  for (const auto& [rank, refusal] : contradictions_) {
    if (arrived_.contains(rank)) continue;
    ++accounted;
    if (first == nullptr) first = &refusal;
  }
  if (first == nullptr || accounted < static_cast<std::size_t>(own_.size)) return std::nullopt;
  return *first;
}

std::vector<int> Arrivals::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < own_.size; ++rank)
    if (!arrived_.contains(rank)) ranks.push_back(rank);
  return ranks;
}

std::string Arrivals::refused(const std::vector<int>& absent) const {
  constexpr int kMaxShown = 3;
  std::string listed;
  int count = 0;
  for (const auto& [rank, reason] : refused_processes_) {
    const bool concerns =
        rank < 0 || rank >= own_.size || std::binary_search(absent.begin(), absent.end(), rank);
    if (concerns && count++ < kMaxShown) listed += reason;
  }
  return listed;
}

const Arrival* Arrivals::find_ended(const std::function<bool(int rank)>& counts) {
  for (auto& [rank, present] : arrived_)
    if (present.watch.ended() && counts(rank)) return &present.arrival;
  return nullptr;
}

bool Arrivals::has_ended(int rank) {
  const auto found = arrived_.find(rank);
  return found != arrived_.end() && found->second.watch.ended();
}

std::vector<std::string> Arrivals::take_payloads() {
  HVD_EXPECT(complete(), "all ranks have arrived");
  std::vector<std::string> payloads;
  payloads.reserve(arrived_.size());
  for (auto& [rank, present] : arrived_) payloads.push_back(std::move(present.arrival.payload));
  return payloads;
}

Deadline refusal_time(Deadline deadline, Deadline now) {
  const auto left = deadline - now;
  return deadline - std::min<Deadline::duration>(left / 10, std::chrono::seconds(1));
}

Deadline late_joiner_deadline(Deadline deadline) {
  return std::min<Deadline>(deadline, std::chrono::steady_clock::now() + std::chrono::seconds(2));
}

std::string within(Deadline::duration limit) {
  return text("within ", limit, " (HVD_START_TIMEOUT)");
}

Refusal missing(const std::vector<int>& ranks, const std::string& url, Deadline::duration limit,
                const std::string& refused) {
  const bool one = ranks.size() == 1;
  return Refusal::lost(one ? ranks.front() : -1,
                       text("hvd::init: ", rank_list(ranks), one ? " has" : " have",
                            " not joined at ", url, " ", within(limit), refused,
                            "; start as many ranks as the world size, with the same place, and see "
                            "whether one has ended early"));
}

}  // namespace hvd::rendezvous
