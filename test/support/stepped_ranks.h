#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {

inline LocalJobOptions stepped(int ranks) {
  LocalJobOptions options;
  options.size = ranks;
  options.runtime.background_thread = false;
  return options;
}

/// The ranks of a job without threads, which one thread steps in virtual time.
class Ranks {
 public:
  explicit Ranks(int size) : job_(stepped(size), clock_) {}
  int size() const { return job_.size(); }
  runtime::Runtime& rank(int number) { return job_.rank(number); }
  void submit(int number, Submission submission) {
    operations_.push_back(submit_one(job_.rank(number), std::move(submission)));
  }
  /// Runs until all submitted operations have ended, and forgets them. @return these operations
  std::vector<Operation> run() {
    EXPECT_TRUE(job_.run_until(clock_, std::chrono::seconds(10), [this] {
      return std::all_of(operations_.begin(), operations_.end(),
                         [](const Operation& operation) { return operation.done(); });
    })) << "an operation hangs";
    return std::exchange(operations_, {});
  }
  void step_a_while() {
    for (int i = 0; i < 200; ++i) job_.step_all();
  }
  int add_set(const std::vector<int>& members) {
    for (int number = 0; number < size(); ++number) {
      submit(number, {.parameters = AddProcessSet{members}});
    }
    return static_cast<int>(run().front().result());
  }
  void remove_set(int id) {
    for (int number = 0; number < size(); ++number) {
      submit(number, {.parameters = RemoveProcessSet{id}});
    }
    for (const Operation& operation : run()) EXPECT_TRUE(operation.status().ok());
  }

 private:
  VirtualClock clock_;
  LocalJob job_;
  std::vector<Operation> operations_;
};

}  // namespace hvd::testing
