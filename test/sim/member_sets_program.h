#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/runtime.h"
#include "support/seeds.h"

namespace hvd::testing {

/// One process set that its members make, use and remove without the other ranks.
struct SetLife {
  std::string name = {};
  std::vector<int> members = {};
  int uses = 0;  ///< allreduces
  /// Each use is of several unnamed allreduces in sequence, some of them alike.
  bool in_sequence = false;
  bool removed = false;  ///< at the end
  /// A member that passes another list than the others, so that all of them get an error.
  std::optional<int> deviates = {};
  std::vector<int> list_of_deviating = {};
};

/// Sets with a few names, whose ranks overlap at random. Every rank makes the sets of one name in
/// the order of lives(); beside them all ranks run equal steps, which can be replayed.
class MemberSetsProgram {
 public:
  MemberSetsProgram(std::uint64_t seed, int ranks);
  const std::vector<SetLife>& lives() const noexcept { return lives_; }
  int steps() const noexcept { return 40; }
  int ranks() const noexcept { return ranks_; }

 private:
  void add_life(Random&);
  void deviate(SetLife&, Random&) const;

  int ranks_;
  std::vector<SetLife> lives_;
};

/// A rank that runs the program: one set of each name at a time, in a random order of names.
class MemberSetsRun {
 public:
  /// @param numbers of the sets by life, compared between the ranks
  MemberSetsRun(const MemberSetsProgram&, runtime::Runtime&, int rank, std::uint64_t seed,
                std::map<std::size_t, std::int64_t>& numbers);

  /// Checks what has ended and submits what comes next.
  void go_on();
  bool finished() const noexcept;
  const std::string& problem() const noexcept { return problem_; }

 private:
  /// The sets of one name, one after the other.
  struct Thread {
    std::vector<std::size_t> lives = {};
    std::size_t life = 0;                    ///< index into `lives`
    int phase = 0;                           ///< 0: add, then the uses, then remove
    std::vector<Operation> operations = {};  ///< of this phase
    std::vector<std::vector<float>> data = {};
  };

  void begin(Thread&);
  void begin_use(Thread&, const SetLife&, int process_set);
  void check(Thread&);
  void go_on_with_steps();
  void complain(const std::string& what);

  const MemberSetsProgram& program_;
  runtime::Runtime& runtime_;
  const int rank_;
  Random random_;
  std::map<std::size_t, std::int64_t>& numbers_;
  std::vector<Thread> threads_;
  int step_ = 0;
  std::vector<std::vector<float>> step_data_;
  std::vector<Operation> step_operations_;
  std::string problem_;
};

}  // namespace hvd::testing
