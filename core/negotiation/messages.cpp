#include "negotiation/messages.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/text.h"
#include "negotiation/codec.h"

namespace hvd::wire {
namespace {

// Bits of a request's flag byte. A field that usually has its default value is sent only if it
// differs.
enum RequestFlag : std::uint8_t {
  kHasScale = 1,
  kHasGroup = 2,
  kHasRoot = 4,
  kHasNewSet = 8,
  kUnnamed = 16,
  kAlone = 32,
  kCompressed = 64,
  kInSequence = 128,
};

// Bits of a plan's flag byte.
enum PlanFlag : std::uint8_t {
  kShutdown = 1,
  kHasAbsent = 2,  ///< each batch ends with the list of its absent ranks
  kHasReplay = 4,  ///< the schedule to repeat follows the errors
  kAllPlanFlags = 7,
};

// Bits of the flag byte of a replay update.
enum ReplayUpdateFlag : std::uint8_t { kLeaves = 1, kRequestsLeave = 2, kAllUpdateFlags = 3 };

constexpr int kMaxReplayRounds = 64;

constexpr std::uint64_t kMaxSize = std::numeric_limits<std::int64_t>::max();

template <class Enum>
Enum read_enum(Reader& in, const char* field, int count) {
  const std::uint8_t value = in.u8(field);
  if (value >= count) in.fail(field, text("expected less than ", count, ", got ", value));
  return static_cast<Enum>(value);
}

int read_int(Reader& in, const char* field, std::uint64_t highest = kMaxInt) {
  return static_cast<int>(in.varint(field, highest));
}

void write_sizes(Writer& out, const std::vector<std::int64_t>& sizes) {
  out.varint(sizes.size());
  for (const auto size : sizes) out.varint(static_cast<std::uint64_t>(size));
}

std::vector<std::int64_t> read_sizes(Reader& in, const char* field, std::size_t most) {
  std::vector<std::int64_t> sizes(in.count(field, most));
  for (auto& size : sizes) size = static_cast<std::int64_t>(in.varint(field, kMaxSize));
  return sizes;
}

void check_element_count(const Reader& in, const Request& request) {
  std::int64_t elements = 1;
  for (const auto size : request.shape) {
    if (__builtin_mul_overflow(elements, size, &elements))
      in.fail("shape", "more than 2^63 elements");
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, static_cast<std::int64_t>(size_of(request.dtype)), &bytes)) {
    in.fail("shape", "more than 2^63 bytes");
  }
}

Compression read_compression(Reader& in, const Request& request) {
  const auto compression = read_enum<Compression>(in, "compression", kCompressionCount);
  if (compression == Compression::kNone) in.fail("compression", "flagged, but the type is none");
  if (request.kind != OpKind::kAllreduce || request.dtype != DataType::kFloat32)
    in.fail("compression", "not of an allreduce of float32");
  return compression;
}

// Only an add_process_set with a list of ranks can be an operation of the new set's own members.
void check_own_members(const Reader& in, const Request& request) {
  if (!request.by_members()) return;
  if (request.kind != OpKind::kAddProcessSet || request.unnamed || request.new_set.empty() ||
      request.group_size > 0)
    in.fail("process set",
            "expected a named add_process_set of some ranks outside of groups, got another "
            "operation");
  if (std::ranges::adjacent_find(request.new_set, std::greater_equal()) != request.new_set.end())
    in.fail("ranks of a new set", "not in ascending order");
}

void write_ranks(Writer& out, const std::vector<int>& ranks) {
  out.varint(ranks.size());
  for (const int rank : ranks) out.varint(static_cast<std::uint64_t>(rank));
}

std::vector<int> read_ranks(Reader& in, const char* field) {
  std::vector<int> ranks(in.count(field, kMaxRanks));
  for (auto& rank : ranks) rank = read_int(in, field);
  return ranks;
}

// No kind has more than one of these fields, so they share a place in the message.
template <class AnyRequest>
auto& root_of(AnyRequest& request) {
  if (request.kind == OpKind::kJoin) return request.last_to_join;
  if (request.kind == OpKind::kRemoveProcessSet) return request.removed_set;
  return request.root;
}

}  // namespace

Writer start(MessageKind kind) {
  Writer out;
  out.u8(kMagic);
  out.u8(kVersion);
  out.u8(static_cast<std::uint8_t>(kind));
  return out;
}

void write_request(Writer& out, const Request& request) {
  const bool scaled = request.prescale != 1.0 || request.postscale != 1.0;
  out.u8(static_cast<std::uint8_t>(
      (scaled ? kHasScale : 0) | (request.group_size > 0 ? kHasGroup : 0) |
      (root_of(request) != 0 ? kHasRoot : 0) | (request.new_set.empty() ? 0 : kHasNewSet) |
      (request.unnamed ? kUnnamed : 0) | (request.alone ? kAlone : 0) |
      (request.in_sequence ? kInSequence : 0) |
      (request.compression != Compression::kNone ? kCompressed : 0)));
  if (request.unnamed) {
    out.varint(request.ordinal);
  } else {
    out.text(request.name);
  }
  out.u8(static_cast<std::uint8_t>(request.kind));
  out.u8(static_cast<std::uint8_t>(request.op));
  out.u8(static_cast<std::uint8_t>(request.dtype));
  out.u8(static_cast<std::uint8_t>(request.device));
  out.varint(static_cast<std::uint64_t>(request.process_set));
  write_sizes(out, request.shape);
  if (root_of(request) != 0) out.varint(static_cast<std::uint64_t>(root_of(request)));
  if (scaled) {
    out.f64(request.prescale);
    out.f64(request.postscale);
  }
  if (request.group_size > 0) {
    out.text(request.group);
    out.varint(static_cast<std::uint64_t>(request.group_size));
    out.varint(static_cast<std::uint64_t>(request.group_index));
  }
  if (!request.new_set.empty()) write_ranks(out, request.new_set);
  if (request.compression != Compression::kNone)
    out.u8(static_cast<std::uint8_t>(request.compression));
}

Request read_request(Reader& in) {
  Request request;
  const std::uint8_t flags = in.u8("request flags");
  request.unnamed = (flags & kUnnamed) != 0;
  request.alone = (flags & kAlone) != 0;
  request.in_sequence = (flags & kInSequence) != 0;
  if (request.in_sequence && !request.unnamed)
    in.fail("request flags", text("in sequence, but named, got ", flags));
  if (request.unnamed) {
    request.ordinal = in.varint("ordinal", kAnyNumber);
  } else {
    request.name = in.text("name", kMaxNameBytes);
  }
  request.kind = read_enum<OpKind>(in, "kind", kOpKindCount);
  request.op = read_enum<ReduceOp>(in, "op", kReduceOpCount);
  request.dtype = read_enum<DataType>(in, "dtype", kDataTypeCount);
  request.device = read_enum<DeviceType>(in, "device", 2);
  request.process_set = read_int(in, "process set");
  request.shape = read_sizes(in, "shape", kMaxDims);
  check_element_count(in, request);
  if ((flags & kHasRoot) != 0) root_of(request) = read_int(in, "root");
  if ((flags & kHasScale) != 0) {
    request.prescale = in.f64("prescale");
    request.postscale = in.f64("postscale");
  }
  if ((flags & kHasGroup) != 0) {
    request.group = in.text("group", kMaxNameBytes);
    request.group_size = read_int(in, "group size", kMaxTensors);
    request.group_index = read_int(in, "group index", kMaxTensors);
    if (request.group_index >= request.group_size)
      in.fail("group index", "not below the group size");
    if (request.unnamed && request.ordinal < static_cast<std::uint64_t>(request.group_index)) {
      in.fail("group index", "above the ordinal");
    }
  }
  if ((flags & kHasNewSet) != 0) request.new_set = read_ranks(in, "ranks of a new set");
  if ((flags & kCompressed) != 0) request.compression = read_compression(in, request);
  check_own_members(in, request);
  if (request.unnamed) request.name = unnamed_name(request, request.ordinal);
  return request;
}

namespace {

void write_planned(Writer& out, const PlannedTensor& tensor) {
  // 0: in full; otherwise slot + 1, so that a cached tensor of a small model takes one byte.
  if (const auto* const cached = std::get_if<SlotUse>(&tensor)) {
    out.varint(std::uint64_t{cached->slot} + 1);
    out.varint(cached->ordinal);
    return;
  }
  const auto& response = std::get<Response>(tensor);
  out.varint(0);
  write_request(out, response.request);
  write_sizes(out, response.first_dims);
}

PlannedTensor read_planned(Reader& in) {
  const std::uint64_t slot = in.varint("slot", kMaxSlots);
  if (slot > 0)
    return SlotUse{static_cast<std::uint32_t>(slot - 1), in.varint("ordinal", kAnyNumber)};
  Response response;
  response.request = read_request(in);
  response.first_dims = read_sizes(in, "first dims", kMaxRanks);
  return response;
}

void write_error(Writer& out, const ErrorEntry& error) {
  out.varint(static_cast<std::uint64_t>(error.process_set));
  out.text(error.name);
  out.u8(static_cast<std::uint8_t>(error.code));
  out.text(std::string_view(error.message).substr(0, kMaxTextBytes));
  out.zigzag(error.rank);
  write_ranks(out, error.missing);
}

// Reads the status of a failure. Refuses kOk, which would end an operation successfully.
StatusCode read_failure(Reader& in) {
  const auto code = read_enum<StatusCode>(in, "status", kStatusCodeCount);
  if (code == StatusCode::kOk) in.fail("status", "expected a failure, got 0 (ok)");
  return code;
}

int read_rank_or_none(Reader& in) {
  const std::int64_t rank = in.zigzag("rank");
  if (rank < -1 || rank > static_cast<std::int64_t>(kMaxInt))
    in.fail("rank", text("out of range, got ", rank));
  return static_cast<int>(rank);
}

ErrorEntry read_error(Reader& in) {
  ErrorEntry error;
  error.process_set = read_int(in, "process set");
  error.name = in.text("name", kMaxNameBytes);
  error.code = read_failure(in);
  error.message = in.text("message", kMaxTextBytes);
  error.rank = read_rank_or_none(in);
  error.missing = read_ranks(in, "missing ranks");
  return error;
}

Plan read_plan(Reader& in) {
  Plan plan;
  plan.sequence = in.varint("sequence", kAnyNumber);
  const auto flags = read_enum<std::uint8_t>(in, "plan flags", kAllPlanFlags + 1);
  plan.shutdown = (flags & kShutdown) != 0;
  const std::size_t batches = in.count("batches", kMaxTensors);
  for (std::size_t i = 0; i < batches; ++i) {
    Batch batch;
    const std::size_t tensors = in.count("tensors", kMaxTensors);
    for (std::size_t j = 0; j < tensors; ++j) batch.tensors.push_back(read_planned(in));
    if ((flags & kHasAbsent) != 0) batch.absent = read_ranks(in, "absent ranks");
    plan.batches.push_back(std::move(batch));
  }
  const std::size_t errors = in.count("errors", kMaxTensors);
  for (std::size_t i = 0; i < errors; ++i) plan.errors.push_back(read_error(in));
  if ((flags & kHasReplay) == 0) return plan;
  plan.replay.resize(in.count("replayed bundles", kMaxTensors));
  for (auto& bundle : plan.replay) {
    bundle.resize(in.count("replayed batches", kMaxTensors));
    for (auto& batch : bundle) {
      batch.resize(in.count("replayed tensors", kMaxTensors));
      for (auto& slot : batch) slot = static_cast<std::uint32_t>(in.varint("slot", kMaxSlots - 1));
    }
  }
  return plan;
}

Abort read_abort(Reader& in) {
  Abort abort;
  abort.origin = read_int(in, "origin");
  abort.cause.code = read_failure(in);
  abort.cause.message = in.text("message", kMaxTextBytes);
  abort.cause.rank = read_rank_or_none(in);
  return abort;
}

ReplayUpdate read_replay_update(Reader& in) {
  ReplayUpdate update;
  update.position = in.varint("position", kMaxSize);
  update.round = in.u8("round");
  if (update.round >= kMaxReplayRounds)
    in.fail("round", text("expected less than ", kMaxReplayRounds, ", got ", update.round));
  const std::uint8_t flags = in.u8("flags");
  if (flags > kAllUpdateFlags) in.fail("flags", text("unknown flag, got ", flags));
  update.leaves = (flags & kLeaves) != 0;
  update.requests_leave = (flags & kRequestsLeave) != 0;
  return update;
}

void write_sequence_position(Writer& out, const SequencePosition& sequence_position) {
  out.varint(sequence_position.plan);
  out.varint(sequence_position.position);
}

SequencePosition read_sequence_position(Reader& in) {
  const std::uint64_t plan = in.varint("plan", kAnyNumber);
  return {plan, in.varint("position", kMaxSize)};
}

WaitQuestion read_wait_question(Reader& in) {
  WaitQuestion question;
  question.question = in.varint("question", kAnyNumber);
  question.limit_ms = in.varint("limit", kMaxInt);
  question.sequence_position = read_sequence_position(in);
  question.request = read_request(in);
  return question;
}

WaitProbe read_wait_probe(Reader& in) {
  WaitProbe probe;
  probe.probe = in.varint("probe", kAnyNumber);
  probe.after = read_sequence_position(in);
  probe.process_set = read_int(in, "process set");
  probe.name = in.text("name", kMaxNameBytes);
  return probe;
}

WaitReply read_wait_reply(Reader& in) {
  WaitReply reply;
  reply.probe = in.varint("probe", kAnyNumber);
  reply.sequence_position = read_sequence_position(in);
  reply.submitted = read_enum<std::uint8_t>(in, "submitted", 2) != 0;
  reply.activity = in.text("activity", kMaxTextBytes);
  return reply;
}

WaitAnswer read_wait_answer(Reader& in) {
  WaitAnswer answer;
  answer.question = in.varint("question", kAnyNumber);
  answer.after = read_sequence_position(in);
  answer.text = in.text("text", kMaxTextBytes);
  return answer;
}

AnyMessage read_body(Reader& in, std::uint8_t kind) {
  switch (static_cast<MessageKind>(kind)) {
    case MessageKind::kReport:
      return read_report(in);
    case MessageKind::kPlan:
      return read_plan(in);
    case MessageKind::kAbort:
      return read_abort(in);
    case MessageKind::kPing:
      return Ping{};
    case MessageKind::kReplayUpdate:
      return read_replay_update(in);
    case MessageKind::kBlocked:
      return Blocked{in.varint("last applied plan", kAnyNumber)};
    case MessageKind::kReplayLeft: {
      const int process_set = read_int(in, "process set");
      return ReplayLeft{process_set, in.varint("batches", kAnyNumber)};
    }
    case MessageKind::kPong:
      return Pong{};
    case MessageKind::kPointToPoint:
      return read_point_message(in);
    case MessageKind::kWaitQuestion:
      return read_wait_question(in);
    case MessageKind::kWaitProbe:
      return read_wait_probe(in);
    case MessageKind::kWaitReply:
      return read_wait_reply(in);
    case MessageKind::kWaitAnswer:
      return read_wait_answer(in);
  }
  in.fail("message kind", text("unknown, got ", kind));
}

}  // namespace

SequencePosition latest(const SequencePosition& a, const SequencePosition& b) noexcept {
  return {std::max(a.plan, b.plan), std::max(a.position, b.position)};
}

std::string unnamed_name(OpKind kind, std::uint64_t ordinal) {
  return text(kind, ".unnamed.", ordinal);
}

std::string unnamed_name(const Request& alike, std::uint64_t ordinal) {
  return alike.in_sequence ? text("unnamed.", ordinal) : unnamed_name(alike.kind, ordinal);
}

std::int64_t Request::elements() const noexcept {
  std::int64_t elements = 1;
  for (const auto size : shape) elements *= size;
  return elements;
}

DataType Request::wire_dtype() const noexcept {
  if (compression == Compression::kNone) return dtype;
  return compression == Compression::kFloat16 ? DataType::kFloat16 : DataType::kBFloat16;
}

std::string Request::group_key() const {
  if (!unnamed) return group;
  return unnamed_name(*this, ordinal - static_cast<std::uint64_t>(group_index));
}

Bytes encode(const Request& request) {
  Writer out;
  write_request(out, request);
  return std::move(out).take();
}

Bytes encode(const Plan& plan) {
  Writer out = start(MessageKind::kPlan);
  out.varint(plan.sequence);
  const bool has_absent = std::any_of(plan.batches.begin(), plan.batches.end(),
                                      [](const Batch& batch) { return !batch.absent.empty(); });
  out.u8(static_cast<std::uint8_t>((plan.shutdown ? kShutdown : 0) | (has_absent ? kHasAbsent : 0) |
                                   (plan.replay.empty() ? 0 : kHasReplay)));
  out.varint(plan.batches.size());
  for (const auto& batch : plan.batches) {
    out.varint(batch.tensors.size());
    for (const auto& tensor : batch.tensors) write_planned(out, tensor);
    if (has_absent) write_ranks(out, batch.absent);
  }
  out.varint(plan.errors.size());
  for (const auto& error : plan.errors) write_error(out, error);
  if (plan.replay.empty()) return std::move(out).take();
  out.varint(plan.replay.size());
  for (const auto& bundle : plan.replay) {
    out.varint(bundle.size());
    for (const auto& batch : bundle) {
      out.varint(batch.size());
      for (const auto slot : batch) out.varint(slot);
    }
  }
  return std::move(out).take();
}

Bytes renumber(std::span<const std::byte> plan, std::uint64_t sequence) {
  constexpr std::size_t kHeader = 3;
  Writer out = start(MessageKind::kPlan);
  out.varint(sequence);
  out.raw(plan.subspan(kHeader + 1));
  return std::move(out).take();
}

Bytes encode(const Abort& abort) {
  Writer out = start(MessageKind::kAbort);
  out.varint(static_cast<std::uint64_t>(abort.origin));
  out.u8(static_cast<std::uint8_t>(abort.cause.code));
  out.text(std::string_view(abort.cause.message).substr(0, kMaxTextBytes));
  out.zigzag(abort.cause.rank);
  return std::move(out).take();
}

Bytes encode(const ReplayUpdate& update) {
  Writer out = start(MessageKind::kReplayUpdate);
  out.varint(update.position);
  out.u8(update.round);
  out.u8(static_cast<std::uint8_t>((update.leaves ? kLeaves : 0) |
                                   (update.requests_leave ? kRequestsLeave : 0)));
  return std::move(out).take();
}

Bytes encode(const Blocked& blocked) {
  Writer out = start(MessageKind::kBlocked);
  out.varint(blocked.last_applied);
  return std::move(out).take();
}

Bytes encode(const ReplayLeft& left) {
  Writer out = start(MessageKind::kReplayLeft);
  out.varint(static_cast<std::uint64_t>(left.process_set));
  out.varint(left.batches_run);
  return std::move(out).take();
}

Bytes encode(const WaitQuestion& question) {
  Writer out = start(MessageKind::kWaitQuestion);
  out.varint(question.question);
  out.varint(question.limit_ms);
  write_sequence_position(out, question.sequence_position);
  write_request(out, question.request);
  return std::move(out).take();
}

Bytes encode(const WaitProbe& probe) {
  Writer out = start(MessageKind::kWaitProbe);
  out.varint(probe.probe);
  write_sequence_position(out, probe.after);
  out.varint(static_cast<std::uint64_t>(probe.process_set));
  out.text(probe.name);
  return std::move(out).take();
}

Bytes encode(const WaitReply& reply) {
  Writer out = start(MessageKind::kWaitReply);
  out.varint(reply.probe);
  write_sequence_position(out, reply.sequence_position);
  out.u8(reply.submitted ? 1 : 0);
  out.text(std::string_view(reply.activity).substr(0, kMaxTextBytes));
  return std::move(out).take();
}

Bytes encode(const WaitAnswer& answer) {
  Writer out = start(MessageKind::kWaitAnswer);
  out.varint(answer.question);
  write_sequence_position(out, answer.after);
  out.text(std::string_view(answer.text).substr(0, kMaxTextBytes));
  return std::move(out).take();
}

Bytes encode(const Ping&) { return std::move(start(MessageKind::kPing)).take(); }
Bytes encode(const Pong&) { return std::move(start(MessageKind::kPong)).take(); }

AnyMessage decode(std::span<const std::byte> bytes, std::span<const std::byte> known_items) {
  Reader in(bytes, known_items);
  if (const auto magic = in.u8("magic"); magic != kMagic) {
    in.fail("magic", text("expected ", kMagic, ", got ", magic));
  }
  if (const auto version = in.u8("version"); version != kVersion) {
    in.fail("version", text("this rank speaks version ", kVersion, ", got ", version,
                            "; run the same hvd on every rank"));
  }
  const std::uint8_t kind = in.u8("message kind");
  AnyMessage message = read_body(in, kind);
  in.expect_end();
  return message;
}

}  // namespace hvd::wire
