#include "command/node_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "system/error.h"

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;

constexpr Machine kWithGpus = {.cpus = [] { return 6; }, .gpus = [] { return 4; }};
constexpr Machine kWithoutGpus = {.cpus = [] { return 6; }, .gpus = [] { return 0; }};

NodeOptions make(const NodeOptionTexts& texts, const Machine& machine = kWithoutGpus) {
  return make_node_options(texts, machine);
}

std::string node_error(const NodeOptionTexts& texts) {
  try {
    make(texts);
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "no error";
}

TEST(NodeOptions, OneNodeByDefault) {
  EXPECT_EQ(make({}), NodeOptions{});
  EXPECT_EQ(make({}).processes, 1) << "as torchrun";
  EXPECT_EQ(make({.nodes = "1:1", .processes = "3", .standalone = true}).world_size(), 3);
  // --standalone ignores the address, as torchrun does.
  EXPECT_EQ(make({.master_port = "7", .standalone = true}).master_address, "");
  EXPECT_EQ(make({.master_port = "7"}).master_address, "127.0.0.1");
  EXPECT_EQ(make({.master_port = "7"}).master_port, 7);
  EXPECT_EQ(make({.master_address = "n0", .master_port = "0"}).master_address, "")
      << "hvdrun chooses a free port";
}

TEST(NodeOptions, NumberOfProcesses) {
  EXPECT_EQ(make({.processes = "auto"}, kWithGpus).processes, 4);
  EXPECT_EQ(make({.processes = "auto"}, kWithoutGpus).processes, 6);
  EXPECT_EQ(make({.processes = "gpu"}, kWithGpus).processes, 4);
  EXPECT_EQ(make({.processes = "cpu"}, kWithGpus).processes, 6);
  EXPECT_THAT(node_error({.processes = "gpu"}), HasSubstr("at least one GPU"));
  for (const char* bad : {"0", "-1", "two", "xpu", "2x"})
    EXPECT_THAT(node_error({.processes = bad}),
                HasSubstr("auto, cpu or gpu, got '" + std::string(bad) + "'"));
}

TEST(NodeOptions, RanksFollowTheNodes) {
  const NodeOptions node = make({.nodes = "3",
                                 .processes = "4",
                                 .rank = "2",
                                 .master_address = "n0",
                                 .run_id = "job7",
                                 .role = "trainer",
                                 .max_restarts = "0"});
  EXPECT_EQ(node.first_rank(), 8);
  EXPECT_EQ(node.world_size(), 12);
  EXPECT_EQ(node.master_address, "n0");
  EXPECT_EQ(node.master_port, 29500) << "torchrun's default";
  EXPECT_EQ(node.run_id, "job7");
  EXPECT_EQ(node.role, "trainer");
}

TEST(NodeOptions, TheEndpointIsTheMaster) {
  const auto master = [](const std::string& endpoint, const std::string& backend) {
    const NodeOptions node =
        make({.nodes = "2", .rank = "0", .backend = backend, .endpoint = endpoint});
    return node.master_address + " " + std::to_string(node.master_port);
  };
  EXPECT_EQ(master("n0:8", "static"), "n0 8");
  EXPECT_EQ(master("[fd00::1]:8", ""), "fd00::1 8");
  EXPECT_EQ(master("n0", "c10d"), "n0 29400") << "torchrun's default";
  EXPECT_EQ(master("[fd00::1]", "c10d"), "fd00::1 29400");
  for (const char* bad : {"n0", "n0:", "n0:x", "n0:65536", "n0:0", ":8", "n 0:8"}) {
    EXPECT_THAT(node_error({.nodes = "2", .rank = "0", .endpoint = bad}),
                HasSubstr("expected HOST:PORT"))
        << bad;
  }
}

TEST(NodeOptions, SeveralNodesNeedOnePort) {
  EXPECT_THAT(node_error({.nodes = "2", .rank = "0", .master_address = "n0", .master_port = "0"}),
              HasSubstr("expected a --master-port that is the same on every node, got '0'"));
}

TEST(NodeOptions, OnlyC10dDistributesTheRanks) {
  EXPECT_EQ(make({.nodes = "2", .backend = "c10d", .endpoint = "n0:8"}).rank, std::nullopt);
  EXPECT_EQ(make({.nodes = "2", .rank = "1", .backend = "c10d", .endpoint = "n0:8"}).rank, 1);
  EXPECT_THAT(node_error({.nodes = "2", .master_address = "n0"}),
              HasSubstr("expected --node-rank K, from 0 to 1"));
}

TEST(NodeOptions, ARangeOfNodesIsAnElasticJob) {
  const NodeOptions node = make({.nodes = "2:5",
                                 .processes = "4",
                                 .backend = "c10d",
                                 .endpoint = "n0:7",
                                 .run_id = "j",
                                 .max_restarts = "3"});
  EXPECT_TRUE(node.is_elastic());
  EXPECT_EQ(node.nodes, 2);
  EXPECT_EQ(node.max_nodes, 5);
  EXPECT_EQ(node.master_address, "n0");
  EXPECT_EQ(node.master_port, 7);
  EXPECT_FALSE(make({.nodes = "2:2", .backend = "c10d", .endpoint = "n0:7"}).is_elastic());
  EXPECT_THAT(node_error({.nodes = "1:4"}), HasSubstr("--rdzv-backend c10d and --rdzv-endpoint"));
  EXPECT_THAT(node_error({.nodes = "1:4", .backend = "static", .endpoint = "n0:7"}),
              HasSubstr("--rdzv-backend c10d and --rdzv-endpoint"));
  EXPECT_THAT(node_error({.nodes = "1:4", .rank = "1", .backend = "c10d", .endpoint = "n0:7"}),
              HasSubstr("remove --node-rank"));
  EXPECT_THAT(
      node_error({.nodes = "1:1000000", .processes = "2", .backend = "c10d", .endpoint = "n0:7"}),
      HasSubstr("at most 1000000 ranks, got 1000000 times 2"));
}

TEST(NodeOptions, ErrorsNameTheOption) {
  for (const char* bad : {"0", "x", "2:", ":2", "3:2", "1:2:3", "0:2"})
    EXPECT_THAT(node_error({.nodes = bad}), HasSubstr("--nnodes: expected")) << bad;
  EXPECT_THAT(node_error({.nodes = "2", .rank = "0"}), HasSubstr("expected --master-addr"));
  EXPECT_THAT(node_error({.nodes = "2", .rank = "2", .master_address = "n0"}),
              HasSubstr("--node-rank: expected a whole number from 0 to 1, got '2'"));
  EXPECT_THAT(node_error({.rank = "1"}), HasSubstr("--node-rank"));
  EXPECT_THAT(node_error({.nodes = "2", .rank = "0", .master_address = "n0", .master_port = "x"}),
              HasSubstr("--master-port"));
  EXPECT_THAT(node_error({.nodes = "2", .backend = "c10d"}), HasSubstr("--rdzv-endpoint"));
  EXPECT_THAT(node_error({.backend = "etcd"}), HasSubstr("static or c10d, got 'etcd'"));
  EXPECT_THAT(node_error({.nodes = "2", .standalone = true}), HasSubstr("--standalone is for one"));
  EXPECT_THAT(node_error({.nodes = "2", .rank = "0", .master_address = "n0", .max_restarts = "3"}),
              HasSubstr("--max-restarts: expected 0 with --nnodes 2"));
  EXPECT_THAT(node_error({.nodes = "2", .max_restarts = "x"}),
              HasSubstr("--max-restarts: expected a whole number from 0 to 1000, got 'x'"));
  EXPECT_THAT(node_error({.nodes = "1000000", .processes = "2"}),
              HasSubstr("at most 1000000 ranks"));
}

TEST(Streams, TorchrunsFormat) {
  const Streams none{false, false}, out{true, false}, err{false, true}, both{true, true};
  using Map = std::map<int, Streams>;
  EXPECT_EQ(parse_streams("-t", "0"), (Map{{-1, none}}));
  EXPECT_EQ(parse_streams("-t", "3"), (Map{{-1, both}}));
  EXPECT_EQ(parse_streams("-t", "0:3,1:0,2:1,3:2"),
            (Map{{0, both}, {1, none}, {2, out}, {3, err}}));
  for (const char* bad : {"", "4", "-1", "x", "0:", "0:4", ":1", "0:1,2", "a:1", "-1:1", "0:1,"})
    EXPECT_THROW(parse_streams("-t", bad), LaunchError) << bad;
}

TEST(Streams, FilteredRanks) {
  EXPECT_EQ(parse_local_ranks("2,0"), (std::set<int>{0, 2}));
  for (const char* bad : {"", "x", "1,", "-1"}) EXPECT_THROW(parse_local_ranks(bad), LaunchError);
}

// The expectations are those of torch.distributed.elastic.multiprocessing.DefaultLogsSpecs.
TEST(Streams, WhereTheOutputGoes) {
  EXPECT_EQ(streams_of({}, 0), (RankStreams{{false, false}, {true, true}}));
  LogOptions options;
  options.redirects = parse_streams("-r", "0:3,1:1");
  EXPECT_EQ(streams_of(options, 0), (RankStreams{{true, true}, {false, false}}));
  EXPECT_EQ(streams_of(options, 1), (RankStreams{{true, false}, {false, true}}));
  EXPECT_EQ(streams_of(options, 2), (RankStreams{{false, false}, {true, true}}));
  options.tee = parse_streams("-t", "2");
  EXPECT_EQ(streams_of(options, 0), (RankStreams{{true, true}, {false, true}}));
  EXPECT_EQ(streams_of(options, 2), (RankStreams{{false, true}, {true, true}}));
  options.shown_ranks = {1};
  EXPECT_EQ(streams_of(options, 2), (RankStreams{{false, true}, {false, false}}));
  EXPECT_EQ(streams_of(options, 1), (RankStreams{{true, true}, {false, true}}));
}

}  // namespace
}  // namespace hvd::launcher
