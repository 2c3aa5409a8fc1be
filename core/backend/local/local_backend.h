#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "backend/backend.h"
#include "base/mutex.h"

namespace hvd {

namespace local {
class LocalGroup;
}

/// What the ranks of one process have in common: a place to meet. Thread-safe; shared by the
/// backends of all ranks.
class LocalWorld {
 public:
  /// @param size ranks that share this object. A world of one is the backend of a job of one rank.
  explicit LocalWorld(int size = 1) : size_(size) {}

  int size() const noexcept { return size_; }

  /// The group for a member's next channel over this process set: the n-th call of one member meets
  /// the n-th of the others.
  /// @throws Error when the members disagree about who is in the set.
  std::shared_ptr<local::LocalGroup> enter(const ChannelSpec&);

 private:
  using Opening = std::pair<int, int>;  ///< process set, how often a member had opened it before
  struct Waiting {
    std::shared_ptr<local::LocalGroup> group;
    int missing;  ///< members that have not entered yet
  };

  const int size_;
  Mutex mutex_;
  /// By process set and world rank.
  std::map<std::pair<int, int>, int> opened_ HVD_GUARDED_BY(mutex_);
  std::map<Opening, Waiting> waiting_ HVD_GUARDED_BY(mutex_);
};

/// Collectives between the ranks of one process, each a thread or an object that one thread steps:
/// every rank reduces its slice of all inputs, in rank order, and writes it to all outputs. One per
/// rank.
///
/// Thread-safe where Backend is; channels and works are used by the thread that drives their rank.
/// A Work that is destroyed before it is complete waits (for the time of a copy) until no other
/// rank touches its memory, and fails the others.
class LocalBackend final : public Backend {
 public:
  explicit LocalBackend(std::shared_ptr<LocalWorld> world = std::make_shared<LocalWorld>());

  std::string_view name() const noexcept override { return "local"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  std::shared_ptr<LocalWorld> world_;
};

}  // namespace hvd
