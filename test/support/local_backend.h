#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "backend/backend.h"
#include "base/mutex.h"

namespace hvd::testing {

class LocalGroup;

/// Connects the LocalBackends of ranks that are in one process. Thread-safe; the backends of all
/// ranks share it.
class LocalWorld {
 public:
  /// @param size number of ranks that share this object
  explicit LocalWorld(int size) : size_(size) {}

  int size() const noexcept { return size_; }

  /// Returns the group for a member's next channel over this process set. The n-th call of a member
  /// gets the same group as the n-th call of each other member.
  /// @throws Error when the members pass different ranks
  std::shared_ptr<LocalGroup> join_group(const ChannelSpec&);

 private:
  using Opening = std::pair<int, int>;  ///< process set; how often the member had opened it before
  struct OpenGroup {
    std::shared_ptr<LocalGroup> group;
    int missing;  ///< members that have not joined yet
  };

  const int size_;
  Mutex mutex_;
  /// By process set and world rank.
  std::map<std::pair<int, int>, int> opened_ HVD_GUARDED_BY(mutex_);
  std::map<Opening, OpenGroup> open_groups_ HVD_GUARDED_BY(mutex_);
};

/// Collectives between ranks of one process, which are threads or objects that one thread steps.
/// Each rank reduces its slice of all inputs, in rank order, and writes it to all outputs. There is
/// one backend per rank.
///
/// Thread-safe where Backend is. The thread that drives a rank uses its channels and works. A Work
/// that is destroyed before it is complete waits, for the time of a copy, until no other rank
/// accesses its memory, and fails the other ranks.
class LocalBackend final : public Backend {
 public:
  explicit LocalBackend(std::shared_ptr<LocalWorld> world) : world_(std::move(world)) {}

  std::string_view name() const noexcept override { return "local"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  std::shared_ptr<LocalWorld> world_;
};

}  // namespace hvd::testing
