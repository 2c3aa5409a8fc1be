#include "reducer/gradient_units.h"

#include <numeric>

#include "torch/reducer/parts.h"

namespace hvd::testing {
namespace {

using libtorch::GradientReduction;
using libtorch::GradientUnits;
using libtorch::RankAgreement;
using libtorch::ReducedParameter;

using Units = std::vector<std::vector<std::size_t>>;

GradientReduction with_buckets(const std::string& scope) {
  GradientReduction how = sums("units." + scope);
  how.bucket_views = true;
  how.sparse = libtorch::SparseGradients::kMakeDense;
  return how;
}

/// A model with `count` parameters of 16 floats, 64 bytes each.
struct Model {
  explicit Model(const GradientReduction& reduction, std::size_t count = 16)
      : how(reduction), parameters(reduced(std::vector<std::int64_t>(count, 16), how)) {}

  /// Only the first rank passes the order of a backward pass, which all ranks then use.
  bool learn() {
    std::vector<std::size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), 0);
    if (rank() == 0) std::reverse(order.begin(), order.end());
    return units.learn(order);
  }

  const GradientReduction how;
  std::vector<ReducedParameter> parameters;
  RankAgreement agreement{how, parameters};
  GradientUnits units{how, parameters, agreement};
};

Units one_by_one(std::size_t parameters) {
  Units units;
  for (std::size_t i = 0; i < parameters; ++i) units.push_back({i});
  return units;
}

TEST(GradientUnits, AreAtFirstAsTheUserHasGroupedTheParameters) {
  const GradientReduction how = with_buckets("groups");
  const auto ones = [] { return torch::ones({2}, torch::requires_grad()); };
  std::vector<ReducedParameter> parameters = {
      reduced("a", ones(), how, 1), reduced("b", ones(), how), reduced("c", ones(), how, 0),
      reduced("d", ones(), how, 1), reduced("e", ones(), how)};
  const RankAgreement agreement(how, parameters);
  const GradientUnits units(how, parameters, agreement);
  EXPECT_EQ(units.members(), (Units{{0, 3}, {1}, {2}, {4}}));
  EXPECT_EQ(units.all()[0].group, how.scope + ".group1");
  EXPECT_EQ(units.all()[1].group, "");
  EXPECT_EQ(units.all()[2].group, how.scope + ".group0");
  EXPECT_TRUE(units.learning());
}

TEST(GradientUnits, AreBucketsInTheFirstRanksOrderOnceItIsLearnt) {
  Model model(with_buckets("learn"));
  for (const ReducedParameter& parameter : model.parameters)
    set_gradient(parameter, torch::full({16}, static_cast<float>(rank() + 1)));
  EXPECT_EQ(model.learn(), size() > 1);
  if (size() == 1) {
    EXPECT_EQ(model.units.members(), one_by_one(16));
    return;
  }
  // Each bucket has an eighth of all gradients.
  EXPECT_EQ(model.units.members(),
            (Units{{15, 14}, {13, 12}, {11, 10}, {9, 8}, {7, 6}, {5, 4}, {3, 2}, {1, 0}}));
  EXPECT_FALSE(model.units.learning());
  EXPECT_FALSE(model.units.follow_parameters());
  EXPECT_EQ(model.units[0].bucket->submission().name, model.how.scope + ".bucket0[p15 .. p14]");
  EXPECT_EQ(model.units[1].bucket->submission().name, model.how.scope + ".bucket1[p13 .. p12]");
  for (const auto& unit : model.units.all()) {
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      const ReducedParameter& parameter = model.parameters[unit.members[m]];
      EXPECT_TRUE(parameter.view().is_same(unit.bucket->view(m))) << parameter.name();
      EXPECT_TRUE(parameter.tensor().grad().is_same(unit.bucket->view(m))) << parameter.name();
      EXPECT_TRUE(
          near(parameter.tensor().grad(), torch::full({16}, static_cast<float>(rank() + 1))));
    }
  }
}

TEST(GradientUnits, AreBucketsOfTheSizeThatTheProgramAsksFor) {
  if (size() == 1) GTEST_SKIP() << "one rank has no buckets";
  for (const std::int64_t gradients : {1, 4, 16, 100}) {
    GradientReduction how = with_buckets("asked" + std::to_string(gradients));
    how.bucket_bytes = 64 * gradients;
    Model model(how);
    ASSERT_TRUE(model.learn());
    EXPECT_EQ(model.units.all().size(), gradients > 16 ? 1U : 16 / gradients);
  }
}

TEST(GradientUnits, OtherGradientsAreReducedBesideTheBuckets) {
  const GradientReduction how = [] {
    GradientReduction with = with_buckets("beside");
    with.compression = Compression::kFloat16;
    return with;
  }();
  const auto ones = [](torch::ScalarType type) {
    return torch::ones({16}, torch::TensorOptions().dtype(type).requires_grad(true));
  };
  std::vector<ReducedParameter> parameters = {reduced("group0", ones(torch::kFloat32), how, 0),
                                              reduced("double", ones(torch::kFloat64), how),
                                              reduced("plain", ones(torch::kFloat32), how),
                                              reduced("frozen", torch::ones({16}), how),
                                              reduced("group1", ones(torch::kFloat32), how, 0),
                                              reduced("more", ones(torch::kFloat32), how)};
  const RankAgreement agreement(how, parameters);
  GradientUnits units(how, parameters, agreement);
  EXPECT_EQ(units.learn({0, 1, 2, 4, 5}), size() > 1);
  if (size() == 1) return;
  EXPECT_EQ(units.members(), (Units{{2}, {5}, {0, 4}, {1}, {3}}));
  EXPECT_TRUE(units[1].bucket);
  EXPECT_FALSE(units[2].bucket);
  EXPECT_FALSE(parameters[1].view().defined());
}

TEST(GradientUnits, AreNoBucketsWhereTheyHaveNoUse) {
  GradientReduction adasum = with_buckets("adasum");
  adasum.op = ReduceOp::kAdasum;
  GradientReduction without = with_buckets("without");
  without.bucket_views = false;
  for (const GradientReduction& how : {adasum, without}) {
    Model model(how);
    EXPECT_FALSE(model.learn());
    EXPECT_EQ(model.units.members(), one_by_one(16));
  }
}

TEST(GradientUnits, AGradientWhoseLayoutIsOpenMayComeToBeInABucket) {
  GradientReduction how = with_buckets("open");
  how.sparse = libtorch::SparseGradients::kReduceSparse;
  Model model(how, 3);
  EXPECT_FALSE(model.learn()) << "no layout is known";
  model.parameters[0].agree(0);
  model.parameters[1].agree(1);
  EXPECT_EQ(model.learn(), size() > 1);
  if (size() == 1) return;
  EXPECT_EQ(model.units.members(), (Units{{0}, {1}, {2}}));
  EXPECT_TRUE(model.units[0].bucket);
  EXPECT_FALSE(model.units[1].bucket) << "it is sparse";
  EXPECT_FALSE(model.units[2].bucket);
  EXPECT_FALSE(model.units.follow_parameters());
  model.parameters[2].agree(0);
  EXPECT_TRUE(model.units.follow_parameters()) << "it can be in a bucket now";
}

TEST(GradientUnits, LearnAnewWhenParametersHaveChanged) {
  if (size() == 1) GTEST_SKIP() << "one rank has no buckets";
  const std::function<void(const torch::Tensor&)> changes[] = {
      [](const torch::Tensor& parameter) { parameter.set_requires_grad(false); },
      [](const torch::Tensor& parameter) {
        parameter.set_data(parameter.detach().to(torch::kFloat64));
      },
      [](const torch::Tensor& parameter) { parameter.set_data(torch::ones({4, 4})); }};
  for (const auto& change : changes) {
    Model model(with_buckets("anew"));
    ASSERT_TRUE(model.learn());
    EXPECT_FALSE(model.units.follow_parameters());
    change(model.parameters[3].tensor());
    EXPECT_TRUE(model.units.follow_parameters());
    EXPECT_EQ(model.units.members(), one_by_one(16));
    EXPECT_TRUE(model.units.learning());
    EXPECT_FALSE(model.parameters[0].view().defined());
    EXPECT_FALSE(model.units.follow_parameters());
    EXPECT_TRUE(model.learn());
  }
}

TEST(GradientUnits, AreLearntOnceForEachSetOfTrainedParameters) {
  if (size() == 1) GTEST_SKIP() << "one rank has no buckets";
  Model model(with_buckets("sets"));
  const auto freeze = [&](bool frozen) {
    model.parameters[3].tensor().set_requires_grad(!frozen);
    EXPECT_TRUE(model.units.follow_parameters());
  };
  ASSERT_TRUE(model.learn());
  const Units all = model.units.members();
  const std::uint64_t version = model.units.version();
  freeze(true);
  EXPECT_TRUE(model.units.learning());
  ASSERT_TRUE(model.learn());
  const Units without = model.units.members();
  const void* const memory = model.units[0].bucket->flat().const_data_ptr();
  for (int round = 0; round < 3; ++round) {
    freeze(false);
    EXPECT_FALSE(model.units.learning());
    EXPECT_EQ(model.units.members(), all);
    EXPECT_EQ(model.units.version(), version);
    EXPECT_TRUE(model.parameters[15].view().is_same(model.units[0].bucket->view(0)));
    freeze(true);
    EXPECT_EQ(model.units.members(), without);
    EXPECT_EQ(model.units[0].bucket->flat().const_data_ptr(), memory);
    EXPECT_FALSE(model.parameters[3].view().defined());
  }
  EXPECT_EQ(model.units.learnings(), 2U);
}

TEST(GradientUnits, AreKeptForAFewSetsOnly) {
  if (size() == 1) GTEST_SKIP() << "one rank has no buckets";
  Model model(with_buckets("few"));
  const auto freeze_only = [&](std::size_t frozen) {
    for (std::size_t i = 0; i < model.parameters.size(); ++i)
      model.parameters[i].tensor().set_requires_grad(i != frozen);
    model.units.follow_parameters();
  };
  for (const std::size_t i : {0, 1, 2, 3, 4, 5}) {
    freeze_only(i);
    ASSERT_TRUE(model.learn()) << i;
  }
  freeze_only(4);
  EXPECT_FALSE(model.units.learning());
  freeze_only(0);
  EXPECT_TRUE(model.units.learning()) << "the oldest are gone";
  freeze_only(2);
  EXPECT_FALSE(model.units.learning()) << "and their places were not needed";
}

TEST(GradientUnits, AreNoBucketsIfParametersLieOtherwiseInMemory) {
  if (size() == 1) GTEST_SKIP() << "one rank has no buckets";
  const GradientReduction how = with_buckets("strides");
  const torch::Tensor tensor = rank() == 0 ? torch::ones({2, 3}) : torch::ones({3, 2}).t();
  std::vector<ReducedParameter> parameters = {reduced("p", tensor.detach().requires_grad_(), how)};
  const RankAgreement agreement(how, parameters);
  GradientUnits units(how, parameters, agreement);
  EXPECT_FALSE(units.learn({0}));
  EXPECT_EQ(units.members(), one_by_one(1));
  EXPECT_FALSE(units.learning()) << "it will not become better";
}

TEST(GradientUnits, LearnLaterWhenARankWasAbsent) {
  if (size() == 1) GTEST_SKIP() << "no other rank is there while it is absent";
  Model model(with_buckets("absent"));
  if (rank() == 0) {
    join();
  } else {
    EXPECT_FALSE(model.learn());
    EXPECT_TRUE(model.units.learning());
    join();
  }
  EXPECT_TRUE(model.learn());
}

}  // namespace
}  // namespace hvd::testing
