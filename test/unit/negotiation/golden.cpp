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
  RankReport report;
  report.rank = 5;
  report.number = 3;
  report.last_applied = 300;
  report.shutdown = true;
  report.cached = {0, 2, 9};
  report.cached_unnamed = {{4, 7}, {200, 1000}};
  report.requests = {everything(), unnamed_gather()};
  return make_report(report);
}

Plan plan_of_everything() {
  Plan plan;
  plan.sequence = 129;
  plan.shutdown = true;
  const Response gathered{unnamed_gather(), {2, 0, 130}};
  const SlotUse cached_unnamed{4, 8};
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

Report merged_report_of_everything() {
  Report report;
  report.overdue = true;
  report.applied = {{300, RankSet(4, 9)}, {299, RankSet(200)}};
  report.leaving = RankSet(5);
  Report::Group all{RankSet(4, 9)};
  all.ranks.add(RankSet(200));
  all.hits = {{7, SlotSet({0, 2, 9})}};
  all.unnamed_hits = {{stamp_of_unnamed_hit(7, 0), {4, 7}}};
  Report::Group some{RankSet(4, 6)};
  some.requests = {{stamp_of_request(8, 1), unnamed_gather(), {{2, 1}, {0, 2}}},
                   {stamp_of_request(8, 0), everything()}};
  report.sections = {{298, {all}}, {300, {some}}};
  return report;
}

}  // namespace

Request weight() { return tensor("fc1.weight", {128, 64}); }
Request bias() { return tensor("fc1.bias", {128}); }

Report first_report_of_rank_0() { return make_report({.rank = 0, .requests = {weight(), bias()}}); }

Report first_report_of_rank_1() { return make_report({.rank = 1, .requests = {bias(), weight()}}); }

Plan first_plan() {
  Plan plan;
  plan.sequence = 1;
  plan.batches = {Batch{{Response{weight()}, Response{bias()}}}};
  return plan;
}

Report cached_report(int rank) {
  return make_report({.rank = rank, .number = 2, .last_applied = 1, .cached = {0, 1}});
}

Report cached_merged_report() {
  Report report;
  report.applied = {{1, RankSet(8, 15)}};
  report.sections = {{1, {{RankSet(8, 15), {{2, SlotSet({0, 1})}}}}}};
  return report;
}

Plan cached_plan() {
  Plan plan;
  plan.sequence = 2;
  plan.batches = {Batch{{SlotUse{0}, SlotUse{1}}}};
  return plan;
}

Report make_report(const RankReport& from) {
  const RankSet rank(from.rank);
  Report report;
  report.applied = {{from.last_applied, rank}};
  if (from.shutdown) report.leaving = rank;
  if (from.ended) report.ended = rank;
  Report::Group group{rank};
  if (!from.cached.empty()) group.hits = {{from.number, SlotSet(from.cached)}};
  for (const SlotUse& hit : from.cached_unnamed) {
    group.unnamed_hits.push_back(
        {stamp_of_unnamed_hit(from.number, group.unnamed_hits.size()), hit});
  }
  for (const Request& request : from.requests) {
    std::vector<DimRun> first_dims;
    if (gathers(request.kind) && !request.shape.empty()) first_dims = {{request.shape[0], 1}};
    group.requests.push_back(
        {stamp_of_request(from.number, group.requests.size()), request, first_dims});
  }
  if (group != Report::Group{rank}) report.sections = {{from.last_applied, {group}}};
  return report;
}

RankReport rank_report(const Report& report) {
  if (report.applied.size() != 1 || count(report.applied[0].ranks) != 1)
    throw std::invalid_argument("the report of several ranks");
  RankReport made;
  made.rank = report.applied[0].ranks.lowest();
  made.last_applied = report.applied[0].last_applied;
  made.shutdown = !report.leaving.empty();
  made.ended = !report.ended.empty();
  if (report.sections.empty()) return made;
  const Report::Group& group = report.sections.at(0).groups.at(0);
  for (const StampedHits& hits : group.hits) {
    made.number = hits.report_number;
    hits.slots.for_each([&](std::uint32_t slot) { made.cached.push_back(slot); });
  }
  for (const StampedUnnamedHit& unnamed : group.unnamed_hits)
    made.cached_unnamed.push_back(unnamed.hit);
  for (const StampedRequest& stamped : group.requests) made.requests.push_back(stamped.request);
  return made;
}

static std::vector<Golden> reports_and_plans() {
  const auto leaving = [](int rank) {
    return make_report({.rank = rank, .last_applied = 2, .shutdown = true});
  };
  const Report report_compressed = make_report({.requests = {compressed()}});
  Plan end;
  end.sequence = 3;
  end.shutdown = true;
  return {
      {"report_rank0", first_report_of_rank_0(),
       "680201 18 00 00 01 00 00 02"
       "00 00 0a6663312e776569676874 00 00 08 00 00 02 8001 40"
       "00 00 086663312e62696173 00 00 08 00 00 01 8001"},
      {"report_rank1", first_report_of_rank_1(),
       "680201 18 01 00 01 00 00 02"
       "00 00 086663312e62696173 00 00 08 00 00 01 8001"
       "00 00 0a6663312e776569676874 00 00 08 00 00 02 8001 40"},
      {"plan_first", first_plan(),
       "680202 01 00 01 02"
       "00 00 0a6663312e776569676874 00 00 08 00 00 02 8001 40 00"
       "00 00 086663312e62696173 00 00 08 00 00 01 8001 00"
       "00"},
      {"report_cached", cached_report(0), "680201 18 00 01 02 01 00 01 03 00 00"},
      {"report_cached_rank1", cached_report(1), "680201 18 01 01 02 01 00 01 03 00 00"},
      {"plan_cached", cached_plan(), "680202 02 00 01 02 01 00 02 00 00"},
      {"report_shutdown", leaving(0), "680201 0a 00 02"},
      {"report_shutdown_rank1", leaving(1), "680201 0a 01 02"},
      {"plan_shutdown", end, "680202 03 01 00 00"},
      {"report_everything", report_of_everything(),
       "680201 1a 05 ac02 03 01 00 02 0502 02 00 04 07 00 c801 e807 02"
       "00 0f 086c617965722fc3a9 04 05 09 01 ac02 03 06 00 808080808020 02 000000000000e03f "
       "00000000000000c0"
       "05626c6f636b 03 01 03 01 02 03"
       "00 10 05 01 01 04 00 00 02 02 03 01 02 01"},
      {"report_compressed", report_compressed,
       "680201 18 00 00 01 00 00 01 00 60 086663312e62696173 00 00 08 00 00 01 8001 02"},
      {"plan_everything", plan_of_everything(),
       "680202 8101 01 02"
       "01 00 10 05 01 01 04 00 00 02 02 03 03 02 00 8201"
       "01 05 08"
       "02"
       "00 0a6663312e776569676874 03 046c617465 01 02 01 03"
       "02 0178 05 046c656674 0a 00"},
  };
}

static std::vector<Golden> other_messages() {
  return {
      {"abort", Abort{3, {StatusCode::kPeerLost, "lost rank 2", 2}},
       "680203 03 04 0b6c6f73742072616e6b2032 04"},
      {"merged_report_cached", cached_merged_report(),
       "680201 00 01 01 01 08 07 01 01 01 01 08 07 02 01 00 01 03 00 00"},
      {"merged_report_everything", merged_report_of_everything(),
       "680201 03 02 ac02 01 04 05 ab02 01 c801 00 01 05 00 02"
       "aa02 01 02 04 05 bd01 00 07 01 00 02 0502 01 00 04 07 00"
       "ac02 01 01 04 02 08 00 00 02"
       "02 10 05 01 01 04 00 00 02 02 03 02 02 01 00 02"
       "03 0f 086c617965722fc3a9 04 05 09 01 ac02 03 06 00 808080808020 02 000000000000e03f "
       "00000000000000c0 05626c6f636b 03 01 03 01 02 03"},
      {"ping", Ping{}, "680204"},
      {"pong", Pong{}, "680205"},
      {"blocked", Blocked{300}, "680208 ac02"},
      {"replay_left", ReplayLeft{3, 300}, "68020b 03 ac02"},
      {"wait_question", WaitQuestion{5, 200, {300, 7}, bias()},
       "68020c 05 c801 ac02 07 "
       "00 08 6663312e62696173 00000800 00 01 8001"},
      {"wait_probe", WaitProbe{1, {300, 7}, 0, "fc1.bias"},
       "68020d 01 ac02 07 00 08 6663312e62696173"},
      {"wait_reply", WaitReply{1, {301, 7}, false, "waits for barrier 'b'"},
       "68020e 01 ad02 07 00 15 776169747320666f72206261727269657220276227"},
      {"wait_reply_submitted", WaitReply{1, {300, 7}, true, ""}, "68020e 01 ac02 07 01 00"},
      {"wait_answer", WaitAnswer{5, {301, 7}, "for 1 of 3 ranks"},
       "68020f 05 ad02 07 10 666f722031206f6620332072616e6b73"},
      {"replay_update_leaves", ReplayUpdate{.position = 300, .round = 3, .leaves = true},
       "680207 ac02 03 01"},
      {"replay_update_asks", ReplayUpdate{.position = 1, .requests_leave = true},
       "680207 01 00 02"},
  };
}

std::vector<Golden> messages() {
  std::vector<Golden> all = reports_and_plans();
  for (Golden& other : other_messages()) all.push_back(std::move(other));
  return all;
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
