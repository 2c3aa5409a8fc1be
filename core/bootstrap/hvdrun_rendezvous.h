#pragma once

#include <memory>
#include <string>

#include "bootstrap/rendezvous.h"

namespace hvd::rendezvous {

/// Meets through hvdrun: this process's supervisor passes on what it asks, and hvdrun serves the
/// meeting.
/// @param socket the supervisor's, in the abstract namespace of this host
/// @throws UsageError also where no supervisor listens there
std::unique_ptr<Rendezvous> meet_through_hvdrun(const std::string& socket, const Introduction&,
                                                Deadline);

}  // namespace hvd::rendezvous
