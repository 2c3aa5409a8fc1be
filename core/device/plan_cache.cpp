#include "device/plan_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace hvd::device {
namespace {

/// Batches of a step, times the buffers that they take turns in where input and output differ.
constexpr std::size_t kMostTables = 256;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value;
  hash *= 0x9e3779b97f4a7c15U;
  return hash ^ (hash >> 32);
}

std::uint64_t hash_of(std::span<const Piece> pieces, const CopyForm& form, Stream stream) {
  std::uint64_t hash =
      mix(reinterpret_cast<std::uintptr_t>(stream.handle), static_cast<std::uint64_t>(form.scales));
  hash = mix(mix(hash, static_cast<std::uint64_t>(form.tensor)),
             static_cast<std::uint64_t>(form.buffer));
  for (const Piece& piece : pieces) {
    hash = mix(mix(mix(hash, reinterpret_cast<std::uintptr_t>(piece.tensor)), piece.offset),
               piece.count);
  }
  return hash;
}

}  // namespace

PlanCache::PlanCache(Api& api, std::shared_ptr<EventPool> events)
    : api_(api), events_(std::move(events)) {}

PlanCache::~PlanCache() {
  for (Table& table : tables_) free_memory(table);
}

void PlanCache::free_memory(Table& table) noexcept {
  try {
    if (!reached(table.last_used)) return;  // the device has been given up on
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a table on the device was not freed: " << error.what();
    return;
  }
  api_.release(reinterpret_cast<std::byte*>(table.tiles));
  api_.release_pinned(reinterpret_cast<std::byte*>(table.staging));
}

void PlanCache::allocate(Table& table, std::size_t tiles) {
  const std::size_t capacity = std::bit_ceil(std::max<std::size_t>(tiles, 64));
  table.staging = reinterpret_cast<Tile*>(api_.allocate_pinned(capacity * sizeof(Tile)));
  table.tiles = reinterpret_cast<Tile*>(api_.allocate(capacity * sizeof(Tile)));
  table.capacity = capacity;
}

// When there are many, the one that was not used for the longest time makes room, if the device is
// done with it.
PlanCache::Tables::iterator PlanCache::make_room(std::size_t tiles) {
  if (tables_.size() >= kMostTables && reached(tables_.back().last_used)) {
    const auto oldest = std::prev(tables_.end());
    std::erase_if(by_hash_, [&](const auto& entry) { return entry.second == oldest; });
    if (oldest->capacity < tiles) {
      free_memory(*oldest);
      allocate(*oldest, tiles);
    }
    tables_.splice(tables_.begin(), tables_, oldest);
    return oldest;
  }
  Table fresh;
  allocate(fresh, tiles);
  tables_.push_front(std::move(fresh));
  return tables_.begin();
}

PlanCache::Table& PlanCache::find(std::span<const Piece> pieces, const CopyForm& form,
                                  Stream stream) {
  const std::uint64_t hash = hash_of(pieces, form, stream);
  const auto [first, last] = by_hash_.equal_range(hash);
  for (auto entry = first; entry != last; ++entry) {
    Table& table = *entry->second;
    if (table.stream != stream || table.form != form ||
        !std::equal(pieces.begin(), pieces.end(), table.pieces.begin(), table.pieces.end()))
      continue;
    tables_.splice(tables_.begin(), tables_, entry->second);
    return table;
  }
  const std::vector<Tile> tiles = cut_into_tiles(pieces, form);
  const auto place = make_room(tiles.size());
  place->pieces.assign(pieces.begin(), pieces.end());
  place->form = form;
  place->stream = stream;
  place->count = static_cast<std::uint32_t>(tiles.size());
  if (!tiles.empty()) {
    std::memcpy(place->staging, tiles.data(), tiles.size() * sizeof(Tile));
    api_.copy(reinterpret_cast<std::byte*>(place->tiles),
              reinterpret_cast<const std::byte*>(place->staging), tiles.size() * sizeof(Tile),
              Direction::kToDevice, stream);
  }
  place->last_used = events_->record(stream);
  by_hash_.emplace(hash, place);
  ++uploads_;
  return *place;
}

void PlanCache::run(std::span<const Piece> pieces, const CopyForm& form, std::byte* buffer,
                    bool to_buffer, double factor, Stream stream) {
  Table& table = find(pieces, form, stream);
  if (table.count == 0) return;
  api_.run({table.tiles, table.count, buffer, form, to_buffer, factor}, stream);
  table.last_used = events_->record(stream);
}

}  // namespace hvd::device
