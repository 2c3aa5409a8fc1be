#include "fuzz/membership.h"

#include <chrono>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "elastic/member_stream.h"
#include "member/coordinator.h"
#include "member/member.h"
#include "member/messages.h"

namespace hvd::fuzz {
namespace {

using member::Coordinator;
using member::Member;

constexpr member::StateSummary kState{.commit = 3, .kind = member::StateKind::kWhole, .hash = 9};
constexpr std::size_t kKind = 2;           // the place of the kind in a message
constexpr std::byte kFirstToWorker{0x20};  // of the kinds

/// A coordinator whose three workers run generation 1.
class ElasticJob {
 public:
  ElasticJob()
      : coordinator_({.start_size = 3,
                      .min_np = 1,
                      .max_np = 3,
                      .deadlines = member::Deadlines(member::TimeSettings{})},
                     now_) {
    for (member::WorkerId id = 1; id <= 3; ++id) coordinator_.worker_started(id, "host", now_);
    for (member::WorkerId id = 1; id <= 3; ++id) receive(id, member::Join{"program"});
    for (member::WorkerId id = 1; id <= 3; ++id)
      receive(id, member::Ready{.generation = 1, .can_load = true, .address = "a 1"});
    for (member::WorkerId id = 1; id <= 3; ++id)
      receive(id, member::Synced{.generation = 1, .state = kState});
  }

  void receive(member::WorkerId from, const member::ToCoordinator& message) {
    coordinator_.receive(from, message, now_);
    for (const auto& action : coordinator_.take_actions()) {
      const auto* const killed = std::get_if<member::Kill>(&action);
      if (killed != nullptr) coordinator_.worker_ended(killed->worker, "killed", now_);
    }
  }
  void wait(std::chrono::seconds time) {
    now_ += time;
    coordinator_.host_reported("host", now_);
    coordinator_.check(now_);
    coordinator_.take_actions();
    coordinator_.take_notes();
    if (coordinator_.next_check(now_) < now_) std::abort();
  }

 private:
  TimePoint now_ = TimePoint(std::chrono::hours(1));
  Coordinator coordinator_;
};

/// A message must be the same after it was encoded and decoded again.
member::ToCoordinator decoded(std::span<const std::byte> bytes) {
  member::ToCoordinator message = member::decode_to_coordinator(bytes);
  if (member::decode_to_coordinator(member::encode(message)) != message) std::abort();
  return message;
}

/// Gives the message to members in several phases.
void feed_members(const member::ToWorker& message) {
  for (int steps = 0; steps < 4; ++steps) {
    Member member(1, "program");
    member.join();
    if (steps > 0) member.receive(member::Reset{.generation = 1, .cause = "begin"});
    if (steps > 1) member.left(kState, true, "a 1");
    if (steps > 2) {
      member.receive(member::Assign{.generation = 1, .seats = {{.worker = 1, .address = "a 1"}}});
      member.synced(1, kState);
      member.receive(member::Go{1});
    }
    member.receive(message);
    member.take_actions();
    if (member.phase() == Member::Phase::kRunning) member.begin_commit();
    member.leaving();
    member.receive(message);
    if (member.phase() == Member::Phase::kLeaving) member.left(kState, false, "a 1");
    member.disconnected();
    member.take_actions();
  }
}

}  // namespace

void feed_worker_stream(std::span<const std::byte> input) {
  ElasticJob job;
  launcher::MemberStream stream;
  // Two pieces, as a socket may deliver them.
  const std::string_view all(reinterpret_cast<const char*>(input.data()), input.size());
  for (const std::string_view piece : {all.substr(0, all.size() / 3), all.substr(all.size() / 3)}) {
    stream.feed(piece);
    while (const auto message = stream.next()) job.receive(1, decoded(*message));
    job.wait(std::chrono::seconds(2));
  }
}

void feed_membership(std::span<const std::byte> input) {
  if (input.size() > kKind && input[kKind] >= kFirstToWorker) {
    const member::ToWorker message = member::decode_to_worker(input);
    if (member::decode_to_worker(member::encode(message)) != message) std::abort();
    return feed_members(message);
  }
  ElasticJob job;
  job.receive(1, decoded(input));
  job.wait(std::chrono::seconds(40));
}

}  // namespace hvd::fuzz
