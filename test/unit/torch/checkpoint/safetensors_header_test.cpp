#include "checkpoint/safetensors_header.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <fstream>
#include <random>
#include <string>
#include <string_view>

#include "checkpoint/safetensors_file.h"
#include "hvd/error.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

// Headers of safetensors files: those that the Python package writes, and hostile ones.

namespace hvd::libtorch::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::string length_of(std::uint64_t bytes) {
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>((bytes >> (8 * i)) & 0xFF);
  return length;
}

std::string file_of(const std::string& header, std::size_t data_bytes) {
  return length_of(header.size()) + header + std::string(data_bytes, '\1');
}

/// The text of the SafetensorsError; otherwise the test fails.
std::string refusal_of(const std::string& file) {
  try {
    SafetensorsHeader::decode(file, "the/file");
  } catch (const SafetensorsError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a SafetensorsError for " << file.substr(0, 200);
  return {};
}

SafetensorsEntry tensor(std::string name, SafetensorsType type, std::vector<std::uint64_t> shape) {
  SafetensorsEntry entry;
  entry.name = std::move(name);
  entry.type = type;
  entry.shape = std::move(shape);
  return entry;
}

// The text is that of safetensors 0.8 for the same tensors.
TEST(SafetensorsHeader, HasTheBytesOfThePythonPackage) {
  SafetensorsHeader header;
  header.metadata = {{"a\"\n\x01\xC3\xA9", "2"}};
  header.tensors = {
      tensor("b", SafetensorsType::kF32, {2, 3}), tensor("a", SafetensorsType::kF32, {}),
      tensor("flag", SafetensorsType::kBool, {3}), tensor("pairs", SafetensorsType::kF4, {2, 6}),
      tensor("none", SafetensorsType::kI64, {0, 3})};
  const std::string json =
      "{\"__metadata__\":{\"a\\\"\\n\\u0001\xC3\xA9\":\"2\"},"
      "\"none\":{\"dtype\":\"I64\",\"shape\":[0,3],\"data_offsets\":[0,0]},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
      "\"pairs\":{\"dtype\":\"F4\",\"shape\":[2,6],\"data_offsets\":[28,34]},"
      "\"flag\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[34,37]}}";
  const std::string encoded = header.encode();
  EXPECT_EQ(encoded.size() % 8, 0U);
  EXPECT_EQ(encoded.substr(8, json.size()), json);
  EXPECT_EQ(encoded.find_first_not_of(' ', 8 + json.size()), std::string::npos);
  EXPECT_EQ(encoded.substr(0, 8), length_of(encoded.size() - 8));
  EXPECT_EQ(header.bytes, encoded.size());

  const auto read = SafetensorsHeader::decode(encoded + std::string(37, '\0'), "f");
  EXPECT_EQ(read.metadata, header.metadata);
  EXPECT_EQ(read.bytes, header.bytes);
  ASSERT_EQ(read.tensors.size(), 5U);
  EXPECT_EQ(read.tensors[2].name, "b");
  EXPECT_THAT(read.tensors[2].shape, ElementsAre(2, 3));
  EXPECT_EQ(read.tensors[3].begin, 28U);
  EXPECT_EQ(read.tensors[3].end, 34U);
  EXPECT_EQ(read.tensors[3].type, SafetensorsType::kF4);
}

TEST(SafetensorsHeader, MayBeEmpty) {
  EXPECT_EQ(SafetensorsHeader().encode(), length_of(8) + "{}      ");
  EXPECT_TRUE(SafetensorsHeader::decode(file_of("{}", 0), "f").tensors.empty());
  EXPECT_THAT(SafetensorsHeader::decode(file_of(R"({"__metadata__":null})", 0), "f").metadata,
              IsEmpty());
  EXPECT_THAT(SafetensorsHeader::decode(file_of(R"({"__metadata__":{"k":"v"}})", 0), "f").metadata,
              ElementsAre(Pair("k", "v")));
}

TEST(SafetensorsHeader, IgnoresMembersThatTheFormatMayGet) {
  const std::string json =
      R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":"x","more":null,"n":-1.5}})";
  EXPECT_EQ(SafetensorsHeader::decode(file_of(json, 1), "f").tensors.size(), 1U);
}

struct Hostile {
  const char* header;
  std::size_t data_bytes;
  const char* complaint;
};

constexpr Hostile kHostile[] = {
    // Texts that do not follow the format.
    {"", 0, "does not begin with '{'"},
    {"[]", 0, "does not begin with '{'"},
    {" {}", 0, "does not begin with '{'"},
    {"{", 0, "not JSON in UTF-8 at byte"},
    {"{} {}", 0, "not JSON in UTF-8 at byte"},
    {R"({"a":})", 0, "not JSON in UTF-8 at byte"},
    {R"({'a':1})", 0, "not JSON in UTF-8 at byte"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},})", 1, "not JSON"},
    {"{\"\xFF\":{}}", 0, "not JSON in UTF-8 at byte"},
    {"{\"\xED\xA0\x80\":{}}", 0, "not JSON in UTF-8 at byte"},
    {R"({"\ud800":{}})", 0, "not JSON in UTF-8 at byte"},
    {R"({"a":1})", 0, "'a': expected an object, got the number 1"},
    {R"({"a":[]})", 0, "'a': expected an object, got an array"},
    {R"({"a":null})", 0, "'a': expected an object, got null"},
    {R"({"__metadata__":"x"})", 0, "'__metadata__': expected an object, got the string 'x'"},
    {R"({"__metadata__":{"k":1}})", 0, "__metadata__: 'k': expected a string, got the number 1"},
    {R"({"__metadata__":{"k":{}}})", 0, "__metadata__: 'k': expected a string, got an object"},
    // Names.
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
     2, "the name 'a' occurs twice"},
    {R"({"__metadata__":{},"__metadata__":{}})", 0, "the name '__metadata__' occurs twice"},
    {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "the name 'k' occurs twice"},
    {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
     "the name 'dtype' occurs twice in tensor 'a'"},
    {R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("\u0062":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
     2, "the name 'b' occurs twice"},
    // Members of a tensor.
    {R"({"a":{}})", 0, "tensor 'a' has no dtype"},
    {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "tensor 'a' has no shape"},
    {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "tensor 'a' has no data_offsets"},
    {R"({"a":{"dtype":"F12","shape":[1],"data_offsets":[0,1]}})", 1,
     "tensor 'a' has the dtype 'F12', which LibTorch does not have"},
    {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "'dtype': expected a string"},
    {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "'shape': expected whole"},
    {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "got the number -1"},
    {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "got the number 1.0"},
    {R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, "got the string '1'"},
    {R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}})", 1,
     "got the number 18446744073709551616"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "data_offsets: expected two"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "data_offsets: expected two"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":{}}})", 1, "got an object"},
    // Depth.
    {R"({"a":{"x":[[[[[[[[]]]]]]]]}})", 0, "got an array"},
    {R"({"a":{"b":{"c":{"d":{}}}}})", 0, "got an object"},
    // Sizes.
    {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}})", 7, "need 8 bytes"},
    {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "need 8 bytes"},
    {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "need another number of bytes"},
    {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
     "need another number of bytes"},
    {R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0,
     "need another number of bytes"},
    {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
     "need another number of bytes"},
    {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})", 0, "begins at byte 1"},
    // Overlaps, holes and the end of the file.
    {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
     3, "tensor 'b' begins at byte 1 of the data, expected 2, so that it overlaps"},
    {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
     2, "so that it overlaps the tensor before it"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
     3, "so that bytes before it belong to no tensor"},
    {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3, "the file is truncated"},
    {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5, "which belong to no tensor"},
    {R"({"a":{"dtype":"U8","shape":[1],)"
     R"("data_offsets":[18446744073709551614,18446744073709551615]}})",
     1, "begins at byte 18446744073709551614"},
    {"{}", 1, "which belong to no tensor"},
};

TEST(SafetensorsHeader, RefusesInvalidHeaders) {
  for (const Hostile& hostile : kHostile) {
    const std::string refusal = refusal_of(file_of(hostile.header, hostile.data_bytes));
    EXPECT_THAT(refusal, HasSubstr("the/file is not a valid safetensors file: ")) << hostile.header;
    EXPECT_THAT(refusal, HasSubstr(hostile.complaint)) << hostile.header;
  }
}

TEST(SafetensorsHeader, RefusesALengthBeyondTheFileOrTheFormat) {
  EXPECT_THAT(refusal_of(""), HasSubstr("it has 0 bytes, expected at least 8"));
  EXPECT_THAT(refusal_of("1234567"), HasSubstr("it has 7 bytes"));
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 7})
    EXPECT_THAT(refusal_of(length_of(length) + "{}"), HasSubstr("its header has "));
  const std::string long_header = "{}" + std::string(SafetensorsHeader::kMaxBytes - 1, ' ');
  EXPECT_THAT(refusal_of(file_of(long_header, 0)), HasSubstr("the format allows 100000000"));
}

// nlohmann's parser takes a zero byte for the end of its input.
TEST(SafetensorsHeader, RefusesBytesBehindAZeroByte) {
  for (const char* const behind : {"", "x", "{}"}) {
    const std::string header = std::string("{}") + '\0' + behind;
    EXPECT_THAT(refusal_of(file_of(header, 0)), HasSubstr("not JSON in UTF-8 at byte 10"));
  }
}

// Neither the parser nor its state grows with the depth.
TEST(SafetensorsHeader, RefusesDepthAtOnce) {
  for (const char* const part : {"[", "{\"a\":"}) {
    std::string deep = "{\"a\":";
    while (deep.size() < 10'000'000) deep += part;
    EXPECT_THAT(refusal_of(file_of(deep, 0)), HasSubstr("expected"));
  }
}

TEST(SafetensorsHeader, ErrorTextsAreShortAndPrintable) {
  const std::string name = "x\\u0007\\n" + std::string(1000, 'y');
  const std::string refusal = refusal_of(file_of("{\"" + name + "\":1}", 0));
  EXPECT_LT(refusal.size(), 300U);
  EXPECT_THAT(refusal, HasSubstr("'x??yyy"));
  EXPECT_THAT(refusal, HasSubstr("...'"));
}

TEST(SafetensorsHeader, RefusesToWriteInvalidHeaders) {
  const auto error_of_names = [](const std::vector<std::string>& names) -> std::string {
    SafetensorsHeader header;
    for (const std::string& name : names)
      header.tensors.push_back(tensor(name, SafetensorsType::kU8, {1}));
    try {
      header.encode();
    } catch (const UsageError& error) {
      return error.what();
    }
    ADD_FAILURE() << "expected a UsageError";
    return {};
  };
  EXPECT_THAT(error_of_names({"a", "a"}), HasSubstr("the name 'a' occurs twice"));
  EXPECT_THAT(error_of_names({"__metadata__"}), HasSubstr("is the format's own"));
  EXPECT_THAT(error_of_names({"\xFF"}), HasSubstr("expected names and metadata in UTF-8"));
}

std::string good_file() {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}};
  header.tensors = {tensor("weight", SafetensorsType::kF32, {2}),
                    tensor("bias", SafetensorsType::kI64, {1})};
  return header.encode() + std::string(16, '\0');
}

TEST(SafetensorsHeader, NoFlippedBitOrCutDoesHarm) {
  const std::string good = good_file();
  for (std::size_t size = 0; size < good.size(); ++size)
    EXPECT_THROW(SafetensorsHeader::decode(good.substr(0, size), "f"), SafetensorsError) << size;
  for (std::size_t bit = 0; bit < (good.size() - 16) * 8; ++bit) {
    std::string flipped = good;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    try {
      // A flip in a name or in metadata gives another valid file.
      const auto header = SafetensorsHeader::decode(flipped, "f");
      EXPECT_EQ(header.tensors.size(), 2U) << bit;
      EXPECT_EQ(header.tensors.back().end, 16U) << bit;
    } catch (const SafetensorsError&) {
    }
  }
}

TEST(MappedSafetensors, NamesAFileThatCannotBeRead) {
  const TemporaryFolder folder;
  const auto error = [](const std::filesystem::path& path) -> std::string {
    try {
      const MappedSafetensors file(path);
    } catch (const SafetensorsError& refused) {
      return refused.what();
    }
    ADD_FAILURE() << "expected a SafetensorsError";
    return {};
  };
  EXPECT_THAT(error(folder.path() / "none"), HasSubstr("none: No such file or directory"));
  EXPECT_THAT(error(folder.path()), HasSubstr("it is a folder; expected a file"));
  ASSERT_EQ(::mkfifo((folder.path() / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error(folder.path() / "pipe"), HasSubstr("it is a pipe or a device"));
  EXPECT_THAT(error("/dev/zero"), HasSubstr("it is a pipe or a device"));
  std::ofstream(folder.path() / "empty").close();
  EXPECT_THAT(error(folder.path() / "empty"), HasSubstr("it has 0 bytes"));
}

TEST(MappedSafetensors, AShortenedFileIsAnErrorBeforeItsBytesAreUsed) {
  const TemporaryFolder folder;
  SafetensorsHeader header;
  header.tensors = {tensor("a", SafetensorsType::kU8, {1 << 20})};
  const std::string start = header.encode();
  std::ofstream(folder.path() / "f", std::ios::binary) << start << std::string(1 << 20, '\1');
  const MappedSafetensors file(folder.path() / "f");
  ASSERT_NE(file.find("a"), nullptr);
  EXPECT_EQ(file.find("b"), nullptr);
  file.load(*file.find("a"));
  EXPECT_EQ(file.bytes(*file.find("a")), std::string(1 << 20, '\1'));
  std::string part(4, '\0');
  file.read(*file.find("a"), (1 << 20) - part.size(), part.size(), part.data());
  EXPECT_EQ(part, "\1\1\1\1");
  std::filesystem::resize_file(folder.path() / "f", start.size() + 4096);
  EXPECT_THROW(file.load(*file.find("a")), SafetensorsError);
  EXPECT_THROW(file.read(*file.find("a"), (1 << 20) - part.size(), part.size(), part.data()),
               SafetensorsError);
}

TEST(MappedSafetensors, ATruthValueIsZeroOrOne) {
  const TemporaryFolder folder;
  SafetensorsHeader header;
  header.tensors = {tensor("flag", SafetensorsType::kBool, {2})};
  std::ofstream(folder.path() / "f", std::ios::binary) << header.encode() << '\1' << '\2';
  const MappedSafetensors file(folder.path() / "f");
  EXPECT_THROW(file.load(*file.find("flag")), SafetensorsError);
}

}  // namespace
}  // namespace hvd::libtorch::testing
