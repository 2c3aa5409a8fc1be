#pragma once

#include <cstddef>
#include <memory>
#include <optional>

namespace hvd {

/// @addtogroup adapters
/// @{

/// Memory in which the ranks of one host reduce tensors in place: an operation whose tensors are in
/// such memory on every rank makes no copies. The memory is aligned to 64 bytes, and its contents
/// are arbitrary. It is released with the last copy of the pointer, at any time before or after
/// shutdown(), and its pages then go back to the system.
///
/// If the system has no such memory (see `hvd::build_info()`), or it is used up, returns ordinary
/// memory, which all operations accept too. In a child made by fork() the memory behaves as
/// ordinary memory: the child's writes are private to the child.
/// @throws std::bad_alloc. Thread-safe; usable before init().
std::shared_ptr<std::byte> allocate_shared(std::size_t bytes);

/// The same for use by an allocator: returns a block that free_shared_block() frees. Freed pages
/// stay mapped, so that their next use causes no page faults. Null when there is no such memory,
/// when it is used up, and in a child made by fork(). The first failure logs a warning with the
/// reason. Thread-safe; usable before init(), and until the very end of the process.
std::byte* allocate_shared_block(std::size_t bytes) noexcept;
/// @return false, without effect, if `block` is not an address in such memory. @pre an address in
/// such memory is a block from allocate_shared_block() (unchecked: the arena looks it up).
/// Thread-safe. In a child made by fork() inherited blocks are not used again.
bool free_shared_block(void* block) noexcept;

/// Returns the pages of freed blocks to the system. Thread-safe. No effect in a child made by
/// fork().
void return_shared_pages() noexcept;

/// The value of HVD_SHM_ALLOCATOR: whether all of a framework's tensors lie in such memory. Empty
/// if it is not set; then only gradients do. An invalid value counts as unset here, and makes
/// init() fail.
std::optional<bool> shared_allocator_setting() noexcept;
/// Whether this process has such memory. Thread-safe.
bool has_shared_memory() noexcept;
/// Whether the whole range lies in memory that ranks of this host can reach. Thread-safe.
bool is_shared(const void* memory, std::size_t bytes) noexcept;

/// @}

}  // namespace hvd
