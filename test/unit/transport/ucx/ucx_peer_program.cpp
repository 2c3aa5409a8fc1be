// The other rank of ucx_library_test: ucx_peer_program ENDING BYTES LOOKS PLANE
// Rank 0 of two. Exchanges addresses over stdin and a byte over UCX, sends one message to rank 1 in
// the plane "data" or "control", calls progress() LOOKS times, and then: "kill" kills itself,
// "stop" stops all activity, "live" makes progress until it is killed, "leave" completes the
// messages under way and ends.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "transport/request_table.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"
#include "unit/transport/ucx/two_ranks.h"

namespace {

int run(const std::string& ending, std::size_t bytes, int polls, hvd::message::Plane plane) {
  using namespace hvd;
  auto workers = ucx::open_workers();
  const auto own = workers.address();
  auto members = ucx::JobMembers{.rank = 0, .addresses = {own, testing::swap_addresses(0, own)}};
  const auto carrier = ucx::make_ucx_carrier(std::move(workers), std::move(members));
  message::RequestTable table(*carrier, plane);
  std::byte greeting{};
  testing::exchange(table, 1, greeting);
  const std::vector<std::byte> message(bytes, testing::kByte);
  table.reset(1);
  table.send(0, message, 1, testing::kTag);
  for (int poll = 0; poll < polls; ++poll) {
    carrier->progress();
    ::usleep(100);
  }
  if (ending == "kill") ::raise(SIGKILL);
  while (ending == "stop") ::pause();
  while (ending == "live") carrier->progress();
  while (table.in_flight() > 0) table.test();
  carrier->farewell();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    if (count != 5) return 2;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // so that a test that ends early leaves no process
    return run(arguments[1], std::strtoul(arguments[2], nullptr, 10), std::atoi(arguments[3]),
               arguments[4] == std::string("data") ? hvd::message::Plane::kData
                                                   : hvd::message::Plane::kControl);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peer: %s\n", error.what());
    return 1;
  }
}
