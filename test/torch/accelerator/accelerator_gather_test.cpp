#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

#include "torch/accelerator/accelerator_program.h"
#include "torch/checkpoint/checkpoint_job.h"

// Collectives of an Accelerator, and its output.

namespace hvd::testing {
namespace {

TEST(GatherForMetrics, EverySampleCountsOnceInTheOrderOfTheLoader) {
  Accelerator accelerator;
  const auto ranks = static_cast<std::size_t>(size());
  for (const Remainder remainder : {Remainder::kPad, Remainder::kUneven}) {
    for (const std::size_t samples : {ranks, ranks + 1, 4 * ranks, 4 * ranks + 1, 5 * ranks - 1}) {
      auto test = hvd::loader(Numbers(samples),
                              {.batch_size = 2, .shuffle = false, .remainder = remainder});
      auto test_loader = accelerator.prepare(test);
      std::vector<torch::Tensor> numbers, squares, pairs;
      for (auto& batch : *test_loader) {
        auto [own, squared] = accelerator.gather_for_metrics(batch, batch * batch);
        numbers.push_back(own);
        squares.push_back(squared);
        // Two rows per sample.
        pairs.push_back(
            accelerator.gather_for_metrics(torch::stack({batch, -batch}, 1).reshape(-1)));
      }
      if (remainder == Remainder::kUneven) hvd::join();
      if (remainder == Remainder::kUneven && rank() > 0) continue;  // it had no last batch
      const torch::Tensor all = torch::arange(static_cast<std::int64_t>(samples));
      EXPECT_TRUE(torch::equal(torch::cat(numbers), all)) << samples << torch::cat(numbers);
      EXPECT_TRUE(torch::equal(torch::cat(squares), all * all));
      EXPECT_TRUE(torch::equal(torch::cat(pairs), torch::stack({all, -all}, 1).reshape(-1)));
    }
  }
}

TEST(GatherForMetrics, ShuffledSamplesCountOnceAndDroppedOnesDoNot) {
  Accelerator accelerator;
  const auto samples = static_cast<std::size_t>(7 * size() + 1);
  for (const bool drop_last : {false, true}) {
    auto test = hvd::loader(Numbers(samples), {.batch_size = 3, .seed = 9, .drop_last = drop_last});
    auto test_loader = accelerator.prepare(test);
    std::vector<torch::Tensor> numbers;
    for (auto& batch : test_loader) numbers.push_back(accelerator.gather_for_metrics(batch));
    const torch::Tensor sorted = std::get<0>(torch::cat(numbers).sort());
    const torch::Tensor distinct = std::get<0>(at::_unique(sorted));
    EXPECT_EQ(sorted.numel(), distinct.numel());
    EXPECT_EQ(distinct.numel(), static_cast<std::int64_t>(drop_last ? 6 * size() : samples));
  }
}

TEST(GatherForMetrics, ScalarsAndTensorsOutsideOfLoopsAreGathered) {
  Accelerator accelerator;
  auto test = hvd::loader(Numbers(static_cast<std::size_t>(3 * size())), {.batch_size = 2});
  auto test_loader = accelerator.prepare(test);
  const torch::Tensor own = torch::tensor(rank());
  EXPECT_EQ(accelerator.gather_for_metrics(torch::tensor({rank(), 7})).numel(), 2 * size());
  for (auto& batch : *test_loader) {
    EXPECT_EQ(accelerator.gather_for_metrics(own).sizes(), at::IntArrayRef({size()}));
    const std::vector<torch::Tensor> both = accelerator.gather_for_metrics({batch, batch});
    EXPECT_TRUE(torch::equal(both[0], both[1]));
    if (batch.size(0) == 2) {
      EXPECT_NE(message_of<UsageError>([&] {
                  accelerator.gather_for_metrics(torch::ones({3}));
                }).find("the tensor has 3 rows and the batch 2 samples; expected a multiple"),
                std::string::npos);
    }
  }
}

TEST(AcceleratorCollectives, GatherReducePadAndObjects) {
  Accelerator accelerator;
  const int n = size();
  const torch::Tensor own = torch::full({rank() + 1, 2}, rank());
  EXPECT_EQ(accelerator.gather(own).size(0), n * (n + 1) / 2);
  auto [ranks, twice] = accelerator.gather(torch::tensor(rank()), torch::tensor({2 * rank()}));
  EXPECT_TRUE(torch::equal(ranks, torch::arange(n, torch::kInt32)));
  EXPECT_TRUE(torch::equal(twice, 2 * torch::arange(n, torch::kInt32)));
  const torch::Tensor mine = torch::tensor({1.0F + static_cast<float>(rank())});
  EXPECT_EQ(accelerator.reduce(mine).item<float>(), static_cast<float>(n * (n + 1) / 2));
  EXPECT_EQ(accelerator.reduce(mine, ReduceOp::kAverage, 2.0).item<float>(),
            static_cast<float>(n + 1));
  EXPECT_EQ(mine.item<float>(), 1.0F + static_cast<float>(rank()));
  const torch::Tensor padded = accelerator.pad_across_processes(own, 0, -1);
  EXPECT_EQ(padded.sizes(), at::IntArrayRef({n, 2}));
  EXPECT_TRUE(torch::equal(padded.narrow(0, 0, rank() + 1), own));
  EXPECT_EQ((padded == -1).sum().item<std::int64_t>(), 2 * (n - 1 - rank()));
  const torch::Tensor first = accelerator.pad_across_processes(own.t(), -1, -1, true);
  EXPECT_TRUE(torch::equal(first.narrow(1, n - 1 - rank(), rank() + 1), own.t()));
  EXPECT_NE(message_of<UsageError>([&] {
              accelerator.pad_across_processes(own, 2);
            }).find("dim: expected a dimension of the tensor, which has 2, got 2"),
            std::string::npos);
  EXPECT_EQ(accelerator.gather_object(rank()).back(), n - 1);
  const std::vector<std::string> names(2, std::to_string(rank()));
  EXPECT_EQ(accelerator.gather_object(names).size(), static_cast<std::size_t>(2 * n));
}

TEST(AcceleratorJob, TriggersGuardsAndRanks) {
  Accelerator accelerator;
  EXPECT_FALSE(accelerator.check_trigger());
  if (accelerator.is_last_process()) accelerator.set_trigger();
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger());
  EXPECT_EQ(accelerator.num_processes(), size());
  EXPECT_EQ(accelerator.process_index(), rank());
  EXPECT_EQ(accelerator.is_main_process(), rank() == 0);
  EXPECT_EQ(accelerator.state().num_processes, size());
  EXPECT_TRUE(contains(to_string(accelerator.state()), "mixed_precision: no"));
  int calls = 0;
  accelerator.on_main_process([&] { ++calls; });
  EXPECT_EQ(calls, rank() == 0 ? 1 : 0);
  const SharedFolder folder;
  const std::filesystem::path file = folder.path() / "made";
  {
    auto first = accelerator.main_process_first();
    if (accelerator.is_main_process()) std::ofstream(file) << "x";
    EXPECT_TRUE(std::filesystem::exists(file));
  }
  accelerator.wait_for_everyone();
}

TEST(AcceleratorOutput, PrintsLogsAndProfiles) {
  const SharedFolder folder;
  {
    Accelerator accelerator({.project_dir = folder.path()});
    ::testing::internal::CaptureStdout();
    accelerator.print("loss", 0.5, 3);
    const std::string printed = ::testing::internal::GetCapturedStdout();
    EXPECT_EQ(printed, accelerator.is_local_main_process() ? "loss 0.5 3\n" : "");
    accelerator.log({{"loss", 0.5}, {"a \"b\"", std::nan("")}}, 7);
    accelerator.log({{"loss", 0.25}});
    accelerator.log({});
    std::filesystem::path trace;
    {
      auto profile = accelerator.profile();
      trace = profile.file();
      torch::ones({4}).matmul(torch::ones({4}));
      EXPECT_NE(message_of<UsageError>([&] {
                  auto again = accelerator.profile();
                }).find("profiler is running already"),
                std::string::npos);
    }
    EXPECT_EQ(trace.filename(), "profile_" + std::to_string(rank()) + ".json");
    std::stringstream text;
    text << std::ifstream(trace).rdbuf();
    EXPECT_TRUE(contains(text.str(), "traceEvents"));
    EXPECT_TRUE(contains(text.str(), "aten::matmul"));
  }
  barrier();
  std::stringstream text;
  text << std::ifstream(folder.path() / "log.jsonl").rdbuf();
  EXPECT_EQ(text.str(), "{\"step\":7,\"a \\\"b\\\"\":null,\"loss\":0.5}\n{\"loss\":0.25}\n{}\n");
}

struct Nested {
  torch::Tensor ids;
  std::map<std::string, torch::Tensor> extra;
  std::optional<torch::Tensor> mask;
  std::string name;
  std::int64_t length = 3;
};

TEST(DevicePlacement, MovesTensorsInBatchesOfAnyStructure) {
  const torch::Device meta(torch::kMeta);
  const auto moved = [&](auto batch) {
    libtorch::move_to_device(batch, meta);
    return batch;
  };
  const torch::Tensor one = torch::ones({2});
  EXPECT_TRUE(moved(one).is_meta());
  EXPECT_TRUE(moved(torch::data::Example<>(one, one)).target.is_meta());
  EXPECT_TRUE(moved(torch::data::TensorExample(one)).data.is_meta());
  EXPECT_TRUE(moved(std::vector<torch::data::Example<>>{{one, one}})[0].data.is_meta());
  EXPECT_TRUE(std::get<0>(moved(std::tuple{one, 3})).is_meta());
  EXPECT_TRUE((moved(std::array<torch::Tensor, 2>{one, one})[1].is_meta()));
  const Nested nested = moved(Nested{.ids = one, .extra = {{"a", one}}, .mask = one, .name = "n"});
  EXPECT_TRUE(nested.ids.is_meta() && nested.extra.at("a").is_meta() && nested.mask->is_meta());
  EXPECT_EQ(moved(std::string("text")), "text");
}

}  // namespace
}  // namespace hvd::testing
