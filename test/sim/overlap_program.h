#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/runtime.h"

namespace hvd::testing {

/// The operations of one submission: a single one, or the members of a group.
struct OverlapUnit {
  struct Member {
    std::string name = {};  ///< empty: unnamed
    ReduceOp op = ReduceOp::kSum;
  };
  std::vector<Member> members = {};
  std::string group = {};  ///< name of a group of more than one member; empty: unnamed
  bool in_subset = false;  ///< an operation of ranks 0 and 1 only, not of all ranks
  int uses = 0;            ///< in the whole program
  int pace = 0;            ///< use k waits for use k * pace of unit 0; 0: only for its own last use
  bool new_names = false;  ///< each use has new names
  int fails_every = 0;     ///< rank 0 submits another shape in every n-th use; 0: never
  bool fails(int use) const { return fails_every > 0 && use % fails_every == fails_every - 1; }
};

/// A random program of units that begin again as soon as their last use has ended, independently of
/// the other units. So the steps of a rank overlap, and the replay of a schedule ends at any of its
/// batches. Some units are used rarely, by all ranks or by a process set, and some uses fail.
class OverlapProgram {
 public:
  OverlapProgram(std::uint64_t seed, int ranks);

  int ranks() const noexcept { return ranks_; }
  const std::vector<OverlapUnit>& units() const noexcept { return units_; }
  /// The value of each element of the member's result. @param use number of the use, from 0
  float expected(const OverlapUnit&, const OverlapUnit::Member&, int use) const;

 private:
  void add_group();
  void add_rare_units();
  ReduceOp any_op() { return random_() % 3 == 0 ? ReduceOp::kMax : ReduceOp::kSum; }

  int ranks_;
  std::mt19937_64 random_;
  std::vector<OverlapUnit> units_;
};

/// One rank's run through the program.
class OverlapRun {
 public:
  OverlapRun(const OverlapProgram&, runtime::Runtime&, int rank, std::uint64_t seed);

  /// Makes the process set of ranks 0 and 1; go_on() begins when it has ended.
  void submit_set();
  /// Checks ended operations, and submits some of those that may begin again.
  void go_on();
  bool finished() const;
  /// The first error; empty without an error.
  const std::string& problem() const noexcept { return problem_; }

 private:
  struct Progress {
    std::vector<Operation> operations = {};
    std::vector<std::vector<float>> data = {};
    int use = 0;
  };
  bool takes_part(const OverlapUnit& unit) const { return !unit.in_subset || rank_ < 2; }
  bool may_begin(std::size_t unit) const;
  void submit(std::size_t unit);
  void settle(std::size_t unit);
  void check(const OverlapUnit&, std::size_t member, const Progress&);

  const OverlapProgram& program_;
  runtime::Runtime& runtime_;
  const int rank_;
  std::mt19937_64 random_;
  Operation set_;
  std::vector<Progress> progress_;  // by unit
  std::string problem_;
};

}  // namespace hvd::testing
