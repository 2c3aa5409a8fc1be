#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hvd {

/// Raises the soft limit of this process's file descriptors (`ulimit -n`) to the hard limit, but to
/// at most 2^20, because some programs close every number up to the limit. A rank needs a
/// descriptor for each connection.
void raise_descriptor_limit() noexcept;

/// Opens a few unused descriptors as a reserve. A process that has run out of descriptors calls
/// release_descriptors() to close them, so that it can still notify other ranks and close its
/// connections in order. No effect if the reserve is open. Thread-safe, also with
/// release_descriptors().
void reserve_descriptors() noexcept;
void release_descriptors() noexcept;
/// Whether the process had no descriptor left when release_descriptors() last closed the reserve.
bool ran_out_of_descriptors() noexcept;
/// @throws hvd::Error that names the limit, if fewer than `count` descriptors can be opened now
void require_descriptors(std::size_t count);

/// Whether this value of errno means that the process or its host has run out of a resource, so no
/// other rank is the cause.
bool is_shortage(int error) noexcept;

/// The errno value of the shortage that an error text of the system names, such as "Too many open
/// files"; 0 if it names no shortage.
int shortage_in(std::string_view text) noexcept;

/// Text for users: what is missing, the limit that applies, and what to do.
/// @pre is_shortage(error)
std::string describe_shortage(int error);

}  // namespace hvd
