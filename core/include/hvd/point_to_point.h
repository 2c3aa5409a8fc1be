#pragma once

/// Messages from one rank to another: send and recv. `<hvd/collectives.h>` has the operations of
/// all ranks.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/types.h"

namespace hvd {

/// @addtogroup adapters
/// @{

/// As the source of a recv: any rank of the process set.
inline constexpr int kAnySource = -1;

/// How a message is matched besides its two ranks. A send and a recv match when they have the same
/// process set and the same name or, without a name, the same tag.
struct MessageOptions {
  std::int64_t tag = 0;  ///< unused with a name
  std::string name = {};
  ProcessSet process_set = {};
  /// For a tensor on a GPU: it is accessed after this event; null: at once. See record_event() in
  /// `<hvd/device.h>`.
  EventPtr input_ready = {};
};

/// Starts to send the tensor to a world rank of the process set.
/// Never blocks. Any number of sends and recvs may be outstanding, in any order; those of the same
/// two ranks, process set and tag or name match in the order of the calls. The operation is done
/// when the receiver has the message, so a send needs its recv: two ranks that both send to each
/// other before they receive must use isend(). The memory must stay unchanged until then.
///
/// The operation ends with MismatchError on both ranks if the two tensors differ in dtype or number
/// of elements (shapes may differ). It ends with PeerLostError when a rank is lost, and with
/// ShutdownError when the other rank has called shutdown(). If no recv has matched it for
/// Options::stall_shutdown, it ends with StalledError, and so does the recv that would have matched
/// it.
///
/// Memory: a message of at most 8 KiB is sent at once and waits at the receiver, which holds at
/// most 64 KiB from each other rank. A larger message waits in the sender's tensor.
///
/// Each of the two tensors may be in the host's memory or on its rank's GPU. A message from or to a
/// GPU passes through 1 MiB of pinned host memory. The device has copied the tensor when the
/// operation is done, and Operation::output_ready() is after the copy.
/// @throws UsageError for a rank outside the set, this rank itself, or another rank's GPU;
/// NotInitializedError; ShutdownError; the cause of failure when the runtime has failed.
/// Thread-safe.
Operation isend(const TensorView& tensor, int destination, const MessageOptions& = {});

/// Starts to receive into the tensor, from a world rank of the process set or from kAnySource.
/// Operation::result() is the source once the operation is done. Otherwise as isend(); a stalled
/// recv ends the send that would have matched it. The memory must not be accessed until the
/// operation is done.
Operation irecv(const TensorView& tensor, int source, const MessageOptions& = {});

/// isend(), and waits. Throws the operation's error.
void send(const TensorView& tensor, int destination, const MessageOptions& = {});

/// irecv(), and waits. Throws the operation's error. @return the source
int recv(const TensorView& tensor, int source = kAnySource, const MessageOptions& = {});

/// The role of this rank in a message.
enum class Direction : std::uint8_t { kSend, kReceive };

/// One side of a message, for framework adapters: see isend() and irecv().
struct Message {
  Direction direction = Direction::kSend;
  TensorView tensor = {};
  int peer = 0;          ///< world rank of the other side, or kAnySource
  std::int64_t tag = 0;  ///< unused with a name
  std::string name = {};
  int process_set = 0;
  EventPtr input_ready = {};  ///< see MessageOptions
  /// Keeps the memory alive until the operation is done.
  std::shared_ptr<const void> keep_alive = {};
  /// Called once on the thread that drives the engine. Must not block, throw, or call into hvd.
  std::function<void(const Status&)> on_done = {};
};

/// Starts several sends and recvs with one wake-up, in order. Either all are accepted, or the first
/// error is thrown and no operation is accepted. Errors and thread-safety as isend().
std::vector<Operation> start_messages(std::span<const Message>, Progress = Progress::kBackground);

/// @}

}  // namespace hvd
