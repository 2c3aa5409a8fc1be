#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "base/message_box.h"
#include "engine/operations.h"
#include "negotiation/process_set_table.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// Passes a small message between two ranks of a host while both sides wait for it: a thread of one
/// in send() and a thread of the other in receive(). It sends no control message and makes no
/// operation. If the other side does not arrive in time, the call has no effect, and the message
/// has to go through PointToPoint.
///
/// Not thread-safe: used by the thread that drives the engine. Does not throw.
class QuickMessages {
 public:
  /// The control plane outlives it.
  explicit QuickMessages(control::ControlPlane&);

  /// Whether this message may pass here, as far as the call alone shows. False for every call that
  /// PointToPoint refuses.
  bool accepts(const Message&, const control::ProcessSetTable&) const noexcept;

  /// @param step drives the engine while the receiver takes long to read the message. @return
  /// whether the engine still runs
  /// @return whether the receiver has the message; if not, it will not get the message, or the
  /// engine has failed
  /// @pre accepts(), it is a send, and no earlier send to this rank is outstanding
  bool send(const Message&, const std::function<bool()>& step);
  /// @param interrupted whether the wait has to end now
  /// @return the source of the message, if one has been received
  /// @pre accepts(), it is a recv, and no earlier offer or recv of its key waits on this rank
  std::optional<int> receive(const Message&, const control::ProcessSetTable&,
                             const std::function<bool()>& interrupted);

  /// Whether send() waits for a rank that is reading its message.
  bool waits_for_reader() const noexcept { return waits_for_reader_; }

 private:
  struct Peer {
    int rank = 0;
    MessageBox outgoing, incoming;
  };
  Peer* find(int rank) noexcept;
  bool reaches(int rank) const noexcept;
  bool end(MessageBox&, const std::function<bool()>& step);

  control::ControlPlane& control_;
  std::vector<Peer> peers_;
  std::vector<int> peer_of_rank_;  ///< index of peers_, or -1
  std::size_t capacity_ = 0;       ///< of each box
  bool waits_for_reader_ = false;
};

}  // namespace hvd::runtime
