#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/seeds.h"

/// The run that a seed of the fault campaign stands for. The driver and every rank derive it
/// separately, so it depends on the seed only.
namespace hvd::campaign {

using testing::Random;

enum class Fault {
  kNone,
  kKill,
  kThrow,
  kStop,        ///< SIGSTOP; the driver ends the process when the others have ended
  kPause,       ///< SIGSTOP, and SIGCONT before any deadline
  kShortDelay,  ///< shorter than every deadline
  kLongDelay,   ///< longer than stall_shutdown
  kDisagree,
  kWrongKind,
  kExit,
  kLeave,
};

enum class Moment {
  kBeforeStep,
  kAmongSubmits,
  kBeforeWait,
  kInTransfer,
  kInCallback,
  kAnyTime,
  kInBarrier,
  kInJoin,
  kInInit,
};

/// The deviation of the victim of kDisagree.
enum class Difference {
  kShape,
  kDtype,
  kOp,
  kRoot,
  kScale,
  kGroupName,
  kGroupSize,
  kGroupIndex,
  kUngrouped,
  kOneOfGroup,
  kMembersOfSet
};
inline constexpr int kDifferences = 11;

inline constexpr int kEpochs = 2;
inline constexpr int kSteps = 10;
inline constexpr double kPeerTimeout = 3;
inline constexpr double kStallShutdown =
    3.7;  // after the detection of a lost peer, before the end of a long delay
inline constexpr double kStartTimeout = 4;
inline constexpr double kLongDelaySeconds = 4.5;

struct Plan {
  std::uint64_t seed = 0;
  int ranks = 0;
  std::string hosts = {};  ///< as HVD_TEST_HOSTS takes them; empty: one host
  Fault fault = Fault::kNone;
  Moment moment = Moment::kBeforeStep;
  Difference difference = Difference::kShape;
  int victim = 0;
  int epoch = 0;
  int step = 0;
  int position = 0;    ///< among the operations of the step, or the last
  double delay = 0;    ///< in seconds: until the timer triggers the fault, or the length of a delay
  bool joins = false;  ///< epochs end with uneven steps and join()
  std::vector<int> extra = {};      ///< per rank: the number of extra steps before join()
  std::vector<int> subset = {};     ///< the process set that takes part in the steps
  std::vector<int> survivors = {};  ///< all but the victim

  bool victim_in_subset() const;
  /// Whether a separate thread causes the fault, at a moment that depends on the clock only.
  bool by_timer() const;
};

Plan make_plan(std::uint64_t seed);
const char* to_string(Fault);
std::string describe(const Plan&);

}  // namespace hvd::campaign
