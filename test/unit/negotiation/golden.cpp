#include "unit/negotiation/golden.h"

#include <cctype>
#include <stdexcept>

namespace hvd::wire::golden {
namespace {

Request tensor(std::string name, std::vector<std::int64_t> shape) {
  Request request;
  request.name = std::move(name);
  request.op = ReduceOp::kAverage;
  request.shape = std::move(shape);
  return request;
}

Request everything() {
  Request request;
  request.name = "layer/é";
  request.kind = OpKind::kAlltoall;
  request.op = ReduceOp::kAdasum;
  request.dtype = DataType::kFloat64;
  request.device = DeviceType::kCuda;
  request.process_set = 300;
  request.root = 2;
  request.prescale = 0.5;
  request.postscale = -2.0;
  request.group = "block";
  request.group_size = 3;
  request.group_index = 1;
  request.shape = {6, 0, 1LL << 40};
  request.new_set = {1, 2, 3};
  return request;
}

Request unnamed_gather() {
  Request request;
  request.unnamed = true;
  request.ordinal = 5;
  request.name = unnamed_name(OpKind::kAllgather, 5);
  request.kind = OpKind::kAllgather;
  request.op = ReduceOp::kSum;
  request.dtype = DataType::kInt64;
  request.shape = {2, 3};
  return request;
}

Request compressed() {
  Request request = tensor("fc1.bias", {128});
  request.compression = Compression::kBFloat16;
  request.alone = true;
  return request;
}

Report report_of_everything() {
  Report report;
  report.last_applied = 300;
  report.shutdown = true;
  report.cached = {0, 2, 9};
  report.cached_unnamed = {{4, 7}, {200, 1000}};
  report.requests = {everything(), unnamed_gather()};
  return report;
}

Plan plan_of_everything() {
  Plan plan;
  plan.sequence = 129;
  plan.shutdown = true;
  PlannedTensor gathered;
  gathered.request = unnamed_gather();
  gathered.first_dims = {2, 0, 130};
  PlannedTensor cached_unnamed;
  cached_unnamed.slot = 4;
  cached_unnamed.ordinal = 8;
  plan.batches = {Batch{{gathered}}, Batch{{cached_unnamed}}};
  ErrorEntry error;
  error.name = "fc1.weight";
  error.code = StatusCode::kStalled;
  error.message = "late";
  error.rank = -1;
  error.missing = {1, 3};
  ErrorEntry left;
  left.process_set = 2;
  left.name = "x";
  left.code = StatusCode::kShutdown;
  left.message = "left";
  left.rank = 5;
  plan.errors = {error, left};
  return plan;
}

MergedReport merged_report_of_everything() {
  MergedReport report;
  report.overdue = true;
  report.applied = {{300, RankSet(4, 9)}, {299, RankSet(200)}};
  report.leaving = RankSet(5);
  MergedReport::Group all{RankSet(4, 9)};
  all.ranks.add(RankSet(200));
  all.hits = {{7, SlotSet({0, 2, 9})}};
  all.unnamed_hits = {{stamp_of_unnamed_hit(7, 0), {4, 7}}};
  MergedReport::Group some{RankSet(4, 6)};
  some.requests = {{stamp_of_request(8, 1), unnamed_gather(), {{2, 1}, {0, 2}}},
                   {stamp_of_request(8, 0), everything()}};
  report.sections = {{298, {all}}, {300, {some}}};
  return report;
}

PlannedTensor from_cache(std::uint32_t slot) {
  PlannedTensor planned;
  planned.slot = slot;
  return planned;
}

}  // namespace

Request weight() { return tensor("fc1.weight", {128, 64}); }
Request bias() { return tensor("fc1.bias", {128}); }

Report first_report_of_rank_0() {
  Report report;
  report.requests = {weight(), bias()};
  return report;
}

Report first_report_of_rank_1() {
  Report report;
  report.requests = {bias(), weight()};
  return report;
}

Plan first_plan() {
  PlannedTensor first;
  first.request = weight();
  PlannedTensor second;
  second.request = bias();
  Plan plan;
  plan.sequence = 1;
  plan.batches = {Batch{{first, second}}};
  return plan;
}

Report cached_report() {
  Report report;
  report.last_applied = 1;
  report.cached = {0, 1};
  return report;
}

MergedReport cached_merged_report() {
  MergedReport report;
  report.applied = {{1, RankSet(8, 15)}};
  report.sections = {{1, {{RankSet(8, 15), {{2, SlotSet({0, 1})}}}}}};
  return report;
}

Plan cached_plan() {
  Plan plan;
  plan.sequence = 2;
  plan.batches = {Batch{{from_cache(0), from_cache(1)}}};
  return plan;
}

std::vector<Golden> messages() {
  Report leaving;
  leaving.last_applied = 2;
  leaving.shutdown = true;
  Report report_compressed;
  report_compressed.requests = {compressed()};
  Plan end;
  end.sequence = 3;
  end.shutdown = true;
  return {
      {"report_rank0", first_report_of_rank_0(),
       "680101 00 00 00 00 02"
       "00 0a6663312e776569676874 00 00 08 00 00 02 8001 40"
       "00 086663312e62696173 00 00 08 00 00 01 8001"},
      {"report_rank1", first_report_of_rank_1(),
       "680101 00 00 00 00 02"
       "00 086663312e62696173 00 00 08 00 00 01 8001"
       "00 0a6663312e776569676874 00 00 08 00 00 02 8001 40"},
      {"plan_first", first_plan(),
       "680102 01 00 01 02"
       "00 00 0a6663312e776569676874 00 00 08 00 00 02 8001 40 00"
       "00 00 086663312e62696173 00 00 08 00 00 01 8001 00"
       "00"},
      {"report_cached", cached_report(), "680101 01 00 01 03 00 00"},
      {"plan_cached", cached_plan(), "680102 02 00 01 02 01 00 02 00 00"},
      {"report_shutdown", leaving, "680101 02 01 00 00 00"},
      {"plan_shutdown", end, "680102 03 01 00 00"},
      {"report_everything", report_of_everything(),
       "680101 ac02 01 02 0502 02 04 07 c801 e807 02"
       "0f 086c617965722fc3a9 04 05 09 01 ac02 03 06 00 808080808020 02 000000000000e03f "
       "00000000000000c0"
       "05626c6f636b 03 01 03 01 02 03"
       "10 05 01 01 04 00 00 02 02 03"},
      {"report_compressed", report_compressed,
       "680101 00 00 00 00 01 60 086663312e62696173 00 00 08 00 00 01 8001 02"},
      {"plan_everything", plan_of_everything(),
       "680102 8101 01 02"
       "01 00 10 05 01 01 04 00 00 02 02 03 03 02 00 8201"
       "01 05 08"
       "02"
       "00 0a6663312e776569676874 03 046c617465 01 02 01 03"
       "02 0178 05 046c656674 0a 00"},
      {"abort", Abort{3, {StatusCode::kPeerLost, "lost rank 2", 2}},
       "680103 03 04 0b6c6f73742072616e6b2032 04"},
      {"merged_report_cached", cached_merged_report(),
       "680106 00 01 01 01 08 07 00 01 01 01 01 08 07 01 02 01 03 00 00"},
      {"merged_report_everything", merged_report_of_everything(),
       "680106 01 02 ac02 01 04 05 ab02 01 c801 00 01 05 00 02"
       "aa02 01 02 04 05 bd01 00 01 07 02 0502 01 8080c00e 04 07 00"
       "ac02 01 01 04 02 00 00 02"
       "81808011 10 05 01 01 04 00 00 02 02 03 02 02 01 00 02"
       "80808011 0f 086c617965722fc3a9 04 05 09 01 ac02 03 06 00 808080808020 02 000000000000e03f "
       "00000000000000c0 05626c6f636b 03 01 03 01 02 03 00"},
      {"ping", Ping{}, "680104"},
      {"pong", Pong{}, "680105"},
      {"blocked", Blocked{300}, "680108 ac02"},
      {"replay_update_leaves", ReplayUpdate{.position = 300, .round = 3, .leaves = true},
       "680107 ac02 03 01"},
      {"replay_update_asks", ReplayUpdate{.position = 1, .asks = true}, "680107 01 00 02"},
  };
}

Bytes encode(const AnyMessage& message) {
  return std::visit([](const auto& m) { return wire::encode(m); }, message);
}

Bytes from_hex(std::string_view hex) {
  std::string digits;
  for (const char c : hex) {
    if (std::isspace(static_cast<unsigned char>(c)) == 0) digits += c;
  }
  if (digits.size() % 2 != 0) throw std::invalid_argument("an odd number of hexadecimal digits");
  Bytes bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::string to_hex(const Bytes& bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (const auto byte : bytes) {
    const auto value = std::to_integer<unsigned>(byte);
    hex += kDigits[value >> 4];
    hex += kDigits[value & 15];
  }
  return hex;
}

}  // namespace hvd::wire::golden
