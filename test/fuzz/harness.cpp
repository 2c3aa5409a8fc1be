#include "fuzz/harness.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/safetensors_header.h"
#include "fuzz/membership.h"
#include "hvd/error.h"
#include "negotiation/coordinator.h"
#include "negotiation/messages.h"
#include "negotiation/negotiator.h"

namespace hvd::fuzz {
namespace {

constexpr int kRanks = 3;

wire::Request request(std::string name, OpKind kind) {
  wire::Request made;
  made.name = std::move(name);
  made.kind = kind;
  made.shape = {2, 3};
  return made;
}

// Operations of many kinds, so that a plan finds the operations that it names.
std::vector<wire::Request> submissions() {
  std::vector<wire::Request> made = {
      request("a", OpKind::kAllreduce),  request("b", OpKind::kBroadcast),
      request("g", OpKind::kAllgather),  request("z", OpKind::kBarrier),
      request("m0", OpKind::kAllreduce), request("m1", OpKind::kAllreduce),
      request("", OpKind::kAllreduce),   request("", OpKind::kAllgather)};
  for (int i = 0; i < 2; ++i) {
    wire::Request& member = made[4 + static_cast<std::size_t>(i)];
    member.group = std::string("m");
    member.group_size = 2;
    member.group_index = i;
  }
  for (std::size_t i = 6; i < made.size(); ++i) {
    made[i].unnamed = true;
    made[i].name = wire::unnamed_name(made[i].kind, 0);
  }
  return made;
}

control::CoordinatorOptions options() {
  control::CoordinatorOptions made;
  made.fusion_threshold = 100;
  made.cache_capacity = 3;
  made.stall = {std::chrono::seconds(2), std::chrono::seconds(5)};
  made.host_of_rank.assign(kRanks, std::string("host"));
  return made;
}

// A job of three ranks that have agreed on all operations once. Rank 0 has submitted them again.
class Job {
 public:
  Job() : sets_(kRanks), coordinator_(options(), sets_) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(
          std::make_unique<control::Negotiator>(rank, sets_, options().cache_capacity));
    }
    for (int rank = 0; rank < kRanks; ++rank) submit_and_report(rank);
    decide(0);
    publish();
    submit_and_report(0);
  }

  void report(const wire::Report& report) { coordinator_.accept(report, now_); }
  void plan(int rank, const wire::Plan& plan) {
    ranks_[static_cast<std::size_t>(rank % kRanks)]->apply(plan);
  }
  void ask(const wire::WaitQuestion& question) {
    coordinator_.ask(0, question, now_);
    coordinator_.wait_messages(now_ + std::chrono::hours(1000));
  }
  void end_replay(const wire::ReplayLeft& left) {
    coordinator_.end_replay(left.process_set, left.batches_run);
  }
  void decide(int seconds) {
    now_ += std::chrono::seconds(seconds);
    coordinator_.stall_warnings(now_);
    decided_ = coordinator_.decide(
        now_, [=](int, DeviceType) { return static_cast<std::size_t>(seconds % 3); });
    coordinator_.next_deadline();
  }
  void publish() {
    if (!decided_) return;
    const auto arrived = std::get<wire::Plan>(wire::decode(wire::encode(*decided_)));
    decided_.reset();
    for (auto& rank : ranks_) rank->apply(arrived);
  }
  void submit_and_report(int rank) {
    for (auto& made : submissions())
      ranks_[static_cast<std::size_t>(rank)]->submit(std::move(made));
    if (const auto own = ranks_[static_cast<std::size_t>(rank)]->next_report()) report(*own);
  }

 private:
  control::ProcessSetTable sets_;
  control::Coordinator coordinator_;
  std::vector<std::unique_ptr<control::Negotiator>> ranks_;
  std::optional<wire::Plan> decided_;
  TimePoint now_{};
};

// A decoded message must decode again after it is encoded, since merged reports and plans are
// forwarded.
wire::AnyMessage decode(std::span<const std::byte> bytes) {
  wire::AnyMessage message = wire::decode(bytes);
  const wire::Bytes again = std::visit([](const auto& m) { return wire::encode(m); }, message);
  const wire::Bytes twice =
      std::visit([](const auto& m) { return wire::encode(m); }, wire::decode(again));
  if (again != twice) std::abort();
  return message;
}

void feed_message(std::span<const std::byte> input) {
  const wire::AnyMessage message = decode(input);
  Job job;
  if (const auto* report = std::get_if<wire::Report>(&message)) {
    job.report(*report);
    job.decide(0);
    job.publish();
    job.decide(10);
    job.publish();
  } else if (const auto* plan = std::get_if<wire::Plan>(&message)) {
    job.plan(0, *plan);
  } else if (const auto* question = std::get_if<wire::WaitQuestion>(&message)) {
    job.ask(*question);
  } else if (const auto* left = std::get_if<wire::ReplayLeft>(&message)) {
    job.end_replay(*left);
    job.submit_and_report(0);
    job.decide(0);
    job.publish();
  }
}

std::span<const std::byte> take(std::span<const std::byte>& input, std::size_t size) {
  const auto part = input.first(std::min(size, input.size()));
  input = input.subspan(part.size());
  return part;
}

void feed_session(std::span<const std::byte> input) {
  Job job;
  while (!input.empty()) {
    const auto head = std::to_integer<unsigned>(take(input, 1).front());
    const auto rank = static_cast<int>(head % 8);
    const auto step = static_cast<Step>(head / 8 % 4);
    if (step == Step::kDecide) {
      job.decide(rank);
    } else if (step == Step::kPublish) {
      job.publish();
    } else if (!input.empty()) {
      const bool reports = step == Step::kReport;
      wire::Bytes bytes = {
          std::byte{wire::kMagic}, std::byte{wire::kVersion},
          static_cast<std::byte>(reports ? wire::MessageKind::kReport : wire::MessageKind::kPlan)};
      const auto size = std::to_integer<std::size_t>(take(input, 1).front());
      const auto body = take(input, size);
      bytes.insert(bytes.end(), body.begin(), body.end());
      const wire::AnyMessage message = decode(bytes);
      reports ? job.report(std::get<wire::Report>(message))
              : job.plan(rank, std::get<wire::Plan>(message));
    }
  }
}

// An accepted header must describe the whole file, and must be readable after it is written again.
void feed_safetensors(std::span<const std::byte> input) {
  using libtorch::SafetensorsHeader;
  const std::string file(reinterpret_cast<const char*>(input.data()), input.size());
  SafetensorsHeader header = SafetensorsHeader::decode(file, "input");
  std::uint64_t next = 0;
  for (const auto& entry : header.tensors) {
    if (entry.begin != next || entry.end < entry.begin) std::abort();
    next = entry.end;
  }
  if (header.bytes + next != file.size()) std::abort();
  const std::string again = header.encode() + std::string(next, '\0');
  const SafetensorsHeader read = SafetensorsHeader::decode(again, "output");
  if (read.metadata != header.metadata || read.tensors.size() != header.tensors.size())
    std::abort();
}

}  // namespace

void feed(std::span<const std::byte> input) {
  try {
    if (!input.empty() && input.front() == kSession) {
      feed_session(input.subspan(1));
    } else if (!input.empty() && input.front() == kSafetensors) {
      feed_safetensors(input.subspan(1));
    } else if (!input.empty() && input.front() == kWorkerStream) {
      feed_worker_stream(input.subspan(1));
    } else if (!input.empty() && input.front() == kMembership) {
      feed_membership(input);
    } else {
      feed_message(input);
    }
  } catch (const Error&) {
    // The peer is broken and the job would end here.
  }
}

}  // namespace hvd::fuzz
