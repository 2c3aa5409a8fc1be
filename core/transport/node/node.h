#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cache_line.h"
#include "base/expect.h"
#include "base/message_box.h"
#include "base/topology.h"
#include "transport/node/control_segment.h"

namespace hvd::host {

/// An allgather: each rank contributes `bytes` bytes and receives the bytes of all ranks in rank
/// order. Collective. Throws when a rank does not take part in time.
using Exchange = std::function<void(const void* mine, void* all, std::size_t bytes)>;
/// The reports of all ranks in one exchange, by rank. Plain bytes, because all ranks run the same
/// program on the same architecture.
using Reports = std::function<std::span<const std::byte>(std::size_t rank)>;

/// This rank's host and the state that it shares with the other ranks there: the control segment,
/// the doorbells, the counts of messages, and the rings and boxes for small ones.
///
/// Only the thread that drives the engine calls it, except topology() and ring(), which any thread
/// may call.
///
/// Two ranks are on one host if its name, its boot id and its /dev/shm agree. The environment
/// variable HVD_TEST_HOSTS="a,a,b,b" (one name per rank; for tests only) overrides that: ranks with
/// different names then treat each other as remote.
class Node {
 public:
  /// Determines which ranks share a host, and sets up the control segments. Collective.
  /// @param share_memory false behaves as if the host had no shared memory; for tests
  static std::shared_ptr<Node> join(int rank, int size, const Exchange&, bool share_memory = true);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  /// Removes abandoned segment files of this host: a rank that was killed while the ranks joined
  /// may have ended only after NodeJoin had looked for them.
  ~Node();

  const Topology& topology() const noexcept { return topology_; }

  /// Whether the ranks of this host share the control segment. If not, they poll (rung_by_all()).
  bool control_segment_shared() const noexcept { return control_segment_shared_; }
  /// Whether control_segment_shared() is true on every host. The same on every rank.
  bool all_control_segments_shared() const noexcept { return all_control_segments_shared_; }
  /// The bytes that were available for shared segments on the host of `world_rank` when its first
  /// rank joined: the free space of /dev/shm, or no limit if segments do not need that space. The
  /// same on every rank.
  std::uint64_t shared_memory_free(int world_rank) const noexcept {
    return free_of_host_[static_cast<std::size_t>(
        topology_.host_of_rank[static_cast<std::size_t>(world_rank)])];
  }
  /// Whether every rank of the job can ring this one.
  bool rung_by_all() const noexcept {
    return control_segment_shared_ && topology_.local_size == topology_.size;
  }
  /// Prefix of the names of all objects that the ranks of this host share; unique to the job.
  const std::string& name_prefix() const noexcept { return name_prefix_; }
  ControlSegment& control_segment() noexcept { return *control_segment_; }
  /// See control::ControlPlane.
  ArrivalFlags* arrival_flags(int world_rank, int flag) noexcept;
  ArrivalFlags* remote_arrival_flags() noexcept;
  /// World rank of the process in a slot of the control segment.
  int rank_of_slot(int slot) const noexcept { return local_ranks_[static_cast<std::size_t>(slot)]; }
  /// The world rank that a loss names: the accused one, or the slot's own rank.
  int lost_rank(const ControlSegment::Loss& loss) const noexcept {
    const int accused = loss.accused.value_or(ControlSegment::kUnknownRank);
    return accused == ControlSegment::kUnknownRank ? rank_of_slot(loss.slot) : accused;
  }
  /// Wakes a rank of this host. No effect for ranks of other hosts.
  void ring(int world_rank) noexcept;
  /// Announces a message to that rank. No effect for ranks of other hosts.
  void announce(int world_rank) noexcept;
  /// Announces an entry of the ring to that rank of this host. @pre control_segment_shared()
  void announce_mail(int world_rank) noexcept;
  /// Whether this rank is to be rung for lazy messages: see control::ControlPlane. No effect where
  /// the ranks of this host share no control segment.
  void await_lazy_mail(bool awaits) noexcept;
  /// Whether that rank of this host is to be rung for a lazy message. Call it after
  /// announce_mail().
  bool awaits_lazy_mail(int world_rank) noexcept;
  /// The boxes of this rank and another one; empty if they share no boxes.
  std::optional<MessageBoxes> message_boxes(int world_rank) noexcept;
  /// The entries that have been announced to this rank.
  std::uint64_t own_mail_count() noexcept {
    return control_segment_->mail_count(topology_.local_rank).load(std::memory_order_seq_cst);
  }
  /// Counts an announced message as received.
  void count_received() noexcept { ++messages_received_; }
  /// Whether all announced messages have been received. @pre rung_by_all()
  bool inbox_empty() const noexcept {
    HVD_EXPECT(rung_by_all(), "every rank announces its messages here");
    return control_segment_->own_message_count() == messages_received_;
  }

 private:
  friend class NodeJoin;
  Node() = default;

  Topology topology_;
  std::vector<int> local_ranks_;   ///< world rank per slot
  std::vector<int> slot_of_rank_;  ///< per world rank; -1 on other hosts
  std::string name_prefix_;        ///< agreed by the ranks of this host
  std::unique_ptr<ControlSegment> control_segment_;
  bool control_segment_shared_ = false;
  bool all_control_segments_shared_ = false;
  std::vector<std::uint64_t> free_of_host_;  ///< per host of the topology
  std::uint64_t messages_received_ = 0;
};

/// The steps of Node::join(), for a caller that exchanges the reports together with data of its
/// own. Between two steps all ranks exchange the reports that the first step has returned.
class NodeJoin {
 public:
  NodeJoin(int rank, int size, bool share_memory = true);
  NodeJoin(const NodeJoin&) = delete;
  NodeJoin& operator=(const NodeJoin&) = delete;
  ~NodeJoin();

  std::span<const std::byte> host_report() const noexcept;
  /// Determines which ranks share a host. The first rank of each host makes the control segment.
  std::span<const std::byte> make_segment(const Reports& hosts);
  /// Valid after make_segment().
  const Topology& topology() const noexcept { return node_->topology(); }
  std::span<const std::byte> map_segment(const Reports& made);
  std::shared_ptr<Node> finish(const Reports& mapped);

 private:
  struct HostReport;
  struct SegmentReport;
  static HostReport own_host_report();
  static std::vector<std::string> host_names(const std::vector<HostReport>& all);
  static bool same_host(const HostReport&, const HostReport&);
  void find_topology(const std::vector<HostReport>& all);
  template <class Make>
  void try_segment(Make&&);
  std::span<const std::byte> segment_report() const noexcept;

  const int rank_;
  const std::size_t size_;
  const bool share_memory_;
  const std::shared_ptr<Node> node_;
  const std::unique_ptr<HostReport> host_report_;
  const std::unique_ptr<SegmentReport> segment_report_;
  std::unique_ptr<ControlSegment> segment_;
};

}  // namespace hvd::host
