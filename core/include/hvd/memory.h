#pragma once

#include <cstddef>
#include <memory>

namespace hvd {

/// Memory in which the ranks of one host reduce tensors in place: an operation whose tensors are in
/// such memory on every rank makes no copies. 64-byte aligned, contents arbitrary, released with
/// the last copy of the pointer, at any time before or after shutdown(); its pages then go back to
/// the system.
///
/// Where the system has no such memory (see `hvd::build_info()`), or none is left, it is ordinary
/// memory, and everything works the same. A child made by fork() has it as it has ordinary memory:
/// what it writes is seen by nobody else.
/// @throws std::bad_alloc. Thread-safe; usable before init().
std::shared_ptr<std::byte> allocate_shared(std::size_t bytes);

/// The same for an allocator: a block that free_shared_block() takes back. Its pages wait, mapped,
/// for their next use, which then causes no page faults. Null when there is no such memory, or none
/// is left, and in a child made by fork(); the first time a warning in the log says why.
/// Thread-safe; usable before init(), and until the very end of the process.
std::byte* allocate_shared_block(std::size_t bytes) noexcept;
/// @return false, with nothing done, if `block` is no address in such memory. @pre otherwise it
/// comes from allocate_shared_block() (unchecked: the arena looks it up). Thread-safe. In a child
/// made by fork() what it has inherited is not used again.
bool free_shared_block(void* block) noexcept;

/// Whether HVD_SHM_ALLOCATOR asks for such memory under a framework's tensors. A value that cannot
/// be understood asks for nothing here, and is an error of init().
bool shared_allocator_requested() noexcept;
/// Whether this process has such memory. Thread-safe.
bool has_shared_memory() noexcept;
/// Whether all of this lies in memory that ranks of this host can reach. Thread-safe.
bool is_shared(const void* memory, std::size_t bytes) noexcept;

}  // namespace hvd
