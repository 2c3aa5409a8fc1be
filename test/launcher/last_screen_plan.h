#pragma once

#include <cstdint>
#include <string>

#include "support/seeds.h"

/// The job that a seed defines in the campaign of last screens. The driver and every rank derive it
/// separately, so it depends only on the seed.
namespace hvd::launcher::test {

enum class Fault {
  kThrow,
  kBadAlloc,
  kExit,
  kExitZero,
  kSignal,
  kAbort,
  kMpiAbort,
  kMismatch,
  kStall
};
inline constexpr int kFaults = 9;

enum class Moment { kBeforeInit, kInStep, kAmongSubmits, kInThread };

struct Plan {
  std::uint64_t seed = 0;
  int ranks = 2;
  int victim = 0;
  Fault fault = Fault::kThrow;
  Moment moment = Moment::kInStep;
  int step = 0;
  bool caught = false;  ///< the victim's main() catches the exception, prints it and returns 1
  bool others_catch = false;  ///< the same on the others
  int code = 3;               ///< of kExit and kMpiAbort
  int signal = 0;             ///< of kSignal
};

inline constexpr int kSteps = 12;

inline Plan make_plan(std::uint64_t seed) {
  constexpr int kSignals[] = {9, 11, 8, 15, 4};  // KILL, SEGV, FPE, TERM, ILL
  testing::Random random(seed, 1);
  Plan plan;
  plan.seed = seed;
  plan.ranks = 2 + random.below(3);
  plan.victim = random.below(plan.ranks);
  // Neighbouring seeds have different faults, so that a short run covers every fault.
  plan.fault =
      static_cast<Fault>((seed + static_cast<std::uint64_t>(random.below(2)) * 3) % kFaults);
  plan.step = random.below(kSteps);
  plan.moment = static_cast<Moment>(random.below(4));
  plan.caught = random.below(2) == 0;
  plan.others_catch = random.below(2) == 0;
  plan.code = 1 + random.below(100);
  plan.signal = kSignals[random.below(5)];
  const bool throws = plan.fault == Fault::kThrow || plan.fault == Fault::kBadAlloc;
  const bool of_the_job = plan.fault == Fault::kMismatch || plan.fault == Fault::kStall;
  if (of_the_job || plan.fault == Fault::kMpiAbort || plan.fault == Fault::kExitZero)
    plan.moment = Moment::kInStep;
  // main() cannot catch an exception of another thread, and exit() from two threads at once is an
  // error of the program.
  if (plan.moment == Moment::kInThread && !throws && plan.fault != Fault::kSignal)
    plan.moment = Moment::kAmongSubmits;
  if (plan.moment == Moment::kInThread || !(throws || of_the_job)) plan.caught = false;
  return plan;
}

inline std::string what_of(const Plan& plan) {
  return plan.fault == Fault::kBadAlloc
             ? "std::bad_alloc"
             : "the data set of seed " + std::to_string(plan.seed) + " is broken";
}

}  // namespace hvd::launcher::test
