#include <algorithm>

#include "negotiation/fields.h"

namespace hvd::wire {
namespace {

constexpr std::uint8_t kOverdue = 1;
constexpr std::uint8_t kSomeEnded = 2;

// Ranges as gap and length, both counted from the least that they can be.
void write_rank_set(Writer& out, const RankSet& ranks) {
  out.varint(ranks.ranges().size());
  int next = 0;
  for (const RankRange range : ranks.ranges()) {
    out.varint(static_cast<std::uint64_t>(range.first - next));
    out.varint(static_cast<std::uint64_t>(range.last - range.first));
    next = range.last + 2;
  }
}

RankSet read_rank_set(Reader& in, const char* field) {
  RankSet ranks;
  std::uint64_t next = 0;
  const std::size_t ranges = in.count(field, kMaxRanks);
  for (std::size_t i = 0; i < ranges; ++i) {
    const std::uint64_t first = next + in.varint(field, kMaxRanks);
    const std::uint64_t last = first + in.varint(field, kMaxRanks);
    if (last >= kMaxRanks) in.fail(field, "there is no rank " + std::to_string(last));
    ranks.append({static_cast<int>(first), static_cast<int>(last)});
    next = last + 2;
  }
  return ranks;
}

RankSet read_ranks_of(Reader& in, const char* field) {
  RankSet ranks = read_rank_set(in, field);
  if (ranks.empty()) in.fail(field, "expected at least one rank");
  return ranks;
}

void write_slots(Writer& out, const SlotSet& slots) {
  Bytes bits(slots.empty() ? 0 : slots.highest() / 8 + 1);
  slots.for_each([&](std::uint32_t slot) { bits[slot / 8] |= std::byte{1} << (slot % 8); });
  out.varint(bits.size());
  out.raw(bits);
}

SlotSet read_slots(Reader& in) {
  const auto bits = in.raw("cached slots", in.count("cached slots", kMaxSlots / 8));
  SlotSet slots;
  for (std::uint32_t i = 0; i < bits.size(); ++i) {
    for (unsigned rest = std::to_integer<unsigned>(bits[i]); rest != 0; rest &= rest - 1) {
      slots.add(i * 8 + static_cast<std::uint32_t>(std::countr_zero(rest)));
    }
  }
  if (slots.empty()) in.fail("cached slots", "expected at least one");
  return slots;
}

void write_first_dims(Writer& out, const std::vector<DimRun>& runs) {
  out.varint(runs.size());
  for (const DimRun& run : runs) {
    out.varint(static_cast<std::uint64_t>(run.dim));
    out.varint(static_cast<std::uint64_t>(run.ranks));
  }
}

// Stays in runs: what a short message says about a million ranks must not take a million numbers.
std::vector<DimRun> read_first_dims(Reader& in, const Request& request, int members) {
  std::vector<DimRun> runs(in.count("first dims", kMaxRanks));
  std::uint64_t ranks = 0;
  for (DimRun& run : runs) {
    run.dim =
        static_cast<std::int64_t>(in.varint("first dim", std::numeric_limits<std::int64_t>::max()));
    run.ranks = static_cast<int>(in.varint("ranks of a first dim", kMaxRanks));
    if (run.ranks == 0) in.fail("ranks of a first dim", "expected at least one");
    ranks += static_cast<std::uint64_t>(run.ranks);
  }
  const bool gathered = gathers(request.kind) && !request.shape.empty();
  const auto expected = gathered ? static_cast<std::uint64_t>(members) : 0;
  if (ranks != expected)
    in.fail("first dims", "expected those of " + std::to_string(expected) + " ranks, got " +
                              std::to_string(ranks));
  if (gathered && runs.front().dim != request.shape[0])
    in.fail("first dims", "the lowest rank's is not that of the request");
  return runs;
}

void write_group(Writer& out, const MergedReport::Group& group) {
  write_rank_set(out, group.ranks);
  out.varint(group.hits.size());
  for (const StampedHits& hits : group.hits) {
    out.varint(hits.report_number);
    write_slots(out, hits.slots);
  }
  out.varint(group.unnamed_hits.size());
  for (const StampedUnnamedHit& unnamed : group.unnamed_hits) {
    out.varint(unnamed.stamp);
    out.varint(unnamed.hit.slot);
    out.varint(unnamed.hit.ordinal);
  }
  out.varint(group.requests.size());
  for (const StampedRequest& stamped : group.requests) {
    out.varint(stamped.stamp);
    write_request(out, stamped.request);
    write_first_dims(out, stamped.first_dims);
  }
}

MergedReport::Group read_group(Reader& in) {
  MergedReport::Group group{read_ranks_of(in, "ranks of a group")};
  const std::size_t hits = in.count("hits", kMaxTensors);
  for (std::size_t i = 0; i < hits; ++i) {
    StampedHits stamped{in.varint("report number", kHighestReportNumber)};
    stamped.slots = read_slots(in);
    group.hits.push_back(std::move(stamped));
  }
  const std::size_t unnamed = in.count("unnamed hits", kMaxTensors);
  for (std::size_t i = 0; i < unnamed; ++i) {
    StampedUnnamedHit stamped{in.varint("stamp", kAnyNumber)};
    stamped.hit.slot = static_cast<std::uint32_t>(in.varint("slot", kMaxSlots - 1));
    stamped.hit.ordinal = in.varint("ordinal", kAnyNumber);
    group.unnamed_hits.push_back(stamped);
  }
  const std::size_t requests = in.count("requests", kMaxTensors);
  const int members = count(group.ranks);
  for (std::size_t i = 0; i < requests; ++i) {
    StampedRequest stamped{in.varint("stamp", kAnyNumber)};
    stamped.request = read_request(in);
    stamped.first_dims = read_first_dims(in, stamped.request, members);
    group.requests.push_back(std::move(stamped));
  }
  return group;
}

}  // namespace

MergedReport read_merged_report(Reader& in) {
  MergedReport report;
  const std::uint8_t flags = in.u8("merged report flags");
  if (flags > (kOverdue | kSomeEnded))
    in.fail("merged report flags", "unknown flag, got " + std::to_string(flags));
  report.overdue = (flags & kOverdue) != 0;
  RankSet known;
  const std::size_t applied = in.count("applied plans", kMaxRanks);
  for (std::size_t i = 0; i < applied; ++i) {
    MergedReport::Applied entry{in.varint("last applied plan", kAnyNumber)};
    entry.ranks = read_ranks_of(in, "ranks of a plan");
    if (intersects(known, entry.ranks)) in.fail("ranks of a plan", "a rank is named twice");
    known.add(entry.ranks);
    report.applied.push_back(std::move(entry));
  }
  report.leaving = read_rank_set(in, "leaving ranks");
  if ((flags & kSomeEnded) != 0) report.ended = read_rank_set(in, "ended ranks");
  if (!contains(report.leaving, report.ended)) in.fail("ended ranks", "not among the leaving");
  const std::size_t sections = in.count("sections", kMaxTensors);
  for (std::size_t i = 0; i < sections; ++i) {
    MergedReport::Section section{in.varint("as of plan", kAnyNumber)};
    if (i > 0 && section.as_of <= report.sections.back().as_of)
      in.fail("as of plan", "not ascending");
    const std::size_t groups = in.count("groups", kMaxTensors);
    for (std::size_t g = 0; g < groups; ++g) section.groups.push_back(read_group(in));
    report.sections.push_back(std::move(section));
  }
  return report;
}

Bytes encode(const MergedReport& report) {
  Writer out = start(MessageKind::kMergedReport);
  out.u8(static_cast<std::uint8_t>((report.overdue ? kOverdue : 0) |
                                   (report.ended.empty() ? 0 : kSomeEnded)));
  out.varint(report.applied.size());
  for (const auto& entry : report.applied) {
    out.varint(entry.last_applied);
    write_rank_set(out, entry.ranks);
  }
  write_rank_set(out, report.leaving);
  if (!report.ended.empty()) write_rank_set(out, report.ended);
  out.varint(report.sections.size());
  for (const auto& section : report.sections) {
    out.varint(section.as_of);
    out.varint(section.groups.size());
    for (const auto& group : section.groups) write_group(out, group);
  }
  return std::move(out).take();
}

}  // namespace hvd::wire
