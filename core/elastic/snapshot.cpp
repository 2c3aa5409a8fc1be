#include "elastic/snapshot.h"

#include <bit>
#include <cstring>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::elastic {
namespace {

constexpr std::size_t kMaxLayoutBytes = 200;
/// One stream of reads does not use a core's bandwidth: with this distance 100 MiB take half the
/// time.
constexpr std::size_t kPrefetchedAhead = 4096;
constexpr std::uint64_t kFirst = 0x9e3779b185ebca87;
constexpr std::uint64_t kSecond = 0xc2b2ae3d27d4eb4f;

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  return std::rotl(hash + word * kSecond, 31) * kFirst;
}

std::uint64_t word_at(const std::byte* bytes) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// std::vector would double the memory of a large state that has grown by a byte.
void reserve(std::vector<std::byte>& buffer, std::size_t bytes) {
  if (buffer.capacity() < bytes) buffer.reserve(bytes + bytes / 8);
}

/// The size of a snapshot of the selected items.
std::size_t size_of(std::span<const Item> items, Selection selected) {
  std::size_t bytes = 0;
  for (const Item& item : items)
    if (selected(item)) bytes += sizeof(std::uint64_t) + item.view().size();
  return bytes;
}

}  // namespace

// Four lanes, so that the multiplications of one word do not wait for those of the word before.
std::uint64_t hash_of(std::span<const std::byte> bytes) noexcept {
  std::uint64_t lanes[4] = {kFirst + kSecond, kSecond, 0, 0 - kFirst};
  const std::byte* next = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 32; left -= 32, next += 32) {
    __builtin_prefetch(next + kPrefetchedAhead);
    for (std::size_t lane = 0; lane < 4; ++lane)
      lanes[lane] = mix(lanes[lane], word_at(next + 8 * lane));
  }
  std::uint64_t hash = bytes.size();
  for (const std::uint64_t lane : lanes) hash = mix(hash, lane);
  for (; left > 0; --left, ++next) hash = mix(hash, static_cast<std::uint64_t>(*next) + 1);
  hash ^= hash >> 33;
  hash *= kSecond;
  return hash ^ hash >> 29;
}

void resize(std::vector<std::byte>& buffer, std::size_t bytes) {
  reserve(buffer, bytes);
  buffer.resize(bytes);
}

void save(std::span<const Item> items, std::vector<std::byte>& snapshot, Selection selected) {
  if (snapshot.empty()) reserve(snapshot, size_of(items, selected));
  std::size_t end = 0;
  for (const Item& item : items) {
    if (!selected(item)) continue;
    const std::span<const std::byte> content = item.view();
    const std::uint64_t size = content.size();
    const std::size_t next = end + sizeof size;
    end = next + size;
    // The buffer keeps the size of the last commit, which is usually enough.
    if (snapshot.size() < end) resize(snapshot, end);
    std::memcpy(snapshot.data() + next - sizeof size, &size, sizeof size);
    if (size > 0) std::memcpy(snapshot.data() + next, content.data(), size);
  }
  snapshot.resize(end);
}

void load(std::span<const Item> items, std::span<const std::byte> snapshot, Selection selected) {
  for (const Item& item : items) {
    if (!selected(item)) continue;
    std::uint64_t size = 0;
    const bool begins = snapshot.size() >= sizeof size;
    if (begins) std::memcpy(&size, snapshot.data(), sizeof size);
    if (!begins || size > snapshot.size() - sizeof size) {
      throw Error(text("hvd::elastic: the received state ends at '", item.name,
                       "'; start the same program everywhere"));
    }
    const std::span<std::byte> room = item.room(size);
    if (size > 0) std::memcpy(room.data(), snapshot.data() + sizeof size, size);
    if (item.loaded) item.loaded();
    snapshot = snapshot.subspan(sizeof size + size);
  }
  if (!snapshot.empty()) {
    throw Error(text("hvd::elastic: the received state has ", snapshot.size(),
                     " bytes more than this program tracks; start the same program everywhere"));
  }
}

std::uint64_t hash_of(std::span<const Item> items, Selection selected) {
  std::uint64_t hash = kFirst;
  for (const Item& item : items) {
    if (selected(item) && item.equal_on_ranks) hash = mix(hash, hash_of(item.view()));
  }
  return hash;
}

std::string layout(std::span<const Item> items) {
  std::string all;
  for (const Item& item : items) all += text(all.empty() ? "" : ", ", item.name, " ", item.type);
  if (all.size() <= kMaxLayoutBytes) return all;
  const std::uint64_t hash = hash_of(std::as_bytes(std::span(all)));
  return text(all.substr(0, kMaxLayoutBytes), "... (", items.size(), " items, hash ", hash, ")");
}

}  // namespace hvd::elastic
