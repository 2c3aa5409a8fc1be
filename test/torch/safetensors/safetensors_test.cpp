#include <fcntl.h>
#include <gmock/gmock.h>
#include <hvd/torch.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "checkpoint/safetensors_save.h"
#include "support/message_of.h"
#include "torch/safetensors/safetensors_support.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

// Writes and reads safetensors files on one process, without init().

namespace hvd::testing {
namespace {

using libtorch::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr torch::ScalarType kTypes[] = {
    torch::kByte,         torch::kChar,         torch::kShort,       torch::kInt,
    torch::kLong,         torch::kUInt16,       torch::kUInt32,      torch::kUInt64,
    torch::kBool,         torch::kHalf,         torch::kBFloat16,    torch::kFloat,
    torch::kDouble,       torch::kComplexFloat, torch::kFloat8_e5m2, torch::kFloat8_e4m3fn,
    at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz, at::kFloat8_e8m0fnu, at::kFloat4_e2m1fn_x2};

/// Bytes 0, 1, 0, 1, ..., which are values of every type.
torch::Tensor pattern(at::IntArrayRef shape, torch::ScalarType type) {
  torch::Tensor tensor = torch::empty(shape, type);
  auto* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) bytes[i] = static_cast<char>(i % 2);
  return tensor;
}

std::string bytes_in(const torch::Tensor& tensor) {
  const torch::Tensor bits = libtorch::bits_of(tensor).contiguous();
  return {static_cast<const char*>(bits.const_data_ptr()), bits.nbytes()};
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Safetensors, EveryDtypeAndShapeComesBackBitForBit) {
  const TemporaryFolder folder;
  std::vector<StateDict::value_type> tensors;
  for (const torch::ScalarType type : kTypes) {
    const std::string name = c10::toString(type);
    tensors.emplace_back(name, pattern({3, 4}, type));
    tensors.emplace_back(name + ".empty", pattern({2, 0, 3}, type));
    if (type != at::kFloat4_e2m1fn_x2) tensors.emplace_back(name + ".scalar", pattern({}, type));
    if (type != at::kFloat4_e2m1fn_x2)
      tensors.emplace_back(name + ".transposed", pattern({5, 3}, type).t());
  }
  save_safetensors(tensors, folder.path() / "f");
  const auto read = load_safetensors(folder.path() / "f");
  EXPECT_EQ(read.size(), tensors.size());
  const SafetensorsFile file(folder.path() / "f");
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(read.contains(name)) << name;
    for (const torch::Tensor& other : {read.at(name), file.tensor(name)}) {
      EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
      EXPECT_EQ(other.sizes(), tensor.sizes()) << name;
      EXPECT_TRUE(other.is_contiguous()) << name;
      EXPECT_EQ(bytes_in(other), bytes_in(tensor)) << name;
    }
  }

  // Loads the same into existing tensors of any strides.
  std::vector<StateDict::value_type> targets;
  for (const auto& [name, tensor] : tensors) targets.emplace_back(name, torch::empty_like(tensor));
  const auto result = load_safetensors(targets, folder.path() / "f");
  EXPECT_THAT(result.missing, IsEmpty());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_EQ(bytes_in(targets[i].second), bytes_in(tensors[i].second)) << tensors[i].first;
}

TEST(Safetensors, ConjugateAndNegativeViewsHaveTheirValues) {
  const TemporaryFolder folder;
  const torch::Tensor value = torch::view_as_complex(torch::randn({4, 2}));
  save_safetensors({{"conj", value.conj()}, {"imag", torch::imag(value.conj())}},
                   folder.path() / "f");
  const auto read = load_safetensors(folder.path() / "f");
  EXPECT_TRUE(read.at("conj").equal(value.conj()));
  EXPECT_TRUE(read.at("imag").equal(-torch::imag(value)));
  const torch::Tensor target = torch::zeros({4}, torch::kComplexFloat);
  load_safetensors({{"conj", target.conj()}}, folder.path() / "f", {.strict = false});
  EXPECT_TRUE(target.conj().equal(value.conj()));
}

TEST(Safetensors, ADtypeThatTheFormatDoesNotHaveIsRefused) {
  const TemporaryFolder folder;
  for (const torch::ScalarType type : {torch::kComplexDouble, torch::kComplexHalf}) {
    EXPECT_THAT(message_of<UsageError>([&] {
                  save_safetensors({{"x", torch::zeros({2}, type)}}, folder.path() / "f");
                }),
                HasSubstr("tensor 'x' has the dtype Complex"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "f"));
}

TEST(Safetensors, AModuleHasPythonsNamesAndKeepsItsTensors) {
  const TemporaryFolder folder;
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4),
                            torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(false)));
  save_safetensors(net, folder.path() / "f", {.metadata = {{"epoch", "3"}}});
  const SafetensorsFile file(folder.path() / "f");
  auto names = file.names();
  std::sort(names.begin(), names.end());
  EXPECT_THAT(names, ElementsAre("0.bias", "0.weight", "1.bias", "1.num_batches_tracked",
                                 "1.running_mean", "1.running_var", "1.weight", "2.weight"));
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("epoch", "3")));

  const torch::Tensor weight = net[0]->named_parameters()["weight"];
  const torch::Tensor before = weight.detach().clone();
  const void* const memory = weight.const_data_ptr();
  const auto version = weight._version();
  {
    const torch::NoGradGuard no_grad;
    weight.zero_();
  }
  load_safetensors(net, folder.path() / "f");
  EXPECT_TRUE(weight.equal(before));
  EXPECT_EQ(weight.const_data_ptr(), memory);
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(weight.is_leaf());
  EXPECT_GT(weight._version(), version + 1);
}

TEST(Safetensors, ReadsFromMapsListsAndSharedPointers) {
  const TemporaryFolder folder;
  const torch::Tensor a = torch::randn({2}), b = torch::randn({3});
  const std::map<std::string, torch::Tensor> map{{"a", a}, {"b", b}};
  NamedParameters dict;
  dict.insert("a", a);
  dict.insert("b", b);
  save_safetensors(map, folder.path() / "map");
  save_safetensors(dict, folder.path() / "dict");
  save_safetensors({{"b", b}, {"a", a}}, folder.path() / "list", {.durable = false});
  EXPECT_EQ(contents(folder.path() / "map"), contents(folder.path() / "dict"));
  EXPECT_EQ(contents(folder.path() / "map"), contents(folder.path() / "list"));
  const auto linear = std::make_shared<torch::nn::LinearImpl>(2, 2);
  save_safetensors(linear, folder.path() / "linear");
  EXPECT_THAT(SafetensorsFile(folder.path() / "linear").names(), ElementsAre("bias", "weight"));
  EXPECT_THAT(message_of<UsageError>([&] {
                save_safetensors(std::shared_ptr<torch::nn::LinearImpl>(), folder.path() / "f");
              }),
              HasSubstr("is null"));
}

TEST(Safetensors, TiedWeightsAreStoredOnceWithTheirNames) {
  const TemporaryFolder folder;
  Tied tied;
  save_safetensors(tied, folder.path() / "f");
  const SafetensorsFile file(folder.path() / "f");
  EXPECT_THAT(file.names(), ElementsAre("decoder.bias", "decoder.weight"));
  EXPECT_THAT(file.metadata(),
              ElementsAre(Pair("encoder.weight", "decoder.weight"), Pair("format", "pt")));

  Tied other;
  EXPECT_THAT(load_safetensors(other, folder.path() / "f").missing, IsEmpty());
  EXPECT_TRUE(other->encoder->weight.equal(tied->encoder->weight));
  EXPECT_EQ(other->encoder->weight.const_data_ptr(), other->decoder->weight.const_data_ptr());

  // A module without ties loads the one tensor under both names.
  torch::nn::Linear decoder(4, 6);
  torch::nn::Embedding encoder(6, 4);
  load_safetensors({{"encoder.weight", encoder->weight},
                    {"decoder.weight", decoder->weight},
                    {"decoder.bias", decoder->bias}},
                   folder.path() / "f");
  EXPECT_TRUE(encoder->weight.equal(tied->encoder->weight));
  EXPECT_TRUE(decoder->weight.equal(tied->encoder->weight));

  // A file that stores both names fits if the values are equal.
  const torch::Tensor weight = torch::randn({6, 4}), bias = torch::randn({6});
  save_safetensors(
      {{"encoder.weight", weight}, {"decoder.weight", weight.clone()}, {"decoder.bias", bias}},
      folder.path() / "both");
  load_safetensors(tied, folder.path() / "both");
  EXPECT_TRUE(tied->decoder->weight.equal(weight));
  save_safetensors(
      {{"encoder.weight", weight + 1}, {"decoder.weight", weight}, {"decoder.bias", bias + 1}},
      folder.path() / "different");
  EXPECT_THAT(
      message_of<SafetensorsError>([&] { load_safetensors(tied, folder.path() / "different"); }),
      HasSubstr("has different values for"));
  EXPECT_TRUE(tied->decoder->bias.equal(bias));  // unchanged
}

TEST(Safetensors, OverlappingTensorsAreStoredSeparately) {
  const TemporaryFolder folder;
  const torch::Tensor all = torch::arange(6);
  save_safetensors(
      {{"all", all}, {"part", all.slice(0, 2, 4)}, {"every second", all.slice(0, 0, 6, 2)}},
      folder.path() / "f");
  const auto read = load_safetensors(folder.path() / "f");
  EXPECT_TRUE(read.at("all").equal(all));
  EXPECT_TRUE(read.at("part").equal(all.slice(0, 2, 4)));
  EXPECT_TRUE(read.at("every second").equal(all.slice(0, 0, 6, 2)));
}

TEST(Safetensors, AStrictLoadNamesAllDifferencesAndChangesNothing) {
  const TemporaryFolder folder;
  const torch::Tensor a = torch::ones({2}), b = torch::ones({2, 2}), c = torch::ones({3});
  save_safetensors({{"a", a * 5}, {"b", torch::zeros({4})}, {"d", c}}, folder.path() / "f");
  const std::string error = message_of<SafetensorsError>(
      [&] { load_safetensors({{"a", a}, {"b", b}, {"c", c}}, folder.path() / "f"); });
  EXPECT_THAT(error, HasSubstr("missing in the file: 'c'"));
  EXPECT_THAT(error, HasSubstr("unexpected in the file: 'd'"));
  EXPECT_THAT(error, HasSubstr("'b': expected Float [2,2], the file has Float [4]"));
  EXPECT_TRUE(a.equal(torch::ones({2})));

  const auto result =
      load_safetensors({{"a", a}, {"b", b}, {"c", c}}, folder.path() / "f", {.strict = false});
  EXPECT_THAT(result.missing, ElementsAre("c"));
  EXPECT_THAT(result.unexpected, ElementsAre("d"));
  EXPECT_THAT(result.mismatched, ElementsAre("b"));
  EXPECT_TRUE(a.equal(torch::full({2}, 5)));
  EXPECT_TRUE(b.equal(torch::ones({2, 2})));
  EXPECT_THAT(message_of<SafetensorsError>(
                  [&] { load_safetensors({{"x", c}}, folder.path() / "f", {.strict = false}); }),
              HasSubstr("no tensor fits"));
}

TEST(Safetensors, LongListsOfDifferencesAreCut) {
  const TemporaryFolder folder;
  std::vector<StateDict::value_type> many;
  for (int i = 0; i < 1000; ++i) many.emplace_back("tensor" + std::to_string(i), torch::zeros({1}));
  save_safetensors({{"a", torch::zeros({1})}}, folder.path() / "f");
  const std::string error =
      message_of<SafetensorsError>([&] { load_safetensors(many, folder.path() / "f"); });
  EXPECT_THAT(error, HasSubstr("and 980 more"));
  EXPECT_LT(error.size(), 1000U);
}

TEST(Safetensors, ValuesAreConvertedUnlessThatIsRefused) {
  const TemporaryFolder folder;
  const torch::Tensor stored = torch::randn({8}).to(torch::kBFloat16);
  save_safetensors({{"x", stored}}, folder.path() / "f");
  const torch::Tensor single = torch::zeros({8}), whole = torch::zeros({8}, torch::kLong);
  load_safetensors({{"x", single}}, folder.path() / "f");
  EXPECT_TRUE(single.equal(stored.to(torch::kFloat)));
  EXPECT_THAT(message_of<SafetensorsError>([&] {
                load_safetensors({{"x", single}}, folder.path() / "f", {.convert_dtype = false});
              }),
              HasSubstr("'x': expected Float [8], the file has BFloat16 [8]"));
  EXPECT_THAT(
      message_of<SafetensorsError>([&] { load_safetensors({{"x", whole}}, folder.path() / "f"); }),
      HasSubstr("'x': expected Long [8], the file has BFloat16 [8]"));
}

TEST(Safetensors, NamesCanBeMapped) {
  const TemporaryFolder folder;
  torch::nn::Linear from(2, 3), to(2, 3);
  save_safetensors({{"model.fc.weight", from->weight}, {"model.fc.bias", from->bias}},
                   folder.path() / "f");
  load_safetensors(to, folder.path() / "f",
                   {.name_in_file = [](const std::string& name) { return "model.fc." + name; }});
  EXPECT_TRUE(to->weight.equal(from->weight));
}

TEST(Safetensors, TensorsThatCannotBeLoadedOrStoredAreRefused) {
  const TemporaryFolder folder;
  const torch::Tensor good = torch::ones({2});
  save_safetensors({{"x", good}}, folder.path() / "f");
  const auto saves = [&](const StateDict& tensors) {
    return message_of<UsageError>([&] { save_safetensors(tensors, folder.path() / "g"); });
  };
  EXPECT_THAT(saves({{"x", torch::Tensor()}}), HasSubstr("tensor 'x': expected a dense tensor"));
  EXPECT_THAT(saves({{"x", good.to_sparse()}}), HasSubstr("use to_dense()"));
  EXPECT_THAT(saves({{"x", torch::zeros({2}, torch::kMeta)}}), HasSubstr("meta device"));
  EXPECT_THAT(saves({{"x", good}, {"x", torch::ones({3})}}), HasSubstr("'x' occurs twice"));
  EXPECT_THAT(saves({{"__metadata__", good}}), HasSubstr("the format's own"));
  EXPECT_THAT(saves({{"x\xFF", good}}), HasSubstr("UTF-8"));
  EXPECT_THAT(message_of<UsageError>([&] {
                load_safetensors({{"x", torch::zeros({1}).expand({2})}}, folder.path() / "f");
              }),
              HasSubstr("share memory"));
  EXPECT_THAT(message_of<UsageError>(
                  [&] { load_safetensors({{"x", good}, {"x", good}}, folder.path() / "f"); }),
              HasSubstr("occurs twice"));
  EXPECT_THAT(
      message_of<SafetensorsError>([&] { SafetensorsFile(folder.path() / "f").tensor("y"); }),
      HasSubstr("has no tensor 'y'"));
}

TEST(Safetensors, WritingToAViewOfTheFileDoesNotChangeIt) {
  const TemporaryFolder folder;
  save_safetensors({{"x", torch::ones({2000})}}, folder.path() / "f");
  const std::string before = contents(folder.path() / "f");
  torch::Tensor view;
  {
    const SafetensorsFile file(folder.path() / "f");
    view = file.tensor("x");
  }
  view.add_(1);
  EXPECT_TRUE(view.equal(torch::full({2000}, 2)));
  EXPECT_EQ(contents(folder.path() / "f"), before);
}

TEST(Safetensors, TensorsAtOddAddressesAreRead) {
  const TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  std::ofstream(folder.path() / "f", std::ios::binary)
      << length << header << '\7' << std::string("\0\0\x80\x3F", 4);
  EXPECT_TRUE(load_safetensors(folder.path() / "f").at("b").equal(torch::ones({1})));
  EXPECT_TRUE(SafetensorsFile(folder.path() / "f").tensor("b").equal(torch::ones({1})));
  const torch::Tensor target = torch::zeros({1}, torch::kDouble);
  load_safetensors({{"a", torch::zeros({1}, torch::kByte)}, {"b", target}}, folder.path() / "f");
  EXPECT_EQ(target.item<double>(), 1);
}

TEST(Safetensors, AFailedWriteLeavesTheOldFile) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "f";
  save_safetensors({{"x", torch::ones({100})}}, path);
  const std::string before = contents(path);
  for (const char* const failing : {"open", "write", "fsync", "close", "rename"}) {
    libtorch::testing::WatchedCalls calls;
    calls.before = [&](const std::string& call, const std::string&) {
      return call == failing ? ENOSPC : 0;
    };
    EXPECT_THAT(message_of<SafetensorsError>([&] {
                  libtorch::save_safetensors_to(path, {{"x", torch::zeros({100})}}, {}, calls);
                }),
                HasSubstr("No space left on device"))
        << failing;
    EXPECT_EQ(contents(path), before) << failing;
    EXPECT_FALSE(std::filesystem::exists(path.string() + ".partial")) << failing;
  }
  libtorch::testing::WatchedCalls calls;
  std::vector<std::string> made;
  calls.before = [&](const std::string& call, const std::string&) {
    made.push_back(call);
    return 0;
  };
  libtorch::save_safetensors_to(path, {{"x", torch::zeros({100})}}, {}, calls);
  EXPECT_THAT(made, ElementsAre("open", "write", "write", "fsync", "close", "rename", "open",
                                "fsync", "close"));
  made.clear();
  libtorch::save_safetensors_to(path, {{"x", torch::zeros({100})}}, {.durable = false}, calls);
  EXPECT_THAT(made, ElementsAre("open", "write", "write", "close", "rename"));
}

TEST(Safetensors, AFolderThatDoesNotExistIsNamed) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<SafetensorsError>([&] {
                save_safetensors({{"x", torch::ones({1})}}, folder.path() / "none" / "f");
              }),
              HasSubstr("is not a folder; create it first"));
  EXPECT_THAT(message_of<SafetensorsError>(
                  [&] { save_safetensors({{"x", torch::ones({1})}}, folder.path()); }),
              HasSubstr("it is a folder"));
}

// Every hostile file of the unit test has an error in its header. Here the error is behind the
// header.
TEST(Safetensors, AHostileFileChangesNothing) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "f";
  const torch::Tensor x = torch::ones({4}), flag = torch::zeros({2}, torch::kBool);
  save_safetensors({{"x", torch::zeros({4})}, {"flag", flag}}, path);
  const std::string good = contents(path);
  const StateDict targets{{"x", x}, {"flag", flag}};
  for (std::size_t size = 0; size < good.size(); ++size) {
    std::ofstream(path, std::ios::binary) << good.substr(0, size);
    EXPECT_THROW(load_safetensors(targets, path), SafetensorsError) << size;
    EXPECT_TRUE(x.equal(torch::ones({4}))) << size;
  }
  std::ofstream(path, std::ios::binary) << good.substr(0, good.size() - 1) << '\2';
  EXPECT_THAT(message_of<SafetensorsError>([&] { load_safetensors(targets, path); }),
              HasSubstr("neither 0 nor 1"));
  EXPECT_TRUE(x.equal(torch::ones({4})));
}

}  // namespace
}  // namespace hvd::testing
