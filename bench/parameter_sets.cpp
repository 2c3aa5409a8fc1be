#include "bench/parameter_sets.h"

#include <array>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace hvd::bench {
namespace {

using Shapes = std::vector<Shape>;

void add_convolution(Shapes& shapes, std::int64_t out, std::int64_t in, std::int64_t kernel) {
  shapes.push_back({out, in, kernel, kernel});
  // Batch normalization: weight and bias. Its running statistics have no gradient.
  shapes.push_back({out});
  shapes.push_back({out});
}

/// He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, as torchvision
/// declares it.
Shapes resnet50() {
  constexpr std::array<int, 4> kBlocks = {3, 4, 6, 3};
  Shapes shapes;
  add_convolution(shapes, 64, 3, 7);
  std::int64_t in = 64;
  std::int64_t width = 64;
  for (const int blocks : kBlocks) {
    const std::int64_t out = 4 * width;
    for (int block = 0; block < blocks; ++block) {
      add_convolution(shapes, width, in, 1);
      add_convolution(shapes, width, width, 3);
      add_convolution(shapes, out, width, 1);
      if (block == 0) add_convolution(shapes, out, in, 1);
      in = out;
    }
    width *= 2;
  }
  shapes.push_back({1000, in});
  shapes.push_back({1000});
  return shapes;
}

/// Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): 12 layers of width
/// 768.
Shapes gpt2() {
  constexpr std::int64_t kWidth = 768;
  constexpr std::int64_t kVocabulary = 50257;
  constexpr std::int64_t kPositions = 1024;
  constexpr int kLayers = 12;
  Shapes shapes = {{kVocabulary, kWidth}, {kPositions, kWidth}};
  for (int layer = 0; layer < kLayers; ++layer) {
    shapes.insert(
        shapes.end(),
        {{kWidth}, {kWidth}, {kWidth, 3 * kWidth}, {3 * kWidth}, {kWidth, kWidth}, {kWidth}});
    shapes.insert(
        shapes.end(),
        {{kWidth}, {kWidth}, {kWidth, 4 * kWidth}, {4 * kWidth}, {4 * kWidth, kWidth}, {kWidth}});
  }
  shapes.insert(shapes.end(), {{kWidth}, {kWidth}});
  return shapes;
}

Shapes small1000() { return Shapes(1000, Shape{256}); }

Shapes mnist() {
  return {{32, 1, 3, 3}, {32}, {64, 32, 3, 3}, {64}, {128, 9216}, {128}, {10, 128}, {10}};
}

/// Has a scalar, and a tensor that fills more than one of the peers' chunks, the last only in part.
Shapes tiny() { return {{7}, {3, 5}, {}, {70001}, {1}}; }

struct Entry {
  const char* name;
  Shapes (*make)();
};
constexpr std::array<Entry, 5> kSets = {{{"resnet50", resnet50},
                                         {"gpt2", gpt2},
                                         {"small1000", small1000},
                                         {"mnist", mnist},
                                         {"tiny", tiny}}};

}  // namespace

std::int64_t ParameterSet::elements() const {
  std::int64_t sum = 0;
  for (const Shape& shape : shapes)
    sum += std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return sum;
}

std::vector<std::string> parameter_set_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kSets) names.emplace_back(entry.name);
  return names;
}

ParameterSet parameter_set(const std::string& name) {
  for (const Entry& entry : kSets) {
    if (name == entry.name) return {name, entry.make()};
  }
  throw std::invalid_argument("there is no parameter set '" + name + "'");
}

Json all_parameter_sets() {
  Json sets = Json::object();
  for (const Entry& entry : kSets) sets[entry.name] = entry.make();
  return sets;
}

}  // namespace hvd::bench
