#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "support/reference.h"

namespace hvd::testing {

/// One operation of a random program, as all ranks know it.
struct ProgramOperation {
  Submission form;                    ///< without memory; name empty: unnamed
  std::vector<std::int64_t> rows;     ///< allgather: first dimension per rank
  std::uint64_t seed = 0;
  bool barrier = false;
};

/// A training-like program: the same operations in every step, submitted in an order of its own on every rank, so that names come back
/// and the cache is used. Unnamed operations keep their order. Every third operation belongs to a group.
class RandomProgram {
 public:
  RandomProgram(std::uint64_t seed, int ranks);

  int ranks() const noexcept { return ranks_; }
  int steps() const noexcept { return steps_; }
  const std::vector<ProgramOperation>& operations() const noexcept { return operations_; }
  /// What `rank` feeds into an operation in a step, and what must come out on every rank.
  Bytes input(const ProgramOperation&, int step, int rank) const;
  Bytes expected(const ProgramOperation&, int step) const;

 private:
  void add_random_operation(int index);
  int ranks_;
  int steps_ = 3;
  std::mt19937_64 random_;
  std::vector<ProgramOperation> operations_;
};

/// One rank's run through the program, a step at a time.
class ProgramRun {
 public:
  ProgramRun(const RandomProgram&, runtime::Runtime&, int rank, std::uint64_t seed);
  /// Submits all operations of the next step, in a random order.
  void submit_step();
  /// Every operation of the step has ended.
  bool step_done() const;
  /// Blocks until then.
  void wait_step() const;
  /// Names what is wrong with the results of the step; empty when nothing is.
  std::string check_step() const;
  int step() const noexcept { return step_; }

 private:
  struct Slot {
    Bytes input;
    std::shared_ptr<Bytes> output = std::make_shared<Bytes>();
    Operation operation;
  };
  Submission make_submission(std::size_t index);
  void submit_group(const std::vector<std::size_t>& members);

  const RandomProgram& program_;
  runtime::Runtime& runtime_;
  const int rank_;
  std::mt19937_64 random_;
  int step_ = -1;
  std::vector<Slot> slots_;
};

}  // namespace hvd::testing
