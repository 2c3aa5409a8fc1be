#include "negotiation/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "unit/negotiation/golden.h"

namespace hvd::wire {
namespace {

using golden::from_hex;
using golden::to_hex;
using ::testing::HasSubstr;

std::string failure(const Bytes& bytes) {
  try {
    decode(bytes);
  } catch (const WireError& error) {
    return error.what();
  }
  return "(no error)";
}

using golden::make_report;
using golden::RankReport;

Report round_trip(const Report& report) { return std::get<Report>(decode(encode(report))); }
Plan round_trip(const Plan& plan) { return std::get<Plan>(decode(encode(plan))); }

Report with(Request request) { return make_report({.requests = {std::move(request)}}); }
Request round_trip(const Request& request) {
  return golden::rank_report(round_trip(with(request))).requests.at(0);
}

TEST(Messages, GoldenBytes) {
  for (const auto& [name, message, hex] : golden::messages()) {
    EXPECT_EQ(to_hex(golden::encode(message)), to_hex(from_hex(hex))) << name;
  }
}

TEST(Messages, GoldenBytesDecodeToTheMessage) {
  for (const auto& [name, message, hex] : golden::messages()) {
    SCOPED_TRACE(name);
    const AnyMessage decoded = decode(from_hex(hex));
    ASSERT_EQ(decoded.index(), message.index());
    if (const auto* report = std::get_if<Report>(&message)) {
      EXPECT_EQ(std::get<Report>(decoded), *report);
    }
    if (const auto* plan = std::get_if<Plan>(&message)) {
      EXPECT_EQ(std::get<Plan>(decoded), *plan);
    }
    if (const auto* update = std::get_if<ReplayUpdate>(&message)) {
      EXPECT_EQ(std::get<ReplayUpdate>(decoded), *update);
    }
    if (const auto* question = std::get_if<WaitQuestion>(&message)) {
      EXPECT_EQ(std::get<WaitQuestion>(decoded), *question);
    }
    if (const auto* probe = std::get_if<WaitProbe>(&message)) {
      EXPECT_EQ(std::get<WaitProbe>(decoded), *probe);
    }
    if (const auto* reply = std::get_if<WaitReply>(&message)) {
      EXPECT_EQ(std::get<WaitReply>(decoded), *reply);
    }
    if (const auto* answer = std::get_if<WaitAnswer>(&message)) {
      EXPECT_EQ(std::get<WaitAnswer>(decoded), *answer);
    }
    if (const auto* blocked = std::get_if<Blocked>(&message)) {
      EXPECT_EQ(std::get<Blocked>(decoded), *blocked);
    }
    if (const auto* left = std::get_if<ReplayLeft>(&message)) {
      EXPECT_EQ(std::get<ReplayLeft>(decoded), *left);
    }
    if (const auto* abort = std::get_if<Abort>(&message)) {
      EXPECT_EQ(std::get<Abort>(decoded).origin, abort->origin);
      EXPECT_EQ(std::get<Abort>(decoded).cause.code, abort->cause.code);
      EXPECT_EQ(std::get<Abort>(decoded).cause.message, abort->cause.message);
      EXPECT_EQ(std::get<Abort>(decoded).cause.rank, abort->cause.rank);
    }
  }
}

TEST(Messages, EveryProperPrefixIsRefused) {
  for (const auto& [name, message, hex] : golden::messages()) {
    const Bytes bytes = from_hex(hex);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const Bytes prefix(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_THROW(decode(prefix), WireError) << name << " cut to " << size;
    }
    Bytes longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_THAT(failure(longer), HasSubstr("1 bytes too many")) << name;
  }
}

// A damaged message that decodes must at least be one that the encoder could have written, so that
// it can be forwarded.
TEST(Messages, EverySingleBitFlipDecodesOrIsRefused) {
  int refused = 0;
  for (const auto& [name, message, hex] : golden::messages()) {
    const Bytes bytes = from_hex(hex);
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      Bytes damaged = bytes;
      damaged[bit / 8] ^= std::byte{1} << (bit % 8);
      try {
        const Bytes again = golden::encode(decode(damaged));
        EXPECT_EQ(to_hex(golden::encode(decode(again))), to_hex(again)) << name << ", bit " << bit;
      } catch (const WireError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(Messages, MagicVersionAndKindErrorsAreReadable) {
  EXPECT_EQ(failure(from_hex("690104")),
            "control message: magic at byte 1 of 3: expected 104, got 105");
  EXPECT_EQ(failure(from_hex("68 01 04")),
            "control message: version at byte 2 of 3: this rank speaks version 2, got 1; run the "
            "same hvd on every rank");
  EXPECT_EQ(failure(from_hex("680209")),
            "control message: message kind at byte 3 of 3: unknown, got 9");
  EXPECT_EQ(failure(from_hex("680200")),
            "control message: message kind at byte 3 of 3: unknown, got 0");
}

TEST(Messages, NumbersOnTheWireArePinned) {
  EXPECT_EQ(static_cast<int>(MessageKind::kReport), 1);
  EXPECT_EQ(static_cast<int>(MessageKind::kPong), 5);
  EXPECT_EQ(static_cast<int>(OpKind::kAllgather), 1);
  EXPECT_EQ(static_cast<int>(OpKind::kBroadcast), 2);
  EXPECT_EQ(static_cast<int>(OpKind::kRemoveProcessSet), 9);
  EXPECT_EQ(static_cast<int>(OpKind::kReduce), 10);
  EXPECT_EQ(static_cast<int>(OpKind::kScatter), kOpKindCount - 1);
  EXPECT_EQ(static_cast<int>(ReduceOp::kSum), 1);
  EXPECT_EQ(static_cast<int>(ReduceOp::kAdasum), 5);
  EXPECT_EQ(static_cast<int>(ReduceOp::kBitAnd), 6);
  EXPECT_EQ(static_cast<int>(ReduceOp::kBitXor), 8);
  EXPECT_EQ(static_cast<int>(ReduceOp::kAverageOfSet), kReduceOpCount - 1);
  EXPECT_EQ(static_cast<int>(DataType::kFloat16), 6);
  EXPECT_EQ(static_cast<int>(DataType::kFloat64), kDataTypeCount - 1);
  EXPECT_EQ(static_cast<int>(Compression::kFloat16), 1);
  EXPECT_EQ(static_cast<int>(Compression::kBFloat16), kCompressionCount - 1);
  EXPECT_EQ(static_cast<int>(StatusCode::kMismatch), 2);
  EXPECT_EQ(static_cast<int>(StatusCode::kInternal), kStatusCodeCount - 1);
}

TEST(Messages, DefaultsTakeNoRoomAndComeBack) {
  Request request;
  request.name = "a";
  EXPECT_EQ(round_trip(request), request);
  request.root = 3;
  request.prescale = 0.25;
  EXPECT_EQ(round_trip(request), request);
  request.postscale = 4;
  request.group = "g";
  request.group_size = 2;
  EXPECT_EQ(round_trip(request), request);
}

TEST(Messages, AReportShowsWhetherARankHasCalledShutdownOrEndsWithout) {
  EXPECT_EQ(to_hex(encode(make_report({.rank = 3}))), to_hex(from_hex("680201 08 03 00")));
  const Report leaving = make_report({.rank = 3, .shutdown = true});
  EXPECT_EQ(to_hex(encode(leaving)), to_hex(from_hex("680201 0a 03 00")));
  const Report ended = make_report({.rank = 3, .shutdown = true, .ended = true});
  EXPECT_EQ(to_hex(encode(ended)), to_hex(from_hex("680201 0e 03 00")));
  EXPECT_EQ(round_trip(ended), ended);
  EXPECT_THAT(failure(from_hex("680201 0c 03 00")), HasSubstr("not among the leaving"));
  EXPECT_THAT(failure(from_hex("680201 20")), HasSubstr("unknown flag, got 32"));
  Report merged;
  merged.leaving = RankSet(3, 5);
  EXPECT_EQ(round_trip(merged), merged);
  merged.ended = RankSet(4);
  EXPECT_EQ(round_trip(merged), merged);
  merged.ended = RankSet(6);
  EXPECT_THAT(failure(encode(merged)), HasSubstr("not among the leaving"));
}

TEST(Messages, CompressionIsOfAnAllreduceOfFloat32) {
  Request request;
  request.name = "a";
  EXPECT_EQ(request.wire_dtype(), DataType::kFloat32);
  request.compression = Compression::kFloat16;
  request.group = "g";
  request.group_size = 2;
  request.new_set = {1};
  const Request back = round_trip(request);
  EXPECT_EQ(back, request);
  EXPECT_EQ(back.wire_dtype(), DataType::kFloat16);
  request.compression = Compression::kBFloat16;
  EXPECT_EQ(round_trip(request).wire_dtype(), DataType::kBFloat16);
  for (const std::uint8_t number : {0, 3}) {
    Bytes bytes = encode(with(request));
    bytes.back() = std::byte{number};
    EXPECT_THAT(failure(bytes), HasSubstr("compression at byte")) << int{number};
  }
  request.dtype = DataType::kFloat64;
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("not of an allreduce of float32"));
  request.dtype = DataType::kFloat32;
  request.kind = OpKind::kReducescatter;
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("not of an allreduce of float32"));
}

TEST(Messages, SlotsTravelAsBits) {
  const auto report = [](std::vector<std::uint32_t> slots) {
    return make_report({.cached = std::move(slots)});
  };
  const Report some = report({0, 1, 2, 3, 4, 5, 6, 7, 8, 160});
  EXPECT_EQ(to_hex(encode(some)), to_hex(from_hex("680201 18 00 00 01 01 00 15 ff01" +
                                                  std::string(36, '0') + "01 00 00")));
  EXPECT_EQ(round_trip(some), some);
  // 161 cached tensors, a ResNet-50, take 21 bytes.
  std::vector<std::uint32_t> slots(161);
  std::iota(slots.begin(), slots.end(), 0);
  EXPECT_EQ(encode(report(slots)).size(), 3u + 7 + 21 + 2);
  EXPECT_EQ(round_trip(report(slots)), report(slots));
  const Report highest = report({static_cast<std::uint32_t>(kMaxSlots - 1)});
  EXPECT_EQ(round_trip(highest), highest);
}

TEST(Messages, TheHighestSlotHasAPlaceInAPlan) {
  Plan plan;
  plan.batches = {Batch{{SlotUse{static_cast<std::uint32_t>(kMaxSlots - 1),
                                 std::numeric_limits<std::uint64_t>::max()}}},
                  Batch{}};
  EXPECT_EQ(round_trip(plan), plan);
}

// A merged report may mix the stamps of many reports.
TEST(Messages, StampsOfAnyReportComeBackAndNeighboursTakeOneByteEach) {
  const auto asks = [](std::uint64_t number, int requests) {
    RankReport report{.number = number};
    for (int i = 0; i < requests; ++i) report.requests.push_back(golden::bias());
    return make_report(report);
  };
  const std::size_t request = encode(golden::bias()).size();
  EXPECT_EQ(encode(asks(1, 9)).size(), encode(asks(1, 1)).size() + 8 * (request + 1));
  EXPECT_EQ(encode(asks(100, 9)).size(), encode(asks(1, 9)).size());
  Report mixed = asks(kHighestReportNumber, 3);
  Report::Group& group = mixed.sections[0].groups[0];
  group.requests[1].stamp = 0;
  group.hits = {{7, SlotSet({1})}, {kHighestReportNumber, SlotSet({2})}};
  group.unnamed_hits = {{std::numeric_limits<Stamp>::max(), {3, 4}}, {5, {6, 7}}};
  EXPECT_EQ(round_trip(mixed), mixed);
}

TEST(Messages, LimitsAreEnforced) {
  Request request;
  request.name = std::string(kMaxNameBytes, 'x');
  EXPECT_EQ(round_trip(request), request);
  request.name += 'x';
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("name at byte"));

  request.name = "x";
  request.shape.assign(kMaxDims, 1);
  EXPECT_EQ(round_trip(request), request);
  request.shape.push_back(1);
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("shape at byte"));

  request.shape = {std::int64_t{1} << 61};  // float32: 2^63 bytes
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("more than 2^63 bytes"));
  request.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("more than 2^63 elements"));
  request.shape = {-1};
  EXPECT_THAT(failure(encode(with(request))), HasSubstr("shape at byte"));
}

TEST(Messages, LongErrorTextsAreCutRatherThanRefused) {
  Plan plan;
  plan.errors.push_back(
      {0, "a", StatusCode::kStalled, std::string(kMaxTextBytes + 5, 'm'), -1, {}});
  EXPECT_EQ(round_trip(plan).errors.front().message.size(), kMaxTextBytes);
  const Abort abort{0, {StatusCode::kInternal, std::string(kMaxTextBytes + 5, 'm'), -1}};
  EXPECT_EQ(std::get<Abort>(decode(encode(abort))).cause.message.size(), kMaxTextBytes);
}

TEST(Messages, OutOfRangeValuesAreRefused) {
  // The second golden request's fields, one wrong at a time.
  const auto request = [](const std::string& fields) {
    return from_hex("680201 18 00 00 01 00 00 01 00" + fields);
  };
  EXPECT_EQ(failure(request("00 0161 00 01 08 00 00 01 05")), "(no error)");
  EXPECT_THAT(failure(request("80 0161 00 01 08 00 00 01 05")),
              HasSubstr("in sequence, but named, got 128"));
  EXPECT_THAT(failure(request("00 0161 0c 01 08 00 00 01 05")), HasSubstr("kind at byte"));
  EXPECT_THAT(failure(request("00 0161 00 0a 08 00 00 01 05")), HasSubstr("op at byte"));
  EXPECT_THAT(failure(request("00 0161 00 01 0a 00 00 01 05")), HasSubstr("dtype at byte"));
  EXPECT_THAT(failure(request("00 0161 00 01 08 02 00 01 05")), HasSubstr("device at byte"));
  EXPECT_THAT(failure(request("00 0161 00 01 08 00 8080808008 01 05")),
              HasSubstr("process set at byte"));
  EXPECT_THAT(failure(request("02 0161 00 01 08 00 00 01 05 0167 02 02")),
              HasSubstr("not below the group size"));
  EXPECT_THAT(failure(request("02 0161 00 01 08 00 00 01 05 0167 00 00")),
              HasSubstr("not below the group size"));
  EXPECT_THAT(failure(request("12 03 00 01 08 00 00 01 05 00 05 04")),
              HasSubstr("above the ordinal"));
  EXPECT_THAT(failure(from_hex("680202 01 08 00 00")), HasSubstr("plan flags at byte"));
  EXPECT_THAT(failure(from_hex("680203 00 07 00 00")), HasSubstr("status at byte"));
  EXPECT_THAT(failure(from_hex("680203 00 04 00 03")), HasSubstr("rank at byte"));
}

// Such a failure would end operations successfully, although no data was moved.
TEST(Messages, AFailureWithTheStatusOkIsRefused) {
  Plan plan;
  plan.errors.push_back({0, "a", StatusCode::kOk, "text", -1, {}});
  EXPECT_THAT(failure(encode(plan)), HasSubstr("status at byte 11 of 18: expected a failure"));
  EXPECT_THAT(failure(encode(Abort{0, {StatusCode::kOk, "text", -1}})),
              HasSubstr("status at byte 5 of 11: expected a failure, got 0 (ok)"));
}

TEST(Messages, ForgedCountsDoNotAllocate) {
  // Each message announces up to a million elements in a few bytes.
  for (const char* const hex :
       {"680201 00 808040", "680201 00 01 05 808040", "680201 00 00 808040",
        "680201 00 00 01 00 808040", "680201 18 00 00 01 808040", "680201 18 00 00 01 01 00 808008",
        "680201 18 00 00 01 00 808040", "680201 18 00 00 01 00 00 808040", "680202 01 00 808040",
        "680202 01 00 01 808040", "680202 01 00 00 808040",
        "680201 18 00 00 01 00 00 01 00 00 ff1f", "680203 00 01 808004",
        "680202 01 00 01 01 00 00 0161 00 01 08 00 00 01 05 808040",
        "680202 01 00 00 01 00 0161 02 00 01 808040", "680202 01 02 01 00 808040",
        "680201 18 00 00 01 00 00 01 00 08 0161 00 01 08 00 00 01 05 808040"}) {
    EXPECT_THAT(failure(from_hex(hex)), HasSubstr("announced")) << hex;
  }
}

TEST(Messages, AbsentRanksFollowEachBatchOfAPlanThatHasSome) {
  Plan plan;
  plan.sequence = 3;
  plan.batches = {{{SlotUse{1}}, {2, 5}}, {{SlotUse{0}}, {}}};
  EXPECT_EQ(encode(plan), from_hex("680202 03 02 02 01 0200 020205 01 0100 00 00"));
  EXPECT_EQ(std::get<Plan>(decode(encode(plan))), plan);
}

TEST(Messages, TheScheduleToRepeatEndsAPlan) {
  Plan plan;
  plan.sequence = 5;
  const std::size_t without = encode(plan).size();
  plan.replay = {{{3, 1}, {0}}, {{2}}};
  EXPECT_EQ(encode(plan).size(), without + 10)
      << "a count for the plan, each bundle and each batch";
  EXPECT_EQ(std::get<Plan>(decode(encode(plan))), plan);
  Bytes cut = encode(plan);
  cut.pop_back();
  EXPECT_THROW(decode(cut), WireError);
}

TEST(Messages, AnOperationThatRunsAloneIsMarked) {
  Request request = golden::bias();
  const std::size_t without = encode(request).size();
  request.alone = true;
  EXPECT_EQ(encode(request).size(), without);
  EXPECT_EQ(round_trip(request), request);
}

TEST(Messages, NamesInSequenceDoNotDependOnTheKind) {
  Request request;
  request.unnamed = request.in_sequence = true;
  request.ordinal = 7;
  request.group_size = 3;
  request.group_index = 2;
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllreduce}) {
    request.kind = kind;
    EXPECT_EQ(round_trip(request).name, "unnamed.7");
    EXPECT_EQ(round_trip(request).group_key(), "unnamed.5");
  }
}

TEST(Messages, UnnamedNamesAreDerived) {
  Request request;
  request.unnamed = true;
  request.ordinal = 7;
  request.kind = OpKind::kBroadcast;
  request.name = "ignored";
  request.group_size = 3;
  request.group_index = 2;
  const Request decoded = round_trip(request);
  EXPECT_EQ(decoded.name, "broadcast.unnamed.7");
  EXPECT_EQ(decoded.group_key(), "broadcast.unnamed.5");
  EXPECT_EQ(decoded.ordinal, 7u);
}

/// The field that the kind has instead of a root.
int& root_of(Request& request) {
  if (request.kind == OpKind::kJoin) return request.last_to_join;
  if (request.kind == OpKind::kRemoveProcessSet) return request.removed_set;
  return request.root;
}

TEST(Messages, KindsWithoutARootUseItsField) {
  Request broadcast;
  broadcast.name = "a";
  broadcast.kind = OpKind::kBroadcast;
  broadcast.root = 3;
  const Bytes bytes = encode(with(broadcast));
  for (const OpKind kind : {OpKind::kJoin, OpKind::kRemoveProcessSet, OpKind::kGather,
                            OpKind::kReduce, OpKind::kScatter}) {
    Request other;
    other.name = "a";
    other.kind = kind;
    root_of(other) = 3;
    EXPECT_EQ(round_trip(other), other);
    const Bytes same = encode(with(other));
    ASSERT_EQ(same.size(), bytes.size());
    const auto kind_byte = std::mismatch(bytes.begin(), bytes.end(), same.begin());
    EXPECT_EQ(*kind_byte.second, static_cast<std::byte>(kind));
    EXPECT_TRUE(std::equal(kind_byte.first + 1, bytes.end(), kind_byte.second + 1));
  }
}

Request random_request(std::mt19937_64& random) {
  Request request;
  request.unnamed = random() % 2 == 0;
  request.kind = static_cast<OpKind>(random() % kOpKindCount);
  request.ordinal = request.unnamed ? random() >> (random() % 64) : 0;
  request.in_sequence = request.unnamed && random() % 2 == 0;
  request.name =
      request.unnamed ? unnamed_name(request, request.ordinal) : std::string(random() % 20, 'n');
  request.op = static_cast<ReduceOp>(random() % kReduceOpCount);
  request.dtype = static_cast<DataType>(random() % kDataTypeCount);
  request.device = static_cast<DeviceType>(random() % 2);
  request.process_set = static_cast<int>(random() % 1000);
  root_of(request) = static_cast<int>(random() % 3);
  request.prescale = random() % 2 == 0 ? 1.0 : static_cast<double>(random() % 1000) / 7;
  if (random() % 3 == 0 && (!request.unnamed || request.ordinal > 5)) {
    request.group = request.unnamed ? "" : "g";
    request.group_size = 6;
    request.group_index = static_cast<int>(random() % 6);
  }
  for (std::size_t i = random() % 5; i > 0; --i)
    request.shape.push_back(static_cast<std::int64_t>(random() % 2000));
  for (std::size_t i = random() % 4; i > 0; --i)
    request.new_set.push_back(static_cast<int>(random() >> 33));
  return request;
}

TEST(Messages, RandomMessagesComeBack) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    RankReport report;
    report.rank = static_cast<int>(random() % kMaxRanks);
    report.number = random() >> kStampReportShift >> (random() % 32);
    report.last_applied = random() >> (random() % 64);
    report.shutdown = random() % 2 == 0;
    for (std::uint32_t slot = 0; slot < 200; ++slot) {
      if (random() % 8 == 0) report.cached.push_back(slot);
    }
    Plan plan;
    plan.sequence = random();
    plan.batches.resize(random() % 4);
    for (std::size_t n = random() % 4; n > 0; --n) {
      report.requests.push_back(random_request(random));
      report.cached_unnamed.push_back({static_cast<std::uint32_t>(random() % kMaxSlots), random()});
      const Response tensor{random_request(random), {1, static_cast<std::int64_t>(random() >> 1)}};
      for (auto& batch : plan.batches) batch.tensors.push_back(tensor);
      plan.errors.push_back(
          {1, "e", StatusCode::kInternal, "m", static_cast<int>(random() % 9) - 1, {0, 7}});
    }
    EXPECT_EQ(round_trip(make_report(report)), make_report(report));
    EXPECT_EQ(round_trip(plan), plan);
  }
}

TEST(Messages, AReportThatCannotBeIsRefused) {
  const struct {
    const char* hex;
    const char* why;
  } cases[] = {
      {"680201 00 00 01 00 01 00", "expected at least one rank"},
      {"680201 00 01 05 00", "expected at least one rank"},
      {"680201 00 02 05 01 00 03 06 01 02 00 00", "a rank is named twice"},
      {"680201 02 00 01 ffff3f 01 00", "there is no rank 1048576"},
      {"680201 08 808040 00", "rank at byte"},
      {"680201 00 00 02 05 00 05 00", "not ascending"},
      {"680201 00 00 01 00 01 01 00 00 01 01 00 00", "expected at least one"},
      {"680201 18 00 00 00 01 01 01 01 00 00", "report number at byte 9 of 13: out of range"},
      {"680201 00 00 01 00 01 01 00 01 00 00 00 01 00 00 0167 01 00 08 00 00 01 05 01 05 01",
       "expected those of 2 ranks, got 1"},
      {"680201 00 00 01 00 01 01 00 01 00 00 00 01 00 00 0167 01 00 08 00 00 01 05 01 06 02",
       "the lowest rank's is not that of the request"},
  };
  for (const auto& [hex, why] : cases) EXPECT_THAT(failure(from_hex(hex)), HasSubstr(why)) << hex;
}

}  // namespace
}  // namespace hvd::wire
