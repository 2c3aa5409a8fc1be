#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/limits.h"
#include "base/sha256.h"
#include "base/text.h"
#include "bootstrap/arrivals.h"
#include "bootstrap/network.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/world.h"
#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::runtime {
namespace {

using rendezvous::Bytes;
using rendezvous::Refusal;
using rendezvous::Rendezvous;

/// Minimum time for which rank 0 stays after a failure, so that the others receive the reason even
/// if the start timeout has passed.
constexpr auto kTimeToInform = std::chrono::milliseconds(500);
/// Maximum time for which rank 0 waits for the others to leave the rendezvous of a job that has
/// begun.
constexpr auto kTimeToLeave = std::chrono::seconds(10);

/// Returns a number that differs between the jobs of one process. All ranks use the number that
/// rank 0 has drawn.
std::uint32_t draw_generation() {
  return std::random_device()() & ((std::uint32_t{1} << message::kGenerationBits) - 1);
}

/// Sent by each rank in the first exchange.
struct Introduction {
  std::uint32_t generation = 0;
  std::string address = {};      ///< Workers::address()
  std::string host_report = {};  ///< NodeJoin::host_report()
  RankStatement statement = {};  ///< without the GPU
  std::string failure = {};      ///< why the rank has no usable UCX; empty: it has
};

template <class Value>
std::string copy_of(const Value& value) {
  return rendezvous::text_of(std::as_bytes(std::span(&value, 1)));
}
template <class Value>
bool assign(Value& value, const std::string& bytes) {
  if (bytes.size() != sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  return true;
}

[[noreturn]] void throw_invalid(std::size_t rank) {
  throw Error(text("hvd::init: rank ", rank,
                   " sent an invalid introduction; start the same program everywhere"));
}

Bytes encode(const Introduction& own) {
  return rendezvous::join_fields(
      {copy_of(own.generation), own.address, own.host_report, copy_of(own.statement), own.failure});
}

std::vector<Introduction> introductions_in(const rendezvous::Parts& parts) {
  std::vector<Introduction> all(parts.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    auto fields = rendezvous::split_fields(parts[rank], 5);
    Introduction& one = all[rank];
    if (!fields || !assign(one.generation, (*fields)[0]) || !assign(one.statement, (*fields)[3]))
      throw_invalid(rank);
    one.address = std::move((*fields)[1]);
    one.host_report = std::move((*fields)[2]);
    one.failure = std::move((*fields)[4]);
  }
  return all;
}

class JobOverUcx final : public World {
 public:
  JobOverUcx(std::string url, int rank, int size, Deadline deadline)
      : url_(std::move(url)), rank_(rank), size_(size), deadline_(deadline) {}
  JobOverUcx(const JobOverUcx&) = delete;
  JobOverUcx& operator=(const JobOverUcx&) = delete;
  ~JobOverUcx() override { give_up({.text = "hvd::init: a rank has given up"}); }

  Agreement connect(const JoinRanks&, RankStatement, const CompleteStatement&);

  const std::string& init_method() const noexcept override { return init_method_; }
  const std::shared_ptr<host::Node>& node() const noexcept override { return node_; }
  const std::shared_ptr<message::Carrier>& carrier() const noexcept override { return carrier_; }
  void begun() override { leave(std::chrono::steady_clock::now() + kTimeToLeave); }
  void abandon(const std::exception& cause) noexcept override { give_up(Refusal::of(cause)); }
  void give_up(const Refusal& reason) noexcept {
    if (!rendezvous_) return;
    rendezvous_->fail(reason);
    leave(std::max<Deadline>(rendezvous::late_joiner_deadline(deadline_),
                             std::chrono::steady_clock::now() + kTimeToInform));
  }

 private:
  void leave(Deadline limit) noexcept {
    if (rendezvous_) rendezvous_->leave(limit);
    if (rendezvous_ && rendezvous_->stays_open()) {
      presence_ = std::move(rendezvous_);
    } else {
      rendezvous_.reset();
    }
  }
  ucx::Workers introduce(const JoinRanks&, Introduction);

  const std::string url_;
  const int rank_;
  const int size_;
  const Deadline deadline_;
  std::string init_method_;
  std::unique_ptr<Rendezvous> rendezvous_;  ///< until the job has begun
  std::unique_ptr<Rendezvous> presence_;    ///< open while joined, to detect duplicate ranks
  std::shared_ptr<message::Carrier> carrier_;
  std::shared_ptr<host::Node> node_;
};

/// Makes the workers and joins the other ranks. Joins even if making the workers has failed, so
/// that the other ranks receive the reason.
ucx::Workers JobOverUcx::introduce(const JoinRanks& join, Introduction own) {
  std::optional<ucx::Workers> workers;
  std::exception_ptr failure;
  try {
    workers = ucx::open_workers(rendezvous::interface_to(url_, deadline_));
    own.address = rendezvous::text_of(workers->address());
  } catch (const std::exception& error) {
    failure = std::current_exception();
    own.failure = error.what();
    release_descriptors();  // to report the failure to the other ranks
  }
  rendezvous_ = join(encode(own));
  init_method_ = rendezvous_->url();
  if (failure) std::rethrow_exception(failure);
  return std::move(*workers);
}

Agreement JobOverUcx::connect(const JoinRanks& join, RankStatement statement,
                              const CompleteStatement& complete) {
  host::NodeJoin joining(rank_, size_);
  ucx::Workers workers = introduce(join, {.generation = draw_generation(),
                                          .host_report = rendezvous::text_of(joining.host_report()),
                                          .statement = statement});
  const std::vector<Introduction> all = introductions_in(rendezvous_->parts());
  ucx::JobMembers members{.rank = rank_, .generation = all.front().generation};
  std::vector<RankStatement> statements;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].failure.empty()) {
      throw Error(text("hvd::init: rank ", rank, " could not begin: ", all[rank].failure));
    }
    const auto address = rendezvous::bytes_of(all[rank].address);
    members.addresses.emplace_back(address.begin(), address.end());
    statements.push_back(all[rank].statement);
  }
  members.key = hmac_hex(env_string("JOB_TOKEN").value_or(""), text("data ", rendezvous_->run()));
  const auto made = joining.make_segment(
      [&all](std::size_t rank) { return rendezvous::bytes_of(all[rank].host_report); });
  require_agreement(statements, joining.topology());
  carrier_ = ucx::make_ucx_carrier(std::move(workers), std::move(members));

  std::exception_ptr failure;
  try {
    complete(statement, joining.topology());
  } catch (const std::exception& error) {
    record_failure(statement, error);
    failure = std::current_exception();
  }
  const rendezvous::Parts& reports = rendezvous_->exchange(
      "segment and GPU", rendezvous::join_fields({rendezvous::text_of(made), copy_of(statement)}),
      deadline_);
  std::vector<std::string> segments(reports.size());
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    auto fields = rendezvous::split_fields(reports[rank], 2);
    if (!fields || !assign(statements[rank], (*fields)[1])) throw_invalid(rank);
    segments[rank] = std::move(fields->front());
  }
  if (failure) std::rethrow_exception(failure);
  Agreement agreement = compare(statements, joining.topology());
  const auto mapped = joining.map_segment(
      [&segments](std::size_t rank) { return rendezvous::bytes_of(segments[rank]); });
  const rendezvous::Parts& parts =
      rendezvous_->exchange("mapped segment", mapped, deadline_, Rendezvous::Turn::kLast);
  node_ = joining.finish([&parts](std::size_t rank) { return parts[rank]; });
  return agreement;
}

}  // namespace

std::shared_ptr<World> join_over_ucx(const std::string& url, const JoinRanks& join, int rank,
                                     int size, RankStatement statement,
                                     const CompleteStatement& complete, Agreement& agreement,
                                     Deadline deadline) {
  auto job = std::make_shared<JobOverUcx>(url, rank, size, deadline);
  try {
    agreement = job->connect(join, statement, complete);
  } catch (const std::exception& error) {
    release_descriptors();
    Refusal reason = Refusal::of(error);
    reason.text = text("hvd::init: rank ", rank, " could not begin: ", reason.text);
    job->give_up(reason);
    throw;
  }
  return job;
}

}  // namespace hvd::runtime
