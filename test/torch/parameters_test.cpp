#include <torch/custom_class.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <tuple>
#include <unordered_map>

#include "hvd/device.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

void fill(const torch::nn::Module& module, int seed) {
  const torch::NoGradGuard no_grad;
  for (const auto& tensor : module.parameters()) tensor.detach().fill_(seed + rank());
  for (const auto& tensor : module.buffers()) tensor.fill_(seed + rank());
}

TEST(BroadcastParameters, ParametersAndBuffersInFewBackendCalls) {
  torch::nn::Sequential model;
  for (int i = 0; i < 20; ++i) {
    model->push_back(torch::nn::Linear(4, 4));
    model->push_back(torch::nn::BatchNorm1d(4));
  }
  // 80 parameters, 40 float32 and 20 int64 buffers.
  fill(*model, 5);
  const Metrics before = metrics();
  const int root = size() - 1;
  broadcast_parameters(*model, root);
  const Metrics after = metrics();
  EXPECT_LE(after.backend_calls - before.backend_calls, 2U);
  EXPECT_LE(after.control_messages_sent - before.control_messages_sent, 8U);
  for (const auto& tensor : model->parameters())
    EXPECT_TRUE((tensor == 5 + root).all().item<bool>());
  for (const auto& tensor : model->buffers()) EXPECT_TRUE((tensor == 5 + root).all().item<bool>());
}

TEST(BroadcastParameters, EveryKindOfArgument) {
  const torch::nn::Linear holder(3, 3);
  fill(*holder, 1);
  broadcast_parameters(holder);
  EXPECT_TRUE((holder->weight == 1).all().item<bool>());

  const auto shared = std::make_shared<NetImpl>();
  fill(*shared, 2);
  broadcast_parameters(shared);
  EXPECT_TRUE((shared->fc1->weight == 2).all().item<bool>());

  fill(*shared, 3);
  broadcast_parameters(shared->named_parameters());
  EXPECT_TRUE((shared->fc1->weight == 3).all().item<bool>());

  NamedParameters strided;
  const torch::Tensor matrix = rank_tensor(rank(), {4, 3}, torch::kFloat32);
  strided.insert("transposed", matrix.t());
  strided.insert("undefined", torch::Tensor());
  broadcast_parameters(strided);
  EXPECT_TRUE(near(matrix, rank_tensor(0, {4, 3}, torch::kFloat32)));
}

TEST(BroadcastParameters, OfAnyType) {
  NamedParameters tensors;
  tensors.insert("complex", torch::complex(torch::full({2, 3}, 1.0F + static_cast<float>(rank())),
                                           torch::full({2, 3}, -1.0F)));
  tensors.insert("conjugated", torch::full({2}, c10::complex<double>(0, 1 + rank())).conj());
  tensors.insert("uint16", torch::full({5}, 60000 + rank(), torch::kInt32).to(torch::kUInt16));
  tensors.insert("uint64", torch::full({}, 7 + rank(), torch::kInt64).to(torch::kUInt64));
  tensors.insert("float32", torch::full({4}, static_cast<float>(rank())));
  const int root = size() - 1;
  broadcast_parameters(tensors, root);
  EXPECT_TRUE(torch::equal(torch::real(tensors["complex"]),
                           torch::full({2, 3}, 1.0F + static_cast<float>(root))));
  EXPECT_TRUE(torch::equal(torch::imag(tensors["complex"]), torch::full({2, 3}, -1.0F)));
  EXPECT_EQ(tensors["conjugated"].resolve_conj()[1].item<c10::complex<double>>().imag(),
            -1.0 - root);
  EXPECT_TRUE((tensors["uint16"].to(torch::kInt32) == 60000 + root).all().item<bool>());
  EXPECT_EQ(tensors["uint64"].to(torch::kInt64).item<std::int64_t>(), 7 + root);
  EXPECT_TRUE((tensors["float32"] == root).all().item<bool>());
  const torch::Tensor copy =
      broadcast(torch::full({3}, 300 + rank(), torch::kInt32).to(torch::kUInt16), root);
  EXPECT_EQ(copy.scalar_type(), torch::kUInt16);
  EXPECT_TRUE((copy.to(torch::kInt32) == 300 + root).all().item<bool>());
}

TEST(BroadcastBuffers, OverwritesBuffersAndNothingElse) {
  const torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  fill(*model, 5);
  const int root = size() - 1;
  broadcast_buffers(model, root);
  for (const auto& tensor : model->buffers()) EXPECT_TRUE((tensor == 5 + root).all().item<bool>());
  for (const auto& tensor : model->parameters())
    EXPECT_TRUE((tensor == 5 + rank()).all().item<bool>());
  fill(*model, 6);
  broadcast_buffers(static_cast<const torch::nn::Module&>(*model));
  for (const auto& tensor : model->buffers()) EXPECT_TRUE((tensor == 6).all().item<bool>());
  broadcast_buffers(torch::nn::Linear(2, 2));  // no buffers
}

TEST(BroadcastInAProcessSet, ReachesItsMembersOnly) {
  for_each_set([](const ProcessSet& set) {
    const int root = set.ranks().back();
    const torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    fill(*model, 5);
    broadcast_parameters(model, root, set);
    for (const auto& tensor : model->parameters())
      EXPECT_TRUE((tensor == 5 + root).all().item<bool>());
    fill(*model, 7);
    broadcast_buffers(model, root, set);
    for (const auto& tensor : model->buffers())
      EXPECT_TRUE((tensor == 7 + root).all().item<bool>());

    torch::optim::SGD sgd(model->parameters(),
                          torch::optim::SGDOptions(0.1 * (1 + rank())).momentum(0.9));
    for (const auto& parameter : model->parameters())
      parameter.mutable_grad() = torch::full_like(parameter, rank() + 1);
    sgd.step();
    broadcast_optimizer_state(sgd, root, set);
    EXPECT_DOUBLE_EQ(static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(),
                     0.1 * (1 + root));
    const auto& state = static_cast<torch::optim::SGDParamState&>(
        *sgd.state().at(model->parameters()[0].unsafeGetTensorImpl()));
    EXPECT_TRUE((state.momentum_buffer() == root + 1).all().item<bool>());
  });
}

// The program may have forgotten to register its layers. Each rank would then train its own model.
TEST(BroadcastParameters, AModuleThatHasNoneIsRefused) {
  const torch::nn::Sequential empty{torch::nn::ReLU()};
  const std::string message = message_of<UsageError>([&] { broadcast_parameters(empty); });
  EXPECT_TRUE(contains(message, "SequentialImpl has no parameters and no buffers")) << message;
  EXPECT_NO_THROW(broadcast_buffers(empty));
  EXPECT_NO_THROW(broadcast_parameters(NamedParameters())) << "an empty list is valid";
}

TEST(BroadcastParameters, ADifferentModelIsNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto net = std::make_shared<NetImpl>(rank() == 0 ? 8 : 9);
  const std::string message = message_of<MismatchError>([&] { broadcast_parameters(*net); });
  EXPECT_NE(message.find("fc1.weight"), std::string::npos) << message;
}

// Optimizer state.

std::string bytes_of(torch::serialize::OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

/// State and options as bytes, in the order of the parameters.
std::vector<std::string> contents(torch::optim::Optimizer& optimizer) {
  std::vector<std::string> all;
  for (auto& group : optimizer.param_groups()) {
    torch::serialize::OutputArchive options;
    group.options().serialize(options);
    all.push_back(bytes_of(options));
    for (const torch::Tensor& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) {
        all.push_back("none");
        continue;
      }
      const auto copy = state->second->clone();
      if (auto* lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(copy.get())) {
        lbfgs->al(std::nullopt);  // may hold undefined tensors, which cannot be saved
      }
      torch::serialize::OutputArchive archive;
      copy->serialize(archive);
      all.push_back(bytes_of(archive));
    }
  }
  torch::serialize::OutputArchive defaults;
  optimizer.defaults().serialize(defaults);
  all.push_back(bytes_of(defaults));
  return all;
}

void train_alone(Net& net, torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
      loss.backward();
      return loss;
    });
  }
}

/// @param make called as make(net, own); the optimizer has other options if `own` @param steps the
/// number of steps before the broadcast, by rank
template <class Make>
void check_state_broadcast(const Make& make, const std::function<int(int rank)>& steps) {
  const int root = size() - 1;
  torch::manual_seed(3);
  Net net;
  auto optimizer = make(net, rank() != root);
  train_alone(net, *optimizer, steps(rank()));
  const std::vector<std::string> expected = broadcast_object(contents(*optimizer), root);
  broadcast_optimizer_state(*optimizer, root);
  EXPECT_EQ(contents(*optimizer), expected);

  // Equal parameters remain equal in further steps.
  broadcast_parameters(net, root);
  for (int step = 0; step < 3; ++step) {
    optimizer->step([&] {
      optimizer->zero_grad();
      const torch::Tensor loss = loss_of(net, Batch::joined(step));
      loss.backward();
      return loss;
    });
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

template <class Make>
void check_every_start(const Make& make) {
  {
    SCOPED_TRACE("state on every rank");
    check_state_broadcast(make, [](int r) { return 2 + r; });
  }
  {
    SCOPED_TRACE("state on the root only");
    check_state_broadcast(make, [](int r) { return r == size() - 1 ? 3 : 0; });
  }
  {
    SCOPED_TRACE("state on the others only");
    check_state_broadcast(make, [](int r) { return r == size() - 1 ? 0 : 2; });
  }
}

using namespace torch::optim;

TEST(BroadcastOptimizerState, SGD) {
  check_every_start([](Net& net, bool own) {
    return std::make_unique<torch::optim::SGD>(
        net->parameters(),
        SGDOptions(own ? 0.5 : 0.01).momentum(0.9).nesterov(!own).weight_decay(own ? 0 : 1e-3));
  });
}

TEST(BroadcastOptimizerState, Adam) {
  check_every_start([](Net& net, bool own) {
    return std::make_unique<torch::optim::Adam>(
        net->parameters(),
        AdamOptions(own ? 0.5 : 0.01).betas({own ? 0.1 : 0.8, 0.99}).amsgrad(!own));
  });
}

TEST(BroadcastOptimizerState, AdamWWithTwoGroups) {
  check_every_start([](Net& net, bool own) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(net->fc1->parameters());
    groups.emplace_back(net->fc2->parameters(),
                        std::make_unique<AdamWOptions>(AdamWOptions(own ? 0.2 : 0.03)));
    return std::make_unique<torch::optim::AdamW>(
        groups, AdamWOptions(own ? 0.5 : 0.01).eps(own ? 1e-3 : 1e-8));
  });
}

TEST(BroadcastOptimizerState, Adagrad) {
  check_every_start([](Net& net, bool own) {
    return std::make_unique<torch::optim::Adagrad>(
        net->parameters(), AdagradOptions(own ? 0.5 : 0.01).lr_decay(own ? 0.1 : 0.01));
  });
}

TEST(BroadcastOptimizerState, RMSprop) {
  check_every_start([](Net& net, bool own) {
    return std::make_unique<torch::optim::RMSprop>(
        net->parameters(),
        RMSpropOptions(own ? 0.5 : 0.01).momentum(0.5).centered(true).alpha(own ? 0.5 : 0.9));
  });
}

TEST(BroadcastOptimizerState, LBFGS) {
  check_every_start([](Net& net, bool own) {
    auto options = LBFGSOptions(own ? 0.5 : 0.1).max_iter(own ? 2 : 4).history_size(own ? 3 : 7);
    if (!own) options.line_search_fn("strong_wolfe");
    return std::make_unique<torch::optim::LBFGS>(net->parameters(), options);
  });
}

TEST(BroadcastOptimizerState, ADifferentOptimizerIsAnErrorOnEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Net net(rank() == 1 ? 9 : 8);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const std::string message =
      message_of<MismatchError>([&] { broadcast_optimizer_state(optimizer); });
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  EXPECT_NE(message.find("[9,4]"), std::string::npos) << message;

  std::unique_ptr<Optimizer> other;
  if (rank() == 0) {
    other = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
  } else {
    other = std::make_unique<torch::optim::Adam>(net->parameters());
  }
  EXPECT_THROW(broadcast_optimizer_state(*other), MismatchError);
}

// Objects.

struct Plain {
  int a;
  double b;
  friend bool operator==(const Plain&, const Plain&) = default;
};

template <class T>
void check_object(const std::function<T(int rank)>& make) {
  const int root = size() - 1;
  EXPECT_EQ(broadcast_object(make(rank()), root), make(root));
  const std::vector<T> all = allgather_object(make(rank()));
  EXPECT_EQ(all.size(), static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], make(r));
}

TEST(Objects, EverySupportedType) {
  using std::string;
  using Nested = std::map<string, std::vector<std::optional<std::pair<int, string>>>>;
  check_object<int>([](int r) { return r * 3; });
  check_object<Plain>([](int r) { return Plain{r, r / 2.0}; });
  check_object<string>([](int r) { return string(static_cast<std::size_t>(r * 100), 'x'); });
  check_object<std::vector<double>>(
      [](int r) { return std::vector<double>(static_cast<std::size_t>(r), 1.5); });
  check_object<std::vector<bool>>([](int r) { return std::vector<bool>{r == 0, true}; });
  check_object<std::vector<string>>(
      [](int r) { return std::vector<string>{"", std::to_string(r)}; });
  check_object<std::array<string, 2>>(
      [](int r) { return std::array<string, 2>{"a", std::to_string(r)}; });
  check_object<std::optional<string>>(
      [](int r) { return r % 2 == 0 ? std::nullopt : std::optional<string>("odd"); });
  check_object<std::unordered_map<int, string>>(
      [](int r) { return std::unordered_map<int, string>{{r, "r"}, {-1, ""}}; });
  check_object<std::tuple<int, string, float>>(
      [](int r) { return std::tuple<int, string, float>{r, "t", 0.5F}; });
  check_object<Nested>([](int r) {
    return Nested{{"x", {std::pair<int, string>{r, "y"}, std::nullopt}}, {std::to_string(r), {}}};
  });
  EXPECT_EQ(broadcast_object("literal"), "literal");
  EXPECT_EQ(allgather_object("literal").size(), static_cast<std::size_t>(size()));
}

TEST(Objects, TensorsAndIValues) {
  const torch::Tensor own = rank_tensor(rank(), {2, 3}, torch::kFloat32).t();
  const torch::Tensor received = broadcast_object(own);
  EXPECT_TRUE(near(received, rank_tensor(0, {2, 3}, torch::kFloat32).t()));
  EXPECT_FALSE(broadcast_object(torch::Tensor()).defined());
  // Tensors that collectives do not take.
  EXPECT_EQ(broadcast_object(torch::ones({2}, torch::kComplexDouble)).scalar_type(),
            torch::kComplexDouble);

  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  dict.insert("rank", torch::tensor(rank()));
  const auto all = allgather_object(c10::IValue(dict));
  for (int r = 0; r < size(); ++r) {
    const auto& entry = all[static_cast<std::size_t>(r)].toGenericDict();
    EXPECT_EQ(entry.at("rank").toTensor().item<int>(), r);
  }
}

TEST(Objects, DifferentTypesAreAMismatch) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  if (rank() == 0) {
    broadcast_object(1.5, 0, {.name = "kind"});
  } else {
    EXPECT_THROW(broadcast_object(std::string("text"), 0, {.name = "kind"}), MismatchError);
  }
}

TEST(Objects, AnObjectThatCannotBeEncodedFailsOnEveryRank) {
  const auto unsaveable =
      c10::IValue::make_capsule(c10::make_intrusive<torch::CustomClassHolder>());
  // The owner's error gives the reason, the other errors give the owner's rank.
  if (rank() == 0) {
    EXPECT_THROW(broadcast_object(unsaveable), c10::Error);
  } else {
    EXPECT_NE(message_of<Error>([&] { broadcast_object(unsaveable); }).find("rank 0"),
              std::string::npos);
  }
  const c10::IValue mine = rank() == size() - 1 ? unsaveable : c10::IValue(rank());
  if (rank() == size() - 1) {
    EXPECT_THROW(allgather_object(mine), c10::Error);
  } else {
    EXPECT_THROW(allgather_object(mine), Error);
  }
  EXPECT_EQ(broadcast_object(7), 7);
}

// scale_loss and all_reduce.

TEST(AllReduce, SumsGradientsInPlaceAndZerosStandInForMissingOnes) {
  const torch::Tensor everywhere = torch::zeros({3}, torch::requires_grad());
  const torch::Tensor one_rank = torch::zeros({2, 2}, torch::requires_grad());
  const torch::Tensor nowhere = torch::zeros({4}, torch::requires_grad());
  const torch::Tensor frozen = torch::zeros({5});
  (everywhere * (rank() + 1)).sum().backward();
  if (rank() == size() - 1) (one_rank * 3).sum().backward();
  const torch::Tensor gradient = everywhere.grad();
  all_reduce({everywhere, one_rank, nowhere, frozen});
  EXPECT_TRUE(everywhere.grad().is_same(gradient));
  EXPECT_TRUE(near(gradient, torch::full({3}, size() * (size() + 1) / 2.0F)));
  EXPECT_TRUE(near(one_rank.grad(), torch::full({2, 2}, 3.0F)));
  // A single process has no gradients for these either, so that an optimizer does not decay the
  // weights.
  EXPECT_FALSE(nowhere.grad().defined());
  EXPECT_FALSE(frozen.grad().defined());

  all_reduce({everywhere}, ReduceOp::kAverage);
  EXPECT_TRUE(near(everywhere.grad(), torch::full({3}, size() * (size() + 1) / 2.0F)));
  all_reduce({});
}

TEST(ScaleLoss, DividesByTheSizeAndIsDifferentiable) {
  const torch::Tensor x = torch::tensor(6.0, torch::requires_grad());
  const torch::Tensor scaled = scale_loss(x * 2);
  EXPECT_TRUE(near(scaled.detach(), torch::tensor(12.0 / size())));
  scaled.backward();
  EXPECT_TRUE(near(x.grad(), torch::tensor(2.0 / size())));
  EXPECT_THROW(scale_loss(torch::Tensor()), UsageError);
}

TEST(DeviceTest, IsTheCpuWithoutAGpu) {
  if (gpu_index()) GTEST_SKIP() << "this rank has a GPU";
  EXPECT_TRUE(hvd::device().is_cpu());
}

}  // namespace
}  // namespace hvd::testing
