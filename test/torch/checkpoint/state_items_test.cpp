#include "torch/checkpoint/checkpoint_job.h"

// Items other than models, optimizers and variables, and models that are loaded in part.

namespace hvd::testing {
namespace {

torch::nn::Sequential body_and_head(std::int64_t classes) {
  return torch::nn::Sequential(torch::OrderedDict<std::string, torch::nn::AnyModule>(
      {{"body", torch::nn::AnyModule(torch::nn::Linear(3, 4))},
       {"head", torch::nn::AnyModule(torch::nn::Linear(4, classes))}}));
}

void fill(torch::nn::Module& module, double value) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.fill_(value);
}

bool all_equal(const torch::Tensor& tensor, double value) {
  return (tensor == value).all().item<bool>();
}

TEST(StateItems, AModelWithANewHeadIsLoadedInPart) {
  const SharedFolder folder;
  auto saved = body_and_head(5);
  fill(*saved, 1);
  save_checkpoint(folder.path(), TrainingState().model(saved));
  auto net = body_and_head(2);
  fill(*net, 7);
  EXPECT_THROW(load_checkpoint(folder.path(), TrainingState().model(net)), CheckpointError);
  EXPECT_TRUE(all_equal(net->named_parameters()["body.weight"], 7));
  load_checkpoint(folder.path(), TrainingState().model(net, {.strict = false}));
  EXPECT_TRUE(all_equal(net->named_parameters()["body.weight"], 1));
  EXPECT_TRUE(all_equal(net->named_parameters()["body.bias"], 1));
  EXPECT_TRUE(all_equal(net->named_parameters()["head.weight"], 7));
  torch::nn::Linear other(9, 9);
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] {
                         load_checkpoint(folder.path(),
                                         TrainingState().model(other, {.strict = false}));
                       }),
                       "no tensor of the model is in the checkpoint"));
}

TEST(StateItems, AModelIsLoadedUnderOtherNames) {
  const SharedFolder folder;
  auto saved = body_and_head(2);
  fill(*saved, 3);
  save_checkpoint(folder.path(), TrainingState().model(saved));
  const auto net =
      std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  const auto old_name = [](const std::string& key) {
    return (key.starts_with("0.") ? "body." : "head.") + key.substr(2);
  };
  load_checkpoint(folder.path(), TrainingState().model(net, {.key_in_checkpoint = old_name}));
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(all_equal(parameter, 3));
  const auto twice = [](const std::string&) { return std::string("body.weight"); };
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] {
                         load_checkpoint(folder.path(),
                                         TrainingState().model(net, {.key_in_checkpoint = twice}));
                       }),
                       "twice"));
}

TEST(StateItems, ASharedPointerWillDoAndKeepsTheModuleAlive) {
  const SharedFolder folder;
  auto net = std::make_shared<torch::nn::LinearImpl>(2, 2);
  fill(*net, 4);
  TrainingState state;
  state.model(net);
  const std::weak_ptr<torch::nn::LinearImpl> first = net;
  net = std::make_shared<torch::nn::LinearImpl>(9, 9);
  EXPECT_FALSE(first.expired());
  save_checkpoint(folder.path(), state);
  torch::nn::Linear held(2, 2);
  TrainingState holder;
  holder.model(held);
  const std::weak_ptr<torch::nn::LinearImpl> second = held.ptr();
  held = torch::nn::Linear(9, 9);
  EXPECT_FALSE(second.expired());
  load_checkpoint(folder.path(), holder);
  EXPECT_TRUE(all_equal(second.lock()->weight, 4));
  EXPECT_THROW(TrainingState().model(std::shared_ptr<torch::nn::LinearImpl>()), UsageError);
}

TEST(StateItems, APlateauSchedulerGoesOn) {
  const SharedFolder folder;
  const auto losses = {1.0F, 0.9F, 0.95F, 0.96F, 0.97F, 0.98F, 0.99F, 0.5F, 0.6F, 0.7F, 0.8F};
  const auto run = [&](std::size_t from, std::size_t to, bool load) {
    torch::nn::Linear net(1, 1);
    torch::optim::SGD sgd(net->parameters(), 1.0);
    torch::optim::ReduceLROnPlateauScheduler scheduler(
        sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, /*patience=*/1, 1e-4,
        torch::optim::ReduceLROnPlateauScheduler::rel, /*cooldown=*/2);
    TrainingState state;
    state.optimizer(sgd).scheduler(scheduler);
    if (load) load_checkpoint(folder.path(), state);
    std::vector<double> rates;
    for (std::size_t i = from; i < to; ++i) {
      scheduler.step(*(losses.begin() + i));
      rates.push_back(sgd.param_groups()[0].options().get_lr());
    }
    if (!load) save_checkpoint(folder.path(), state);
    return rates;
  };
  const std::vector<double> whole = run(0, losses.size(), false);
  EXPECT_LT(whole.back(), whole.front());
  for (std::size_t stop = 1; stop < losses.size(); ++stop) {
    run(0, stop, false);
    const std::vector<double> rest = run(stop, losses.size(), true);
    EXPECT_EQ(rest,
              std::vector<double>(whole.begin() + static_cast<std::ptrdiff_t>(stop), whole.end()))
        << stop;
  }
}

struct Average {
  torch::Tensor shadow = torch::zeros({3});
  std::int64_t updates = 0;
};

TEST(StateItems, AnObjectOfTheProgramsOwn) {
  const SharedFolder folder;
  Average average;
  const auto save = [&](torch::serialize::OutputArchive& archive) {
    archive.write("shadow", average.shadow);
    archive.write("updates", c10::IValue(average.updates));
  };
  const auto load = [&](torch::serialize::InputArchive& archive) {
    archive.read("shadow", average.shadow);
    c10::IValue updates;
    archive.read("updates", updates);
    average.updates = updates.toInt();
  };
  average = {torch::full({3}, 2.5), 41};
  if (rank() != 0) average = {};
  const TrainingState state = TrainingState().custom("average", save, load);
  save_checkpoint(folder.path(), state);
  average = {};
  load_checkpoint(folder.path(), state);
  EXPECT_TRUE(all_equal(average.shadow, 2.5));
  EXPECT_EQ(average.updates, 41);
  EXPECT_THROW(TrainingState().custom("x", save, {}), UsageError);
}

TEST(StateItems, AValueOfEachRank) {
  const SharedFolder folder;
  std::vector<int> own{rank(), 100 + rank()};
  const TrainingState state = TrainingState().value_per_rank("own", own);
  const std::vector<int> before = own;
  save_checkpoint(folder.path(), state);
  own.clear();
  load_checkpoint(folder.path(), state);
  EXPECT_EQ(own, before);
  own = {rank()};
  join(state);
  EXPECT_EQ(own, std::vector<int>{rank()}) << "join() has changed it";
}

TEST(StateItems, AMetricGoesOnAtAnyNumberOfRanks) {
  const SharedFolder folder;
  using Kind = Metric::Kind;
  std::vector<int> some;
  for (int r = 0; r < (size() + 1) / 2; ++r) some.push_back(r);
  const ProcessSet set = add_process_set(some);
  for (const Kind kind : {Kind::kMean, Kind::kSum, Kind::kMin, Kind::kMax}) {
    Metric metric("m", kind);
    metric.update(2.0 + rank(), 1 + rank());
    const double expected = metric.compute();
    const auto state_of = [](Metric& m) { return TrainingState().metric(m, "m"); };
    save_checkpoint(folder.path(), state_of(metric));
    metric.update(1000.0, 5);
    load_checkpoint(folder.path(), state_of(metric));
    EXPECT_EQ(metric.compute(), expected);
    if (set.included()) {
      Metric smaller("m", kind, set);
      load_checkpoint(folder.path(), state_of(smaller), {.process_set = set});
      EXPECT_DOUBLE_EQ(smaller.compute(), expected);
    }
    barrier();
  }
  remove_process_set(set);
}

}  // namespace
}  // namespace hvd::testing
