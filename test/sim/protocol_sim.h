#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/scenario.h"
#include "support/control_world.h"

/// N ranks that negotiate over a simulated network in virtual time.
namespace hvd::sim {

/// Calls scheduled actions in order of time, and actions that are due at the same time in the order
/// in which they were scheduled.
class EventLoop {
 public:
  TimePoint now() const noexcept { return now_; }
  void at(TimePoint when, std::function<void()> action);
  void after(Duration delay, std::function<void()> action) { at(now_ + delay, std::move(action)); }
  /// Calls the next action. Returns false if there was none.
  bool step();

 private:
  struct Event {
    TimePoint when{};
    std::uint64_t number = 0;
    std::shared_ptr<std::function<void()>> action = {};
    bool operator<(const Event& other) const {
      return std::pair(when, number) > std::pair(other.when, other.number);
    }
  };
  TimePoint now_{};
  std::uint64_t count_ = 0;
  std::priority_queue<Event> events_;
};

/// One use of one operation by one rank, and how it ended.
struct Record {
  wire::Request request = {};
  int endings = 0;
  StatusCode code = StatusCode::kOk;
  std::string message = {};
};

/// The result of a run, for a test to check.
struct Outcome {
  bool ended = false;  ///< every rank has applied the shutdown
  std::vector<std::string> complaints = {};
  /// Operation -> use -> rank.
  std::map<std::string, std::vector<std::map<int, Record>>> uses = {};
  std::uint64_t plans = 0;
  std::uint64_t messages = 0;
  std::uint64_t by_bit = 0;
  std::uint64_t tombstones = 0;  ///< submissions that ended at once
  std::uint64_t warnings = 0;
  std::uint64_t stale_reports = 0;  ///< reports that a plan overtook
  std::uint64_t fused = 0;          ///< batches of more than one operation
  std::size_t max_displaced = 0;
  std::uint64_t merged = 0;   ///< merged reports of several ranks
  std::uint64_t overdue = 0;  ///< merged reports that were held for too long
  std::size_t displaced_at_end = 0;
  std::size_t failed_uses_at_end = 0;
};

class ProtocolSim {
 public:
  explicit ProtocolSim(const Scenario& scenario);
  Outcome run();

 private:
  struct Rank {
    std::size_t step = 0;
    std::size_t outstanding =
        0;  ///< uses of this step that have not ended, or that wait for their turn
    std::unordered_map<std::string, std::deque<wire::Request>> waiting_turn =
        {};  ///< by name: uses that wait for the end of an earlier one
    std::unordered_map<std::string, std::size_t> uses_begun = {};
    std::unordered_map<std::string, int> owed = {};  ///< uses skipped in earlier steps
    std::unordered_map<std::string, wire::Request> in_flight = {};
    std::map<std::string, std::uint64_t> next_ordinal = {};
    TimePoint lane_free{};
    std::optional<TimePoint> watched_hold = {};
    std::size_t batches_in_flight = 0;
    bool done = false;
  };

  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  void begin_step(int rank);
  void plan_submissions(int rank, const Step& step);
  void submit(int rank, std::vector<wire::Request> requests);
  void submit_one(int rank, wire::Request request);
  void send_report(int rank);
  void record_merged(int rank, const wire::Report&);
  void go_on(int rank, bool coordinator_accepted);
  void end_use(int rank, const std::string& name, StatusCode code, const std::string& message);

  void deliver(int from, int to, wire::Bytes bytes);
  void receive(int from, int to, const wire::Bytes& bytes);
  void publish(const wire::Bytes& plan);
  void coordinate();
  void watch_deadline();
  void apply(int rank, const wire::Plan& plan);
  void execute(int rank, const control::AgreedBatch& batch);
  void compare_with_others(int rank, std::uint64_t sequence, const control::Applied& applied);
  void inspect_end();
  void compare_caches(int rank);
  void complain(int rank, const std::string& what);

  const Scenario& scenario_;
  std::mt19937_64 random_;
  EventLoop loop_;
  testing::ControlWorld world_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, TimePoint> last_arrival_;
  std::optional<TimePoint> watched_deadline_;
  std::vector<std::string> applied_;  ///< per plan, its effects on the first rank that applied it
  std::uint64_t latest_plan_ = 0;
  Outcome outcome_;
};

}  // namespace hvd::sim
