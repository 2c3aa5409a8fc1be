#pragma once

#include <cstdint>
#include <string_view>

namespace hvd::ucx_campaign {

/// The behaviour of the ranks when one of them is killed.
enum class Moment : int { kConnecting, kLargeMessages, kTakingBack };
inline constexpr std::string_view kMomentNames[] = {"connecting", "large messages", "taking back"};
inline constexpr int kMoments = 3;

// Messages from the supervisor to a rank, one byte each. A byte below kFirstWord is the number of a
// rank that has been killed.
inline constexpr unsigned char kFirstWord = 200;
inline constexpr unsigned char kStop = 200;  ///< cancel the messages in flight
inline constexpr unsigned char kEnd = 201;
/// A rank's answer: it has received a message from every survivor.
inline constexpr unsigned char kDone = 202;

/// Exit codes of a rank.
enum Ending : int {
  kWell = 0,
  kBroken = 1,      ///< an unexpected error
  kWrongBytes = 3,  ///< a message has the wrong bytes
  kSilence = 4,     ///< survivors do not receive each other's messages
  kKept = 5,        ///< memory was not released in time
  kTouched = 6,     ///< memory was written to after its release
};
inline constexpr std::string_view kEndingNames[] = {
    "well", "broken", "", "wrong bytes", "silence", "memory kept", "memory touched"};

struct Orders {
  int rank = 0;
  int size = 0;
  Moment moment = Moment::kConnecting;
  std::uint64_t seed = 0;
  int socket = -1;  ///< to the supervisor
};

/// A rank's life, up to its exit code.
int live(const Orders&);

}  // namespace hvd::ucx_campaign
