#pragma once

#include <memory>
#include <string>

#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// A store in a folder beside a path: PATH.hvd, or PATH.JOB.hvd for a job with a name. It is made
/// by the first rank that opens it, with access for this user alone, and each key is a file in it.
/// PATH itself is never opened or changed.
///
/// It relies on link(), rename() and flock(). It has not been tried on NFS.
/// @param path absolute, of a file
/// @throws UsageError if the path is something else than a regular file of this user, or the folder
/// is not this user's alone; hvd::Error if the folder of the path does not exist
std::unique_ptr<Store> open_file_store(const std::string& path, const std::string& job);

}  // namespace hvd::rendezvous
