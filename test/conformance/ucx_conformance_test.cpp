#include <gtest/gtest.h>

#include <memory>
#include <tuple>
#include <utility>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "conformance/message_cases.h"
#include "mpi/support/hosts.h"
#include "support/join_nodes.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

// Tests the backends that send messages, over the real UCX. The ranks are threads, each with its
// own workers. ctest runs this test twice: with UCX's default transports and with shared memory.

namespace hvd::conformance {
namespace {

struct Setting : MessageSetting {
  flat::FlatTuning tuning = {.direct_pair_bytes = std::size_t{1} << 20};  ///< of the flat backend
};
constexpr flat::FlatTuning kInSlices = {.slice_bytes = 16 * 1024, .direct_bytes = 64};
constexpr Setting kFlat[] = {
    {{"Two", "aa"}}, {{"TwoInSlices", "aa"}, kInSlices}, {{"Three", "aaa", 16}}};
constexpr Setting kOfHosts[] = {{{"OneAndTwo", "abb", 16}}};

using Carriers = std::vector<std::shared_ptr<message::Carrier>>;

/// Makes a carrier for each rank. farewell() makes it deliver all its messages before it ends.
Carriers carriers_of(int size) {
  std::vector<ucx::Workers> workers;
  ucx::JobMembers members{.generation = 5, .addresses = {}};
  for (int rank = 0; rank < size; ++rank) {
    workers.push_back(ucx::open_workers());
    members.addresses.push_back(workers.back().address());
  }
  Carriers carriers;
  for (auto& own : workers) {
    members.rank = static_cast<int>(carriers.size());
    carriers.push_back(ucx::make_ucx_carrier(std::move(own), members));
    carriers.back()->farewell();
  }
  return carriers;
}

/// Moves the rank's carrier out of the list.
std::shared_ptr<message::Carrier> carrier_of(Carriers& carriers, int rank) {
  return std::move(carriers[static_cast<std::size_t>(rank)]);
}

MakeParts flat_ranks(const Setting& setting) {
  const auto carriers = std::make_shared<Carriers>(carriers_of(setting.size()));
  return [carriers, tuning = setting.tuning](int rank) -> RankParts {
    return {.backend = std::make_unique<flat::FlatBackend>(carrier_of(*carriers, rank), tuning),
            .polls = true};
  };
}

MakeParts ranks_of_hosts(const Setting& setting) {
  const testing::PretendHosts pretend(setting.hosts);
  const auto carriers = std::make_shared<Carriers>(carriers_of(setting.size()));
  return [carriers, nodes = testing::join_nodes(setting.size())](int rank) -> RankParts {
    return {.backend = std::make_unique<hierarchical::HierarchicalBackend>(
                carrier_of(*carriers, rank), nodes[static_cast<std::size_t>(rank)]),
            .polls = true};
  };
}

using Parameter = MessageParameter<Setting>;

class UcxFlatConformance : public ::testing::TestWithParam<Parameter> {};
TEST_P(UcxFlatConformance, RanksAsThreads) {
  run_message_cases<Setting>(GetParam(), flat_ranks(std::get<Setting>(GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Every, UcxFlatConformance,
                         ::testing::Combine(::testing::ValuesIn(kFlat),
                                            ::testing::ValuesIn(kKinds)),
                         message_case_name<Setting>);

class UcxHostsConformance : public ::testing::TestWithParam<Parameter> {};
TEST_P(UcxHostsConformance, RanksAsThreads) {
  run_message_cases<Setting>(GetParam(), ranks_of_hosts(std::get<Setting>(GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Every, UcxHostsConformance,
                         ::testing::Combine(::testing::ValuesIn(kOfHosts), kinds_of_hosts()),
                         message_case_name<Setting>);

}  // namespace
}  // namespace hvd::conformance
