#include "negotiation/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "unit/negotiation/golden.h"

namespace hvd::wire {
namespace {

using golden::from_hex;
using golden::to_hex;
using ::testing::HasSubstr;

constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();

Bytes written(const std::function<void(Writer&)>& write) {
  Writer out;
  write(out);
  return std::move(out).take();
}

std::string failure(std::string_view hex, const std::function<void(Reader&)>& read) {
  const Bytes bytes = from_hex(hex);
  Reader in(bytes);
  try {
    read(in);
  } catch (const WireError& error) {
    return error.what();
  }
  return "(no error)";
}

TEST(Codec, VarintBytes) {
  const std::vector<std::pair<std::uint64_t, std::string>> cases = {
      {0, "00"},
      {1, "01"},
      {127, "7f"},
      {128, "8001"},
      {300, "ac02"},
      {16383, "ff7f"},
      {16384, "808001"},
      {std::uint64_t{1} << 63, "80808080808080808001"},
      {kAny, "ffffffffffffffffff01"}};
  for (const auto& [value, hex] : cases) {
    const Bytes bytes = written([value = value](Writer& out) { out.varint(value); });
    EXPECT_EQ(to_hex(bytes), hex);
    Reader in(bytes);
    EXPECT_EQ(in.varint("n", kAny), value);
    in.expect_end();
  }
}

TEST(Codec, ZigzagBytes) {
  constexpr auto kLow = std::numeric_limits<std::int64_t>::min();
  constexpr auto kHigh = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::pair<std::int64_t, std::string>> cases = {{0, "00"},
                                                                   {-1, "01"},
                                                                   {1, "02"},
                                                                   {-2, "03"},
                                                                   {63, "7e"},
                                                                   {-64, "7f"},
                                                                   {64, "8001"},
                                                                   {kHigh, "feffffffffffffffff01"},
                                                                   {kLow, "ffffffffffffffffff01"}};
  for (const auto& [value, hex] : cases) {
    const Bytes bytes = written([value = value](Writer& out) { out.zigzag(value); });
    EXPECT_EQ(to_hex(bytes), hex) << value;
    Reader in(bytes);
    EXPECT_EQ(in.zigzag("n"), value);
    in.expect_end();
  }
}

TEST(Codec, DoublesAreLittleEndianAndKeepEveryBit) {
  EXPECT_EQ(to_hex(written([](Writer& out) { out.f64(1.0); })), "000000000000f03f");
  for (const double value :
       {0.0, -0.0, 1.0 / 3, -1e300, std::numeric_limits<double>::denorm_min(),
        std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const Bytes bytes = written([value](Writer& out) { out.f64(value); });
    Reader in(bytes);
    const double back = in.f64("x");
    EXPECT_EQ(std::signbit(back), std::signbit(value));
    EXPECT_TRUE(back == value || (std::isnan(back) && std::isnan(value))) << value;
  }
}

TEST(Codec, TextMayHoldAnyByte) {
  const std::string text("a\0\xff z", 5);
  const Bytes bytes = written([&](Writer& out) { out.text(text); });
  EXPECT_EQ(to_hex(bytes), "056100ff207a");
  Reader in(bytes);
  EXPECT_EQ(in.text("t", 5), text);
  in.expect_end();
}

TEST(Codec, ErrorsNameFieldAndPlace) {
  EXPECT_EQ(failure("", [](Reader& in) { in.u8("colour"); }),
            "control message: colour at byte 0 of 0: the message ends early");
  EXPECT_EQ(failure("0203", [](Reader& in) { in.varint("size", 1); }),
            "control message: size at byte 1 of 2: expected at most 1, got 2");
  EXPECT_EQ(failure("01aa", [](Reader& in) { in.u8("x"), in.expect_end(); }),
            "control message: end at byte 1 of 2: 1 bytes too many");
}

TEST(Codec, NumbersOfMoreThan64BitsAreRefused) {
  EXPECT_THAT(failure("ffffffffffffffffff02", [](Reader& in) { in.varint("n", kAny); }),
              HasSubstr("more than 64 bits"));
  EXPECT_THAT(failure("8080808080808080808000", [](Reader& in) { in.varint("n", kAny); }),
              HasSubstr("more than 64 bits"));
  EXPECT_THAT(failure("ffffffff", [](Reader& in) { in.varint("n", kAny); }),
              HasSubstr("ends early"));
}

TEST(Codec, CountsAreBoundedByTheBytesThatAreLeft) {
  EXPECT_THAT(failure("03aabb", [](Reader& in) { in.count("things", 100); }),
              HasSubstr("3 elements announced, 2 bytes left"));
  EXPECT_THAT(failure("03aabbcc", [](Reader& in) { in.count("things", 2); }),
              HasSubstr("expected at most 2, got 3"));
  EXPECT_THAT(failure("05616263", [](Reader& in) { in.text("name", 100); }),
              HasSubstr("name at byte 1 of 4"));
  EXPECT_THAT(failure("00000000000000", [](Reader& in) { in.f64("x"); }), HasSubstr("ends early"));
}

TEST(Codec, RawReadsAvailableBytesOnly) {
  const Bytes bytes = from_hex("010203");
  Reader in(bytes);
  EXPECT_EQ(in.raw("a", 0).size(), 0u);
  EXPECT_EQ(in.raw("b", 2).data(), bytes.data());
  EXPECT_EQ(in.remaining(), 1u);
  EXPECT_THROW(in.raw("c", 2), WireError);
  EXPECT_THROW(in.raw("d", std::numeric_limits<std::size_t>::max()), WireError);
  EXPECT_EQ(in.remaining(), 1u);
}

}  // namespace
}  // namespace hvd::wire
