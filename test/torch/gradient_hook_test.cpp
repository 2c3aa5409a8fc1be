#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>

#include "torch/support/torch_test.h"

// Tests gradient_hook, a function of the program that reduces the gradients.

namespace hvd::testing {
namespace {

using Finish = std::function<torch::Tensor()>;
using torch::optim::SGD;
using torch::optim::SGDOptions;

Finish average(const BucketGradients& bucket) {
  Handle handle =
      allreduce_async(bucket.values, {.name = bucket.name, .process_set = bucket.process_set});
  return [handle]() mutable { return handle.wait(); };
}

Finish average_in_place(const BucketGradients& bucket) {
  Handle handle =
      allreduce_async_(bucket.values, {.name = bucket.name, .process_set = bucket.process_set});
  return [handle]() mutable { return handle.wait(); };
}

Finish average_in_float16(const BucketGradients& bucket) {
  Handle handle = allreduce_async(bucket.values.to(torch::kFloat16),
                                  {.name = bucket.name, .process_set = bucket.process_set});
  return [handle]() mutable { return handle.wait().to(torch::kFloat32); };
}

/// Makes PowerSGD's two exchanges; the second needs the result of the first. A matrix of one column
/// has rank 1, so the result is exact.
Finish average_in_two_exchanges(const BucketGradients& bucket) {
  const torch::Tensor matrix = bucket.values.clone();
  Handle handle =
      allreduce_async(matrix, {.name = bucket.name + ".p", .process_set = bucket.process_set});
  return [=]() mutable {
    torch::Tensor p = handle.wait();
    p = p / p.norm().clamp_min(1e-30);
    const torch::Tensor q =
        allreduce(matrix.dot(p), {.name = bucket.name + ".q", .process_set = bucket.process_set});
    return p * q;
  };
}

/// Sends the largest quarter of a bucket's elements; the others are added to those of the next
/// step.
class TopQuarter {
 public:
  Finish operator()(const BucketGradients& bucket) {
    const auto [values, places] = choose(bucket.name, bucket.values);
    Handle all_values = allgather_async(values, {.name = bucket.name + ".values"});
    Handle all_places = allgather_async(places, {.name = bucket.name + ".places"});
    return [all_values, all_places, count = bucket.values.numel()]() mutable {
      return torch::zeros({count}).index_add(0, all_places.wait(), all_values.wait()) / size();
    };
  }
  std::pair<torch::Tensor, torch::Tensor> choose(const std::string& name,
                                                 const torch::Tensor& own) {
    torch::Tensor& left = left_[name];
    left = left.defined() ? left + own : own.clone();
    const torch::Tensor places = std::get<1>(left.abs().topk((left.numel() + 3) / 4));
    const torch::Tensor values = left.index_select(0, places);
    left.index_fill_(0, places, 0);
    return {values, places};
  }

 private:
  std::map<std::string, torch::Tensor> left_;
};

void check_training(const GradientHook& hook, DistributedOptimizerOptions options,
                    double tolerance) {
  Net net, serial;
  copy_values(*serial, *net);
  SGD inner(net->parameters(), SGDOptions(0.05).momentum(0.9));
  SGD reference(serial->parameters(), SGDOptions(0.05).momentum(0.9));
  options.gradient_hook = hook;
  const ProcessSet set = options.process_set;
  const int passes = options.backward_passes_per_step;
  DistributedOptimizer optimizer(inner, net, std::move(options));
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad(step % 2 == 0);
    reference.zero_grad();
    for (int pass = 0; pass < passes; ++pass)
      loss_of(net, Batch::of_rank(rank(), step + pass)).backward();
    for (const int r : set.ranks()) {
      for (int pass = 0; pass < passes; ++pass)
        (loss_of(serial, Batch::of_rank(r, step + pass)) / set.size()).backward();
    }
    optimizer.step();
    reference.step();
  }
  const auto expected = serial->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(near(item.value(), expected[item.key()], tolerance)) << item.key();
}

TEST(GradientHook, ItsResultsAreTheGradients) {
  for_each_set([](const ProcessSet& set) {
    for (const bool views : {true, false}) {
      torch::manual_seed(31);
      check_training(average, {.gradient_as_bucket_view = views, .process_set = set}, 1e-5);
      check_training(average_in_place, {.gradient_as_bucket_view = views, .process_set = set},
                     1e-5);
      check_training(average_in_two_exchanges,
                     {.gradient_as_bucket_view = views, .process_set = set}, 1e-4);
      check_training(average_in_float16, {.gradient_as_bucket_view = views, .process_set = set},
                     1e-2);
    }
  });
  torch::manual_seed(32);
  check_training(average, {.backward_passes_per_step = 2}, 1e-5);
  check_training(average, {.groups = {{"fc1.weight", "fc2.bias"}, {"norm.weight"}}}, 1e-5);
}

/// Computes on this rank the values that every rank sends.
TEST(GradientHook, TopKWithErrorFeedbackEqualsAPlainComputation) {
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.05));
  TopQuarter top;
  std::vector<BucketGradients> buckets;
  DistributedOptimizer optimizer(inner, net, {.gradient_hook = [&](const BucketGradients& bucket) {
                                   buckets.push_back(bucket);
                                   return top(bucket);
                                 }});
  std::vector<TopQuarter> of_rank(static_cast<std::size_t>(size()));
  for (int step = 0; step < 6; ++step) {
    buckets.clear();
    optimizer.zero_grad();
    backward(net, step);
    optimizer.synchronize();
    std::vector<NamedParameters> gradients(of_rank.size());
    for (int r = 0; r < size(); ++r) {
      Net theirs;
      copy_values(*net, *theirs);
      loss_of(theirs, Batch::of_rank(r, step)).backward();
      for (const auto& item : theirs->named_parameters())
        gradients[static_cast<std::size_t>(r)].insert(item.key(), item.value().grad());
    }
    std::size_t parameters = 0;
    for (const BucketGradients& bucket : buckets) {
      torch::Tensor sum = torch::zeros(bucket.values.sizes());
      for (std::size_t r = 0; r < of_rank.size(); ++r) {
        torch::Tensor own = torch::zeros(bucket.values.sizes());
        for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
          const torch::Tensor gradient = gradients[r][bucket.parameters[i]].reshape({-1});
          own.narrow(0, bucket.first[i], gradient.numel()).copy_(gradient);
        }
        const auto [values, places] = of_rank[r].choose(bucket.name, own);
        sum.index_add_(0, places, values);
      }
      for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
        const torch::Tensor gradient = net->named_parameters()[bucket.parameters[i]].grad();
        EXPECT_TRUE(near(gradient.reshape({-1}),
                         sum.narrow(0, bucket.first[i], gradient.numel()) / size(), 1e-5))
            << bucket.parameters[i] << " in step " << step;
        ++parameters;
      }
    }
    EXPECT_EQ(parameters, 6U) << "expected each parameter in one bucket";
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

/// The branches' gradients become ready in a different order on each rank.
torch::Tensor loss_in_own_order(torch::nn::ModuleList& branches, int step) {
  torch::Tensor loss = torch::zeros({});
  const auto count = static_cast<int>(branches->size());
  for (int i = 0; i < count; ++i) {
    const auto branch = branches[static_cast<std::size_t>((i * (2 * rank() + 1) + step) % count)];
    loss = loss + branch->as<torch::nn::Linear>()->forward(torch::ones({4}) * (rank() + 1)).sum();
  }
  return loss;
}

TEST(GradientHook, IsCalledInOneOrderOnAllRanksAndDuringBackward) {
  torch::nn::ModuleList branches;
  for (int i = 0; i < 16; ++i) branches->push_back(torch::nn::Linear(4, 4));
  broadcast_parameters(branches);
  SGD inner(branches->parameters(), SGDOptions(0.01));
  std::vector<std::string> calls;
  std::vector<std::size_t> finished;
  DistributedOptimizer optimizer(inner, branches,
                                 {.gradient_hook = [&](const BucketGradients& bucket) -> Finish {
                                   calls.push_back(bucket.name);
                                   Finish finish = average(bucket);
                                   return [&, finish, index = bucket.index] {
                                     finished.push_back(index);
                                     return finish();
                                   };
                                 }});
  for (int step = 0; step < 5; ++step) {
    calls.clear();
    finished.clear();
    optimizer.zero_grad();
    loss_in_own_order(branches, step).backward();
    const std::size_t during_backward = calls.size();
    EXPECT_TRUE(finished.empty());
    optimizer.step();
    EXPECT_EQ(during_backward, step == 0 ? 0U : calls.size());
    EXPECT_EQ(finished.size(), calls.size());
    EXPECT_TRUE(std::is_sorted(finished.begin(), finished.end()));
    const auto of_all = allgather_object(calls, {.name = "calls"});
    for (const auto& theirs : of_all) EXPECT_EQ(theirs, calls) << "step " << step;
    for (const auto& parameter : branches->parameters()) {
      if (parameter.dim() == 1) continue;
      EXPECT_TRUE(near(parameter.grad(), torch::full({4, 4}, (size() + 1) / 2.0F), 1e-5));
    }
  }
  EXPECT_TRUE(same_on_all_ranks(branches->parameters()));
}

// Uses an embedding with sparse gradients, and a parameter that only one rank uses.
TEST(GradientHook, GetsZerosForMissingGradientsAndDenseOnesForSparse) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  torch::nn::Linear rare(3, 2);
  broadcast_parameters(table);
  broadcast_parameters(rare);
  NamedParameters named{{"table", table->weight}, {"rare", rare->weight}};
  SGD inner(named.values(), 0.1);
  DistributedOptimizer optimizer(inner, named, {.gradient_hook = average});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const bool uses = rank() == step % size();
    torch::Tensor loss = table->forward(torch::tensor({9})).sum();
    if (uses) loss = loss + rare->forward(torch::ones({3})).sum();
    loss.backward();
    optimizer.step();
    EXPECT_TRUE(near(rare->weight.grad(), torch::full({2, 3}, 1.0F / size()), 1e-6));
    EXPECT_FALSE(table->weight.grad().is_sparse());
    EXPECT_EQ(table->weight.grad()[9][0].item<float>(), 1);
  }
}

TEST(GradientHook, GradientsThatAreDroppedAreWaitedFor) {
  for (const GradientHook& hook : {GradientHook(average), GradientHook(average_in_two_exchanges)}) {
    Net net = same_net();
    SGD inner(net->parameters(), SGDOptions(0.05));
    DistributedOptimizer optimizer(inner, net, {.gradient_hook = hook});
    backward(net);
    optimizer.step();  // in which the ranks agree on buckets
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      backward(net, step);
      // One rank drops the gradients that the others reduce.
      if (rank() != step % size()) optimizer.synchronize();
      step % 2 == 0 ? optimizer.zero_grad() : inner.zero_grad();
      backward(net, step);
      optimizer.step();
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  }
}

TEST(GradientHook, BackwardOrStepThrowsItsExceptions) {
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.05));
  bool fails = false;
  const auto fail_if = [&](bool when) {
    if (when) throw std::runtime_error("no room to compress");
  };
  bool fails_later = false, empty = false, too_few = false;
  DistributedOptimizer optimizer(
      inner, net, {.gradient_hook = [&](const BucketGradients& bucket) -> Finish {
        fail_if(fails);
        if (empty) return {};
        return [&, finish = average(bucket)] {
          const torch::Tensor result = finish();
          fail_if(fails_later);
          return too_few ? result.narrow(0, 0, result.numel() - 1) : result;
        };
      }});
  const auto step_throws = [&](const std::string& expected) {
    const torch::Tensor before = net->fc1->weight.detach().clone();
    std::string message;
    try {
      optimizer.zero_grad();
      backward(net);
      optimizer.step();
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_TRUE(contains(message, expected)) << message;
    EXPECT_TRUE(torch::equal(before, net->fc1->weight));
    fails = fails_later = empty = too_few = false;
  };
  for (int step = 0; step < 3; ++step) {
    fails = true;
    if (step > 0 && size() > 1) {
      optimizer.zero_grad();
      EXPECT_THROW(backward(net), std::runtime_error) << "the hook throws during backward()";
      fails = false;  // step() calls the hook again
    } else {
      step_throws("no room to compress");
      optimizer.zero_grad();
      backward(net);
    }
    optimizer.step();
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
  fails_later = true;
  step_throws("no room to compress");
  empty = true;
  step_throws("gradient_hook returned nothing for opt");
  optimizer.zero_grad();
  too_few = true;
  step_throws("reduced gradients of opt");
  backward(net, 1);
  optimizer.step();
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(GradientHook, OptionsThatMeanNothingOrDiffer) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  for (const DistributedOptimizerOptions& options :
       {DistributedOptimizerOptions{.op = ReduceOp::kAdasum, .gradient_hook = average},
        DistributedOptimizerOptions{.compression = Compression::kFloat16, .gradient_hook = average},
        DistributedOptimizerOptions{.gradient_predivide_factor = 2, .gradient_hook = average}}) {
    EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedOptimizer(inner, net, options); }),
                         "gradient_hook reduces gradients itself"));
  }
  if (size() == 1) return;
  DistributedOptimizerOptions options;
  if (rank() == 0) options.gradient_hook = average;
  DistributedOptimizer optimizer(inner, net, options);
  backward(net);
  EXPECT_TRUE(
      contains(message_of<MismatchError>([&] { optimizer.step(); }), "option gradient_hook"));
}

}  // namespace
}  // namespace hvd::testing
