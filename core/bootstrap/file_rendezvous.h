#pragma once

#include <memory>
#include <string>

#include "bootstrap/rendezvous.h"

namespace hvd::rendezvous {

/// Meets in a file of a folder that all ranks share. Only what POSIX says of link() and rename() is
/// relied on, so NFS will do.
/// @param path absolute. Files beside it whose names begin with it are hvd's too
std::unique_ptr<Rendezvous> meet_in_file(const std::string& path, const Introduction&, Deadline);

}  // namespace hvd::rendezvous
