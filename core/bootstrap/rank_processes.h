#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "base/process_watch.h"
#include "bootstrap/admission.h"

namespace hvd::rendezvous {

/// The processes of ranks that have come. The end of one that is on this host and in this pid
/// namespace is seen; of others nothing is known. So no live rank is taken for a lost one.
///
/// Not thread-safe.
class RankProcesses {
 public:
  /// @param place for messages
  explicit RankProcesses(std::string place) : place_(std::move(place)) {}

  /// Of each rank the first counts.
  void add(const Arrival&);
  bool has_ended(int rank);
  /// One whose end has been seen, or null.
  const Arrival* any_ended();

  using Look = std::function<std::optional<Bytes>()>;
  /// Where what is waited for is found.
  struct Place {
    Look value;
    Look failure;  ///< why nobody should go on waiting
    Look arrival;  ///< who the rank is that puts the value
  };
  /// Waits for what that rank puts; nothing: it has not come in time. Raises a failure, and the
  /// loss of that rank if it has ended without.
  /// @param repeat calls its argument until that is true, or the time is over
  std::optional<Bytes> wait(int rank, const Place&,
                            const std::function<void(const std::function<bool()>&)>& repeat);

 private:
  struct Known {
    Arrival arrival;
    ProcessWatch process;
  };
  std::optional<Bytes> look(int rank, const Place&);

  const std::string place_;
  std::map<int, Known> known_;
};

}  // namespace hvd::rendezvous
