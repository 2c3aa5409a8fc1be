#include "base/text.h"
#include "bootstrap/rendezvous.h"
#include "hvd/error.h"

// Compiled instead of tcp_rendezvous.cpp in a build without Asio.

namespace hvd::rendezvous {

std::unique_ptr<Rendezvous> join_at_port(const std::string& host, std::uint16_t port,
                                         const RankInfo&, Deadline) {
  throw UsageError(
      text("hvd::init: init_method 'tcp://", host, ":", port,
           "': this hvd was built without Asio (Debian: libasio-dev); use file:///path"));
}

}  // namespace hvd::rendezvous
