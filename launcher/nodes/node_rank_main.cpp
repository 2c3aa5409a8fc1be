#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/text.h"
#include "bootstrap/socket_store.h"
#include "hvd/error.h"

// Note [How nodes get their ranks]
//
// With --rdzv-backend c10d the nodes of a job are equal, and their hvdruns distribute the ranks.
// The hvdrun on the endpoint's host serves a store there and is node 0; each of the others takes a
// free rank in the store. All nodes wait until the last node has joined, and node 0 waits until all
// have read the port at which rank 0 of the job will serve. The store then ends. A node that is
// ended by a signal or gives up before that returns its rank; a node whose host dies does not.
//
//   next    add    the attempts to take a rank, which begin at different ranks
//   rank.K  add    1 while a node has this rank
//   nodes   add    the nodes that have a rank, without node 0
//   port    set    by node 0
//   all     set    by the last node
//   left    add    the nodes that have read the port
//   done    set    by the last of these

namespace {

using hvd::Deadline;
using hvd::text;
using hvd::rendezvous::Store;

constexpr auto kTimeToLeave = std::chrono::seconds(10);
/// Interval at which a waiting node checks whether a signal has arrived.
constexpr auto kSlice = std::chrono::milliseconds(200);
constexpr auto kPauseBetweenAttempts = std::chrono::milliseconds(50);

volatile std::sig_atomic_t interrupted = 0;

struct Arguments {
  std::string host;
  int port = 0;
  std::string job;
  int nodes = 0;
  double seconds = 0;
  int master_port = 0;
  bool serves = false;  ///< the endpoint is an address of this host
};

/// Waits for a value. Empty after the deadline, or when a signal has arrived.
std::string value_of(Store& store, const std::string& key, Deadline deadline) {
  const std::vector<std::string> keys = {key};
  while (true) {
    const Deadline now = std::chrono::steady_clock::now();
    const auto found = store.wait(keys, std::min<Deadline>(deadline, now + kSlice));
    if (found) return {reinterpret_cast<const char*>(found->value.data()), found->value.size()};
    if (now >= deadline || interrupted != 0) return {};
  }
}

void set(Store& store, const std::string& key, const std::string& value, Deadline deadline) {
  store.set(key, hvd::rendezvous::bytes_of(value), deadline);
}

/// Opens the store. On the endpoint's host another hvdrun may already serve it, if several nodes
/// run on one host.
std::unique_ptr<Store> open(const Arguments& arguments, bool& serves, Deadline deadline) {
  const char* const token = std::getenv("HVD_JOB_TOKEN");
  // The server admits one session per rank, but the nodes have no ranks yet.
  std::random_device random;
  std::uniform_int_distribution<int> any(1, hvd::rendezvous::kMaxRanks - 1);
  hvd::rendezvous::RankInfo own{.job = arguments.job,
                                .token = token != nullptr ? token : "",
                                .rank = 0,
                                .size = hvd::rendezvous::kMaxRanks};
  const auto port = static_cast<std::uint16_t>(arguments.port);
  std::string not_served;
  if (serves) {
    try {
      return hvd::rendezvous::open_tcp_store(arguments.host, port, own, deadline);
    } catch (const hvd::UsageError& error) {
      not_served = text("; this node could not serve them: ", error.what());
      serves = false;
    }
  }
  own.rank = any(random);
  try {
    return hvd::rendezvous::open_tcp_store(arguments.host, port, own, deadline);
  } catch (const hvd::Error& error) {
    throw hvd::UsageError(error.what() + not_served);
  }
}

/// Claims a rank from 1 to `last` that no other node has.
int claim_rank(Store& store, int last, Deadline deadline) {
  const std::int64_t first = store.add("next", 1, deadline) - 1;
  while (true) {
    for (int i = 0; i < last; ++i) {
      const int rank = 1 + static_cast<int>((first + i) % last);
      if (store.add(text("rank.", rank), 1, deadline) == 1) return rank;
      store.add(text("rank.", rank), -1, deadline);
    }
    // Nodes that try a rank while another node returns it may all fail, so try again.
    if (store.add("nodes", 0, deadline) >= last)
      throw hvd::UsageError(text("expected ", last + 1, " nodes (--nnodes), but ", last + 1,
                                 " others have already joined at ", store.url()));
    std::this_thread::sleep_for(kPauseBetweenAttempts);
  }
}

/// Gives back this node's rank, so that another node can claim it. @return the reason why the job
/// does not begin
hvd::Error leave(Store& store, const Arguments& arguments, int rank) {
  const Deadline late = std::chrono::steady_clock::now() + kTimeToLeave;
  const std::int64_t others = rank > 0 ? -1 : 0;
  const std::int64_t left = store.add("nodes", others, late);
  if (rank > 0) store.add(text("rank.", rank), -1, late);
  if (interrupted != 0) return hvd::Error("a signal has ended the wait for the other nodes");
  return hvd::Error(text("expected ", arguments.nodes, " nodes at ", store.url(), ", but ",
                         left - others + 1, " joined within ", arguments.seconds,
                         " s; start the same command on every node, or set --start-timeout"));
}

/// Prints this node's rank and the master's port.
void run(const Arguments& arguments) {
  const Deadline deadline =
      std::chrono::steady_clock::now() +
      std::chrono::milliseconds(static_cast<long long>(arguments.seconds * 1000));
  bool serves = arguments.serves;
  const std::unique_ptr<Store> store = open(arguments, serves, deadline);
  const int last = arguments.nodes - 1;
  int rank = 0;
  if (serves) {
    set(*store, "port", text(arguments.master_port), deadline);
  } else {
    rank = claim_rank(*store, last, deadline);
    if (store->add("nodes", 1, deadline) == last) set(*store, "all", "1", deadline);
  }
  if (value_of(*store, "all", deadline).empty()) throw leave(*store, arguments, rank);
  const std::string port = value_of(*store, "port", deadline);
  const Deadline leave = std::chrono::steady_clock::now() + kTimeToLeave;
  if (serves) {
    value_of(*store, "done", leave);
  } else if (store->add("left", 1, leave) == last) {
    set(*store, "done", "1", leave);
  }
  store->close(leave);
  std::printf("%d %s\n", rank, port.c_str());
}

}  // namespace

/// hvd-node-rank HOST PORT JOB NODES SECONDS MASTER_PORT SERVES: a helper of hvdrun. Prints this
/// node's rank, and the port on node 0's host that rank 0 will serve.
int main(int argc, char** argv) {
  if (argc != 8) return 2;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP})
    std::signal(signal, [](int) { interrupted = 1; });
  try {
    run({.host = argv[1],
         .port = std::atoi(argv[2]),
         .job = argv[3],
         .nodes = std::atoi(argv[4]),
         .seconds = std::atof(argv[5]),
         .master_port = std::atoi(argv[6]),
         .serves = std::string(argv[7]) == "1"});
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
    return 1;
  }
}
