// Ranks that ask at random moments what their operations wait for, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <regex>
#include <set>

#include "sim/runtime_runs.h"
#include "support/job_helpers.h"
#include "support/local_job.h"
#include "support/seeds.h"

namespace hvd::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Longer than all messages of a question together take.
constexpr Duration kLimit = milliseconds(60);
constexpr int kSteps = 24;

/// A program of named allreduces, the same in every step. Each rank submits them one at a time, in
/// its own order, and pauses now and then.
class WaitSim {
 public:
  WaitSim(Layout layout, std::uint64_t seed) : seed_(seed), random_(seed) {
    LocalJobOptions options;
    options.size = (layout == Layout::kTree ? 5 : 2) + static_cast<int>(seed % 4);
    options.runtime.background_thread = false;
    options.longest_delay = seed % 5 == 0 ? Duration(0) : Duration(milliseconds(2));
    options.seed = seed;
    if (layout != Layout::kOneHost) options.hosts = many_hosts(options.size);
    options.runtime.control_radix = layout == Layout::kTree ? 2 + static_cast<int>(seed % 2) : 0;
    names_ = 1 + seed / 4 % 4;
    job_ = std::make_unique<LocalJob>(options, clock_);
    ranks_.resize(static_cast<std::size_t>(options.size));
    for (Rank& rank : ranks_) rank.data.assign(names_, std::vector<float>(3, 1));
  }

  void run() {
    const bool finished = job_->run_until(clock_, seconds(60), [&] {
      bool all = true;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) all = go_on(rank) && all;
      check_answers();
      if (questions_.size() < 3 && random_() % 64 == 0) ask();
      return all && questions_.empty();
    });
    EXPECT_TRUE(finished) << "seed " << seed_ << ": an operation or a question hangs";
  }

  int answers() const { return answers_; }
  std::uint64_t replayed() { return job_->rank(0).metrics().locked_operations; }

 private:
  using Use = std::pair<std::size_t, int>;  // name, step
  struct Rank {
    std::vector<std::vector<float>> data = {};
    int step = -1;
    std::vector<std::size_t> order = {};  // names to submit, the next one last
    std::map<std::size_t, Operation> operations = {};
    std::map<Use, TimePoint> submitted = {};
    TimePoint pause_until{};
  };
  struct Question {
    std::size_t rank = 0;
    Use use = {};
    TimePoint asked{};
    Operation operation = {};
    std::shared_ptr<const runtime::WaitDescription> description = {};
  };

  /// @return whether the rank has finished
  bool go_on(std::size_t index) {
    Rank& rank = ranks_[index];
    if (clock_.now() < rank.pause_until) return false;
    const bool done =
        std::ranges::all_of(rank.operations, [](const auto& one) { return one.second.done(); });
    if (rank.order.empty()) {
      if (!done) return false;
      if (rank.step + 1 == kSteps) return true;
      ++rank.step;
      for (std::size_t name = 0; name < names_; ++name) rank.order.push_back(name);
      std::shuffle(rank.order.begin(), rank.order.end(), random_);
    }
    const std::size_t name = rank.order.back();
    rank.order.pop_back();
    rank.operations[name] =
        submit_one(job_->rank(static_cast<int>(index)),
                   float_operation(rank.data[name], "t" + std::to_string(name)));
    rank.submitted[{name, rank.step}] = clock_.now();
    const Duration longest = random_() % 16 == 0 ? milliseconds(40) : milliseconds(1);
    rank.pause_until = clock_.now() + microseconds(random_() % (longest / microseconds(1)));
    return false;
  }

  void ask() {
    const std::size_t index = random_() % ranks_.size();
    Rank& rank = ranks_[index];
    for (const auto& [name, operation] : rank.operations) {
      if (operation.done()) continue;
      questions_.push_back(
          {index,
           {name, rank.step},
           clock_.now(),
           operation,
           job_->rank(static_cast<int>(index)).request_description(operation, kLimit)});
      return;
    }
  }

  void check_answers() {
    std::erase_if(questions_, [&](const Question& question) {
      if (!question.description->written()) return false;
      check(question, question.description->text());
      return true;
    });
  }

  void check(const Question& question, const std::string& text) {
    SCOPED_TRACE("seed " + std::to_string(seed_) + ": " + text);
    if (text.empty()) {
      EXPECT_TRUE(question.operation.done());
      return;
    }
    EXPECT_EQ(text.find("replied"), std::string::npos);
    std::set<std::size_t> named;
    const std::regex pattern("rank ([0-9]+) \\(");
    for (std::sregex_iterator next(text.begin(), text.end(), pattern), end; next != end; ++next)
      named.insert(std::stoul((*next)[1].str()));
    const bool complete = text.find("although every rank has submitted it") != std::string::npos;
    EXPECT_NE(named.empty(), !complete);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto submitted = ranks_[rank].submitted.find(question.use);
      if (submitted == ranks_[rank].submitted.end()) {
        EXPECT_TRUE(named.contains(rank)) << "rank " << rank << " is missing";
      } else if (named.contains(rank)) {
        // Another rank may have asked before, as long as that question was open.
        EXPECT_GT(submitted->second, question.asked - kLimit)
            << "rank " << rank << " is not missing";
      }
    }
    answers_ += named.empty() ? 0 : 1;
  }

  const std::uint64_t seed_;
  std::mt19937_64 random_;
  VirtualClock clock_;
  std::size_t names_ = 0;
  std::unique_ptr<LocalJob> job_;
  std::vector<Rank> ranks_;
  std::vector<Question> questions_;
  int answers_ = 0;
};

void run_questions(Layout layout, std::uint64_t count) {
  int answers = 0;
  std::uint64_t replayed = 0;
  for (std::uint64_t seed = 0; seed < count && !::testing::Test::HasFailure(); ++seed) {
    WaitSim sim(layout, seed);
    sim.run();
    answers += sim.answers();
    replayed += sim.replayed();
  }
  EXPECT_GT(answers, static_cast<int>(count)) << "hardly any rank was missing";
  EXPECT_GT(replayed, count * 5) << "hardly anything was replayed";
}

TEST(WaitSim, AnswersNameTheMissingRanksOnOneHost) {
  run_questions(Layout::kOneHost, seeds(400, 4000));
}
TEST(WaitSim, AnswersNameTheMissingRanksOnSeveralHosts) {
  run_questions(Layout::kHosts, seeds(400, 4000));
}
TEST(WaitSim, AnswersNameTheMissingRanksOfATree) { run_questions(Layout::kTree, seeds(400, 4000)); }

}  // namespace
}  // namespace hvd::testing
