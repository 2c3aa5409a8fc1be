#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

#include "device/api.h"
#include "device/event_pool.h"

namespace hvd::device {

/// Runs batched copies, and keeps their tables on the device: a table is uploaded when the tensors
/// or their places are new, and not again for a step that repeats. Used by the thread that drives
/// the engine.
class PlanCache {
 public:
  PlanCache(Api&, std::shared_ptr<EventPool>);
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;
  ~PlanCache();

  /// Queues one launch that copies all pieces to the buffer, or from it. With the device current.
  void run(std::span<const Piece>, const CopyForm&, std::byte* buffer, bool to_buffer,
           double factor, Stream);
  std::size_t uploads() const noexcept { return uploads_; }

 private:
  struct Table {
    std::vector<Piece> pieces;
    CopyForm form;
    Stream stream;  // the only one that uses it, so that the upload and all uses are in order
    Tile* tiles = nullptr;     // on the device
    Tile* staging = nullptr;   // what they are uploaded from, in pinned memory
    std::size_t capacity = 0;  // of both, in tiles
    std::uint32_t count = 0;
    EventPtr last_used;
  };
  using Tables = std::list<Table>;

  Table& find(std::span<const Piece>, const CopyForm&, Stream);
  Tables::iterator make_room(std::size_t tiles);
  void allocate(Table&, std::size_t tiles);
  void free_memory(Table&) noexcept;

  Api& api_;
  const std::shared_ptr<EventPool> events_;
  Tables tables_;  // the one used last is first
  std::unordered_multimap<std::uint64_t, Tables::iterator> by_hash_;
  std::size_t uploads_ = 0;
};

}  // namespace hvd::device
