#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "conformance/message_cases.h"
#include "mpi/support/hosts.h"
#include "support/fake_carrier.h"
#include "support/join_nodes.h"

// Tests the backends that send messages. The ranks are threads, and the carrier matches messages by
// their tag only.

namespace hvd::conformance {
namespace {

constexpr std::size_t kAllEager = std::numeric_limits<std::size_t>::max();

constexpr flat::FlatTuning kSmallChunks = {.chunk_bytes = 1024,
                                           .slice_bytes = 1024,
                                           .windows = 3,
                                           .direct_bytes = 64,
                                           .outstanding_chunks = 2};
constexpr flat::FlatTuning kOneAtATime = {.chunk_bytes = 4096,
                                          .slice_bytes = 4096,
                                          .windows = 1,
                                          .direct_bytes = 0,
                                          .outstanding_chunks = 1};
struct Setting : MessageSetting {
  std::size_t eager_bytes = kAllEager;
  flat::FlatTuning tuning = kSmallChunks;  ///< of the flat backend
  std::size_t part_bytes = 0;              ///< of messages that are reduced in parts
};
constexpr hierarchical::HierarchicalTuning kSmallBuffers = {
    .buffer_bytes = 2048, .small_bytes = 256, .smallest_slice = 64};

constexpr Setting kFlat[] = {{{"Eager", "aaa"}},
                             {{"LateSends", "aa"}, 0},
                             {{"SomeLateSends", "aaaa"}, 512},
                             {{"OneAtATime", "aaa"}, 512, kOneAtATime},
                             {{"PartsThatSplitElements", "aa"}, 512, kSmallChunks, 13},
                             {{"PartsOfAByte", "aa"}, kAllEager, kOneAtATime, 1}};
constexpr Setting kOfHosts[] = {{{"Eager", "aab"}}, {{"LateSends", "aabb"}, 0}};

MakeParts flat_ranks(const Setting& setting) {
  const auto network = testing::FakeNetwork::create(setting.size(), 3);
  network->eager_bytes = setting.eager_bytes;
  network->part_bytes = setting.part_bytes;
  return [network, tuning = setting.tuning](int rank) -> RankParts {
    return {std::make_unique<flat::FlatBackend>(network->carrier(rank), tuning)};
  };
}

MakeParts ranks_of_hosts(const Setting& setting) {
  const testing::PretendHosts pretend(setting.hosts);
  const int size = setting.size();
  const auto network = testing::FakeNetwork::create(size, 4);
  network->eager_bytes = setting.eager_bytes;
  return [network, nodes = testing::join_nodes(size)](int rank) -> RankParts {
    return {std::make_unique<hierarchical::HierarchicalBackend>(
        network->carrier(rank), nodes[static_cast<std::size_t>(rank)], kSmallBuffers)};
  };
}

using Parameter = MessageParameter<Setting>;

class FlatConformance : public ::testing::TestWithParam<Parameter> {};
TEST_P(FlatConformance, RanksAsThreads) {
  run_message_cases<Setting>(GetParam(), flat_ranks(std::get<Setting>(GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Every, FlatConformance,
                         ::testing::Combine(::testing::ValuesIn(kFlat),
                                            ::testing::ValuesIn(kKinds)),
                         message_case_name<Setting>);

class HostsConformance : public ::testing::TestWithParam<Parameter> {};
TEST_P(HostsConformance, RanksAsThreads) {
  run_message_cases<Setting>(GetParam(), ranks_of_hosts(std::get<Setting>(GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Every, HostsConformance,
                         ::testing::Combine(::testing::ValuesIn(kOfHosts), kinds_of_hosts()),
                         message_case_name<Setting>);

}  // namespace
}  // namespace hvd::conformance
