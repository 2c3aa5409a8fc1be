// The control plane over the real UCX, with ranks as threads.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "conformance/control_plane_cases.h"
#include "mpi/support/hosts.h"
#include "support/join_nodes.h"
#include "transport/control_plane.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::conformance {
namespace {

struct Hosts {
  const char* name;
  std::string letters;  ///< one per rank
  int without;          ///< the rank that has no shared memory, or -1
};
const Hosts kHosts[] = {{"OneHost", "aaa", -1},
                        {"NoSharedMemory", "aaa", 1},
                        {"Hosts", "abb", -1},
                        {"OneRank", "a", -1}};

/// A rank drives its carrier until all ranks are done, because messages that it has sent may still
/// wait in its carrier.
class AllRanks {
 public:
  explicit AllRanks(int size) : size_(size) {}
  void wait(message::Carrier& carrier) {
    const int round = arrived_.fetch_add(1) / size_;
    while (arrived_.load() < (round + 1) * size_) carrier.progress();
  }

 private:
  const int size_;
  std::atomic<int> arrived_{0};
};

using Parameter = std::tuple<Hosts, ControlPlaneCase>;
class UcxControlPlane : public ::testing::TestWithParam<Parameter> {};

TEST_P(UcxControlPlane, RanksAsThreads) {
  const Hosts& hosts = std::get<Hosts>(GetParam());
  const auto size = static_cast<int>(hosts.letters.size());
  const testing::PretendHosts pretend(hosts.letters);
  const auto nodes = testing::join_nodes(size, hosts.without);
  std::vector<ucx::Workers> workers;
  ucx::JobMembers members{.generation = 11};
  for (int rank = 0; rank < size; ++rank) {
    workers.push_back(ucx::open_workers());
    members.addresses.push_back(workers.back().address());
  }
  AllRanks all(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    members.rank = rank;
    const auto index = static_cast<std::size_t>(rank);
    threads.emplace_back([&, node = nodes[index],
                          carrier = ucx::make_ucx_carrier(std::move(workers[index]), members)] {
      const auto plane = message::make_control_plane(carrier, node);
      PlaneRank own{*plane, [&] { all.wait(*carrier); }};
      std::get<ControlPlaneCase>(GetParam()).run(own);
      all.wait(*carrier);
      plane->farewell();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Every, UcxControlPlane,
                         ::testing::Combine(::testing::ValuesIn(kHosts),
                                            ::testing::ValuesIn(kControlPlaneCases)),
                         [](const auto& parameter) {
                           return std::string(std::get<Hosts>(parameter.param).name) +
                                  std::get<ControlPlaneCase>(parameter.param).name;
                         });

}  // namespace
}  // namespace hvd::conformance
