// Sends objects of a program's own types.
#include <optional>

#include "torch/support/torch_test.h"

namespace hvd::testing {

struct Inner {
  std::string name;
  torch::Tensor weight;
};

struct Outer {
  int number = 0;
  std::optional<int> maybe;
  std::vector<Inner> parts;
  Inner inner;
  std::array<std::string, 2> labels;
  std::map<std::string, Inner> by_name;
};

/// A type that is neither an aggregate nor default-constructible.
class Vocabulary {
 public:
  explicit Vocabulary(std::vector<std::string> words) : words_(std::move(words)) {}
  const std::vector<std::string>& words() const { return words_; }

 private:
  std::vector<std::string> words_;
};

/// A trivially copyable type that is sent by its ObjectTraits.
struct Celsius {
  double degrees = 0;
};

/// A type with save() and load(), as LibTorch's own types.
class Counter {
 public:
  Counter() = default;
  explicit Counter(std::int64_t count) : count_(count) {}
  std::int64_t count() const { return count_; }
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("count", c10::IValue(count_));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("count", value);
    count_ = value.toInt();
  }

 private:
  std::int64_t count_ = 0;
};

}  // namespace hvd::testing

template <>
struct hvd::ObjectTraits<hvd::testing::Vocabulary> {
  static const std::vector<std::string>& save(const testing::Vocabulary& vocabulary) {
    return vocabulary.words();
  }
  static testing::Vocabulary load(std::vector<std::string> words) {
    return testing::Vocabulary(std::move(words));
  }
};

template <>
struct hvd::ObjectTraits<hvd::testing::Celsius> {
  static std::string save(const testing::Celsius& value) {
    if (value.degrees < -273.15) throw std::invalid_argument("colder than cold");
    return std::to_string(value.degrees);
  }
  static testing::Celsius load(const std::string& text) { return {std::stod(text) + 1000}; }
};

namespace hvd::testing {
namespace {

Outer outer_of(int rank) {
  const std::string text = "rank " + std::to_string(rank);
  const auto inner = [&](int i) {
    return Inner{text + "." + std::to_string(i), torch::full({2}, rank + i)};
  };
  Outer outer{.number = rank,
              .maybe = std::nullopt,
              .parts = {},
              .inner = inner(9),
              .labels = {text, "b"},
              .by_name = {{"k", inner(5)}}};
  if (rank % 2 == 0) outer.maybe = rank * 10;
  for (int i = 0; i < rank; ++i) outer.parts.push_back(inner(i));
  return outer;
}

void expect_equal(const Inner& a, const Inner& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_TRUE(torch::equal(a.weight, b.weight));
}

void expect_equal(const Outer& a, const Outer& b) {
  EXPECT_EQ(a.number, b.number);
  EXPECT_EQ(a.maybe, b.maybe);
  EXPECT_EQ(a.labels, b.labels);
  EXPECT_EQ(a.parts.size(), b.parts.size());
  for (std::size_t i = 0; i < a.parts.size() && i < b.parts.size(); ++i)
    expect_equal(a.parts[i], b.parts[i]);
  expect_equal(a.inner, b.inner);
  expect_equal(a.by_name.at("k"), b.by_name.at("k"));
}

TEST(OwnTypes, StructsAreSentMemberByMember) {
  const int root = size() - 1;
  expect_equal(broadcast_object(outer_of(rank()), root), outer_of(root));
  const std::vector<Outer> all = allgather_object(outer_of(rank()));
  ASSERT_EQ(all.size(), static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) expect_equal(all[static_cast<std::size_t>(r)], outer_of(r));
  struct Local {
    std::string a;
    int b;
  };
  const Local local = broadcast_object(Local{"of rank " + std::to_string(rank()), rank()}, root);
  EXPECT_EQ(local.a, "of rank " + std::to_string(root));
  EXPECT_EQ(local.b, root);
  const auto list = broadcast_object(std::vector<Outer>{outer_of(rank()), outer_of(3)}, root);
  ASSERT_EQ(list.size(), 2U);
  expect_equal(list[0], outer_of(root));
  expect_equal(list[1], outer_of(3));
}

TEST(OwnTypes, TraitsDefineTheSentValue) {
  const int root = size() - 1;
  const Vocabulary mine({"word", std::to_string(rank())});
  EXPECT_EQ(broadcast_object(mine, root).words()[1], std::to_string(root));
  const auto lists =
      allgather_object(std::vector<Vocabulary>(static_cast<std::size_t>(rank()), mine));
  for (int r = 0; r < size(); ++r) {
    const auto& list = lists[static_cast<std::size_t>(r)];
    ASSERT_EQ(list.size(), static_cast<std::size_t>(r));
    for (const Vocabulary& vocabulary : list) EXPECT_EQ(vocabulary.words()[1], std::to_string(r));
  }
  // ObjectTraits have precedence over the bytes of a trivially copyable type, also in lists.
  EXPECT_EQ(broadcast_object(Celsius{20}).degrees, 1020);
  EXPECT_EQ(broadcast_object(std::vector<Celsius>{{1}, {2}})[1].degrees, 1002);
}

TEST(OwnTypes, TypesThatSaveToArchivesAreSentAsArchives) {
  const int root = size() - 1;
  EXPECT_EQ(broadcast_object(Counter(rank() + 100), root).count(), root + 100);
  const auto all = allgather_object(std::vector<Counter>{Counter(rank()), Counter(-rank())});
  for (int r = 0; r < size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)][1].count(), -r);
  // A struct with a member of such a type.
  struct Progress {
    Counter steps;
    std::string phase;
  };
  const Progress progress = broadcast_object(Progress{Counter(rank()), "warm"}, root);
  EXPECT_EQ(progress.steps.count(), root);
  EXPECT_EQ(progress.phase, "warm");
}

TEST(OwnTypes, AFailingSaveIsAnErrorOnEveryRank) {
  EXPECT_ANY_THROW(broadcast_object(Celsius{rank() == 0 ? -300.0 : 5.0}, 0));
  EXPECT_EQ(broadcast_object(Celsius{1}).degrees, 1001) << "a failed call has left bytes behind";
}

}  // namespace
}  // namespace hvd::testing
