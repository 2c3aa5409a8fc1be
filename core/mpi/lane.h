#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "mpi/mpi_world.h"
#include "mpi/request_table.h"
#include "mpi/tuning.h"

namespace hvd::mpi {

/// Tags of one process set, counted from Lane::first_tag. Messages of one tag between two ranks are
/// sent and received in the same order; messages that may overtake one another have tags of their
/// own.
inline constexpr int kMaxWindows = 4;
inline constexpr int kScatterTag = 0;           ///< + window modulo MpiTuning::windows
inline constexpr int kGatherTag = kMaxWindows;  ///< likewise
inline constexpr int kDirectTag = 2 * kMaxWindows;
inline constexpr int kFlowTag = 2 * kMaxWindows + 1;
inline constexpr int kHierarchicalTag =
    2 * kMaxWindows +
    2;  ///< of another backend, whose channel for a set works beside that of `mpi`
inline constexpr int kTagsPerSet = 16;

/// Memory for what is received before it is reduced. Kept from one collective to the next.
class Staging {
 public:
  /// At least `bytes` bytes, aligned to a page. What it held is lost.
  std::byte* reserve(std::size_t bytes);
  /// Gives the memory up without freeing it. See Note [Who frees the buffer].
  void leak() noexcept { static_cast<void>(memory_.release()); }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

/// What a channel and its Works share: who takes part, under which tags, and buffers that outlive a
/// Work.
///
/// Not thread-safe: the thread that drives the engine.
class Lane {
 public:
  Lane(std::shared_ptr<MpiWorld> world, const ChannelSpec&, Peers&, const MpiTuning&);

  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  int rank() const noexcept { return spec_.set_rank; }
  /// The memory is a device's: only MPI may touch it.
  bool on_device() const noexcept { return spec_.device.type != DeviceType::kCpu; }
  const MpiTuning& tuning() const noexcept { return tuning_; }

  /// Peers are set ranks here.
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, int tag);
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, int tag);
  std::span<const int> test();
  /// There is more to do at once, without any message.
  void keep_going() noexcept { moved_ = true; }
  /// Whether something was started or completed since the last call.
  bool take_moved() noexcept { return std::exchange(moved_, false); }
  /// Rings every peer with which something has moved since the last call, and this rank if there is
  /// `more` to do here.
  void ring_touched(bool more) noexcept;

  RequestTable requests;
  Staging staging;
  std::vector<const std::byte*> sources;  ///< one per rank, for hvd::reduce()

  /// A Work was dropped before it completed. Nothing can be launched any more.
  void abandon() noexcept;
  bool abandoned() const noexcept { return abandoned_; }

 private:
  void touch(int world_rank) noexcept;

  std::shared_ptr<MpiWorld> world_;
  ChannelSpec spec_;
  Peers& peers_;
  MpiTuning tuning_;
  int first_tag_;
  std::vector<char> touched_;  ///< per world rank
  std::vector<int> touched_ranks_;
  bool moved_ = false;
  bool abandoned_ = false;
};

/// Base of the Works. A Work that is destroyed before step() has returned true abandons its lane.
class MpiWork : public Work {
 public:
  explicit MpiWork(std::shared_ptr<Lane> lane) : lane_(std::move(lane)) {}
  MpiWork(const MpiWork&) = delete;
  MpiWork& operator=(const MpiWork&) = delete;
  ~MpiWork() override {
    if (!complete_) lane_->abandon();
  }
  bool progress() final;

 protected:
  /// One pass over what can be done now; true when all is done. Called again when something has
  /// moved.
  virtual bool step() = 0;
  Lane& lane() noexcept { return *lane_; }

 private:
  std::shared_ptr<Lane> lane_;
  bool complete_ = false;
};

}  // namespace hvd::mpi
