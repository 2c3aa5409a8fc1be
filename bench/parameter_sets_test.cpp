#include "bench/parameter_sets.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace hvd::bench {
namespace {

void expect_set(const char* name, std::size_t tensors, std::int64_t elements) {
  const ParameterSet set = parameter_set(name);
  EXPECT_EQ(set.name, name);
  EXPECT_EQ(set.shapes.size(), tensors) << name;
  EXPECT_EQ(set.elements(), elements) << name;
}

TEST(ParameterSets, HaveTheSizesOfTheModels) {
  expect_set("resnet50", 161, 25'557'032);
  expect_set("gpt2", 148, 124'439'808);
  expect_set("small1000", 1000, 256'000);
  expect_set("mnist", 8, 1'199'882);
  expect_set("tiny", 5, 70'025);
}

TEST(ParameterSets, AreNamed) {
  const Json all = all_parameter_sets();
  ASSERT_EQ(all.size(), parameter_set_names().size());
  for (const std::string& name : parameter_set_names())
    EXPECT_EQ(all[name].size(), parameter_set(name).shapes.size()) << name;
  EXPECT_EQ(all["resnet50"][0], (Json{64, 3, 7, 7}));
  EXPECT_THROW(parameter_set("alexnet"), std::invalid_argument);
}

}  // namespace
}  // namespace hvd::bench
