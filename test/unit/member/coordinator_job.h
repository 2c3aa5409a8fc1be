#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "member/coordinator.h"

namespace hvd::member {

/// Workers 1, 2, ... on hosts. The peer timeout is 30 s.
class CoordinatorTest : public ::testing::Test {
 protected:
  void make(int start, int min_np, int max_np, std::optional<int> max_resets = {}) {
    coordinator_.emplace(
        CoordinatorOptions{
            .start_size = start, .min_np = min_np, .max_np = max_np, .max_resets = max_resets},
        now_);
  }
  void join(WorkerId id, const std::string& host = "a") {
    coordinator_->worker_started(id, host, now_);
    coordinator_->receive(id, Join{"program"}, now_);
  }
  void ready(WorkerId id, Commit commit = 0, StateKind kind = StateKind::kNone,
             std::uint64_t hash = 1) {
    coordinator_->receive(id,
                          Ready{.generation = coordinator_->generation(),
                                .state = {.commit = commit, .kind = kind, .hash = hash},
                                .divided = divided_},
                          now_);
  }
  void whole(WorkerId id, Commit commit) { ready(id, commit, StateKind::kWhole); }
  /// These workers answer Prepare, which the first of them has got.
  void begun(const std::vector<WorkerId>& ids, Commit commit) {
    const Prepare prepare = last<Prepare>(ids.front());
    for (const WorkerId id : ids) coordinator_->receive(id, Begun{prepare.change, commit}, now_);
  }
  void synced(WorkerId id, Commit commit, std::uint64_t hash = 1) {
    coordinator_->receive(id,
                          Synced{coordinator_->generation(),
                                 {.commit = commit, .kind = StateKind::kWhole, .hash = hash}},
                          now_);
  }
  /// Starts a job of workers 1, 2, ... on these hosts, one generation, at commit 0.
  void run_on(const std::vector<std::string>& hosts, int min_np = 1, int max_np = 8,
              std::optional<int> max_resets = {}) {
    make(static_cast<int>(hosts.size()), min_np, max_np, max_resets);
    const auto last = static_cast<WorkerId>(hosts.size());
    for (WorkerId id = 1; id <= last; ++id) join(id, hosts[id - 1]);
    for (WorkerId id = 1; id <= last; ++id) ready(id);
    for (WorkerId id = 1; id <= last; ++id) synced(id, 0);
    EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
    take();
  }
  void run(int size, int min_np = 1, int max_np = 8, std::optional<int> max_resets = {}) {
    run_on(std::vector<std::string>(static_cast<std::size_t>(size), "a"), min_np, max_np,
           max_resets);
  }
  /// Advances the time in steps. In each step the hosts' agents and the pinged processes answer,
  /// except the silent ones.
  void pass(Duration time, const std::set<WorkerId>& silent = {},
            const std::set<std::string>& silent_hosts = {}) {
    for (const TimePoint end = now_ + time; now_ < end;) {
      now_ = std::min(
          end, std::max(coordinator_->next_check(now_), now_ + std::chrono::milliseconds(1)));
      for (const std::string host : {"a", "b", "c"})
        if (!silent_hosts.contains(host)) coordinator_->host_reported(host, now_);
      coordinator_->check(now_);
      take();
      for (const WorkerId id : pinged_)
        if (!silent.contains(id)) coordinator_->receive(id, Pong{}, now_);
      pinged_.clear();
    }
  }
  /// Sorts the actions since the last call.
  void take() {
    for (const auto& action : coordinator_->take_actions()) {
      if (const auto* const kill = std::get_if<Kill>(&action)) {
        killed_[kill->worker] = kill->cause;
        continue;
      }
      const auto& [to, message] = std::get<Deliver>(action);
      if (std::holds_alternative<Ping>(message)) {
        pinged_.insert(to);
      } else {
        last_.insert_or_assign(to, message);
      }
    }
  }
  template <class Message>
  Message last(WorkerId id) {
    take();
    if (!last_.contains(id) || !std::holds_alternative<Message>(last_.at(id))) {
      ADD_FAILURE() << "worker " << id << " got another message";
      return {};
    }
    return std::get<Message>(last_.at(id));
  }
  std::vector<WorkerId> seats(WorkerId member) {
    std::vector<WorkerId> ids;
    for (const Seat& seat : last<Assign>(member).seats) ids.push_back(seat.worker);
    return ids;
  }
  /// Workers 3 and 4 are assigned, worker 1 ends, and no further reset follows.
  void expect_last_two_go_on(Commit commit) {
    EXPECT_EQ(seats(3), (std::vector<WorkerId>{3, 4}));
    last<End>(1);
    for (const WorkerId id : {3, 4}) synced(id, commit);
    pass(std::chrono::seconds(20));
    EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
    EXPECT_EQ(coordinator_->resets(), 2);
  }

  TimePoint now_{std::chrono::seconds(1000)};
  std::optional<Coordinator> coordinator_;
  bool divided_ = false;  ///< in the messages Ready
  std::map<WorkerId, std::string> killed_;
  std::map<WorkerId, ToWorker> last_;
  std::set<WorkerId> pinged_;
};

}  // namespace hvd::member
