#pragma once

#include <memory>
#include <string>

#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// A store in a folder beside a path: PATH.hvd, or PATH.JOB.hvd for a job with a name. The first
/// rank that opens the store makes the folder, with access for this user only; each key is a file
/// in it. PATH itself is never opened or changed.
///
/// Relies on link(), rename() and flock(). Not tested on NFS.
/// @param path absolute, of a file
/// @throws UsageError if the path exists but is not a regular file of this user, or if other users
/// may access the folder; hvd::Error if the parent folder of the path does not exist
std::unique_ptr<Store> open_file_store(const std::string& path, const std::string& job);

}  // namespace hvd::rendezvous
