#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/runtime.h"
#include "support/program_operation.h"

namespace hvd::testing {

struct StepOperation : ProgramOperation {
  int every = 1;  ///< it is part of every `every`-th step

  bool is_in(int step) const { return step % every == every - 1; }
};

struct ProgramShape {
  bool joins = false;  ///< some ranks have no more data before the others
  bool sets = false;   ///< operations of several, overlapping process sets
  bool steady =
      false;  ///< many steps of named operations of all ranks, and occasional other operations
};

/// A training-like program: the same operations in every step, which each rank submits in a
/// different order, so that names repeat and the cache is used. Unnamed operations keep their
/// order. Every third operation belongs to a group.
class RandomProgram {
 public:
  RandomProgram(std::uint64_t seed, int ranks, ProgramShape shape = {});

  int ranks() const noexcept { return ranks_; }
  /// The number of steps that this rank takes part in. If joins(), each rank calls join() after its
  /// last step.
  int steps(int rank) const { return steps_[static_cast<std::size_t>(rank)]; }
  bool joins() const noexcept { return shape_.joins; }
  /// The world ranks of the process sets other than that of all ranks; set i gets the number i + 1.
  const std::vector<std::vector<int>>& sets() const noexcept { return sets_; }
  const std::vector<StepOperation>& operations() const noexcept { return operations_; }
  /// Whether the unnamed operations of a set are one sequence, and not one of each kind.
  bool in_sequence() const noexcept { return in_sequence_; }
  /// The members of an operation that have not joined before this step.
  std::vector<int> contributors(const ProgramOperation&, int step) const;

 private:
  void add_sets();
  void add_random_operation(int index);
  static bool shares_batches(const StepOperation& operation);
  void join_group(StepOperation& operation) const;

  const ProgramShape shape_;
  const bool in_sequence_;
  int ranks_;
  std::mt19937_64 random_;
  /// In a steady program: whether the group's members differ, so that they run in several batches.
  bool mixed_group_;
  std::vector<int> steps_;
  std::vector<std::vector<int>> sets_;
  std::vector<StepOperation> operations_;
};

/// One rank's run through the program: the process sets, the steps, the join.
class ProgramRun {
 public:
  ProgramRun(const RandomProgram&, runtime::Runtime&, int rank, std::uint64_t seed);
  /// Submits the next operations, a step's in a random order. @pre !finished() and done()
  void submit_next();
  /// Whether all submitted operations have ended.
  bool done() const;
  /// Blocks until done().
  void wait() const;
  /// Describes errors in the results of ended operations; empty when all results are right.
  std::string check() const;
  /// Whether all operations have been submitted.
  bool finished() const noexcept;

 private:
  struct Slot {
    std::shared_ptr<OperationMemory> memory = std::make_shared<OperationMemory>();
    Operation operation;
  };
  void submit_sets();
  void submit_join();
  void submit_step();
  Submission make_submission(std::size_t index);
  void submit_group(const std::vector<std::size_t>& members);
  Operation submit_one(Submission);
  std::string check_agreed() const;

  const RandomProgram& program_;
  runtime::Runtime& runtime_;
  const int rank_;
  std::mt19937_64 random_;
  int step_ = -2;  // -1: process sets; program.steps(): the join
  std::vector<Slot> slots_;
};

}  // namespace hvd::testing
