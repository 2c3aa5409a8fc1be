#include "bootstrap/tcp_rendezvous.h"
#include "hvd/error.h"

namespace hvd::rendezvous {

std::unique_ptr<Rendezvous> meet_at_port(const std::string& host, std::uint16_t port,
                                         const Introduction&, Deadline) {
  throw UsageError("hvd::init: init_method 'tcp://" + host + ":" + std::to_string(port) +
                   "': this hvd was built without Asio (Debian: libasio-dev); use file:///path");
}

}  // namespace hvd::rendezvous
