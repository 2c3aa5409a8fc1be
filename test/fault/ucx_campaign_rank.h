#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace hvd::ucx_campaign {

/// The behaviour of the ranks when one of them is killed.
enum class Moment : int { kConnecting, kLargeMessages, kCancelling };
inline constexpr std::array<std::string_view, 3> kMomentNames = {"connecting", "large messages",
                                                                 "cancelling"};

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
inline constexpr std::array<std::string_view, 7> kEndingNames = {
    "well", "broken", "", "wrong bytes", "silence", "memory kept", "memory touched"};

struct Orders {
  int rank = 0;
  int size = 0;
  Moment moment = Moment::kConnecting;
  std::uint64_t seed = 0;
  int socket = -1;  ///< to the supervisor
};

/// Runs a rank and returns its exit code.
int run_rank(const Orders&);

/// Send and receive one message through a socket of the supervisor. Throw if the other end has
/// closed it.
void send_address(int socket, std::span<const std::byte>);
std::vector<std::byte> receive_address(int socket);

}  // namespace hvd::ucx_campaign
