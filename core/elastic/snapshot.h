#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hvd/elastic.h"

namespace hvd::elastic {

/// A 64-bit hash of bytes, equal on all hosts of a job. Detects damage, but not attacks.
std::uint64_t hash_of(std::span<const std::byte>) noexcept;

using Item = Part;

/// Selects the items of a snapshot.
using Selection = bool (*)(const Item&);
/// The items that commits copy and that are equal on all ranks.
inline bool is_copied(const Item& item) { return !item.touched && item.equal_on_ranks; }
/// The items of which each rank has its own value.
inline bool is_own(const Item& item) { return !item.touched && !item.equal_on_ranks; }
/// The items that commits do not copy.
inline bool is_live(const Item& item) { return static_cast<bool>(item.touched); }

/// Resizes a buffer. If it needs more memory, it gets room for an eighth more, so that a state that
/// grows a little is copied into the same memory.
void resize(std::vector<std::byte>& buffer, std::size_t bytes);
/// Copies the selected items into the buffer, whose memory it reuses.
void save(std::span<const Item>, std::vector<std::byte>& snapshot, Selection = is_copied);
/// The inverse of save(). @throws hvd::Error if the snapshot does not fit these items
void load(std::span<const Item>, std::span<const std::byte> snapshot, Selection = is_copied);
/// The hash of the current bytes of the selected items that are equal on all ranks.
std::uint64_t hash_of(std::span<const Item>, Selection);
/// Identifies a program by the names and types of its items: a text for users, at most 300 bytes.
std::string layout(std::span<const Item>);

}  // namespace hvd::elastic
