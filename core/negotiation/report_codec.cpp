#include <algorithm>

#include "base/text.h"
#include "negotiation/codec.h"
#include "negotiation/messages.h"

namespace hvd::wire {
namespace {

// Bits of a report's flag byte.
enum ReportFlag : std::uint8_t {
  kOverdue = 1,
  kSomeLeave = 2,
  kSomeEnded = 4,
  kOneRank = 8,           ///< the report of one rank, which is named once
  kOneRankHasItems = 16,  ///< items of that rank follow
  kAllReportFlags = 31,
};

// Writes each range as gap and length, both less their smallest possible value.
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
    if (last >= kMaxRanks) in.fail(field, text("there is no rank ", last));
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

// Keeps the runs, so that a short message about a million ranks does not become a million numbers.
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
  if (ranks != static_cast<std::uint64_t>(members))
    in.fail("first dims", text("expected those of ", members, " ranks, got ", ranks));
  if (runs.front().dim != request.shape[0])
    in.fail("first dims", "the lowest rank's is not that of the request");
  return runs;
}

// Whether each rank contributes its own number of rows.
bool has_first_dims(const Request& request) {
  return gathers(request.kind) && !request.shape.empty();
}

// The report number that a group's stamps are counted from: that of its first item.
std::uint64_t base_of(const Report::Group& group) {
  if (!group.hits.empty()) return group.hits.front().report_number;
  if (!group.unnamed_hits.empty()) return group.unnamed_hits.front().stamp >> kStampReportShift;
  if (!group.requests.empty()) return group.requests.front().stamp >> kStampReportShift;
  return 0;
}

// Neighbours have neighbouring stamps, so the distance from the expected stamp takes one byte.
void write_stamp(Writer& out, Stamp stamp, Stamp& expected) {
  out.zigzag(static_cast<std::int64_t>(stamp - expected));
  expected = stamp + 1;
}

Stamp read_stamp(Reader& in, Stamp& expected) {
  const Stamp stamp = expected + static_cast<Stamp>(in.zigzag("stamp"));
  expected = stamp + 1;
  return stamp;
}

void write_items(Writer& out, const Report::Group& group) {
  const std::uint64_t base = base_of(group);
  out.varint(base);
  out.varint(group.hits.size());
  for (const StampedHits& hits : group.hits) {
    out.zigzag(static_cast<std::int64_t>(hits.report_number - base));
    write_slots(out, hits.slots);
  }
  out.varint(group.unnamed_hits.size());
  Stamp expected = stamp_of_unnamed_hit(base, 0);
  for (const StampedUnnamedHit& unnamed : group.unnamed_hits) {
    write_stamp(out, unnamed.stamp, expected);
    out.varint(unnamed.hit.slot);
    out.varint(unnamed.hit.ordinal);
  }
  out.varint(group.requests.size());
  expected = stamp_of_request(base, 0);
  for (const StampedRequest& stamped : group.requests) {
    write_stamp(out, stamped.stamp, expected);
    write_request(out, stamped.request);
    if (has_first_dims(stamped.request)) write_first_dims(out, stamped.first_dims);
  }
}

// Reads a group except its ranks, which the caller has set.
void read_items(Reader& in, Report::Group& group) {
  group.known = in.skip_known();
  if (group.known) return;
  const std::uint64_t base = in.varint("report number", kHighestReportNumber);
  const std::size_t hits = in.count("hits", kMaxTensors);
  for (std::size_t i = 0; i < hits; ++i) {
    StampedHits stamped{base + static_cast<std::uint64_t>(in.zigzag("report number"))};
    if (stamped.report_number > kHighestReportNumber) in.fail("report number", "out of range");
    stamped.slots = read_slots(in);
    group.hits.push_back(std::move(stamped));
  }
  const std::size_t unnamed = in.count("unnamed hits", kMaxTensors);
  Stamp expected = stamp_of_unnamed_hit(base, 0);
  for (std::size_t i = 0; i < unnamed; ++i) {
    StampedUnnamedHit stamped{read_stamp(in, expected)};
    stamped.hit.slot = static_cast<std::uint32_t>(in.varint("slot", kMaxSlots - 1));
    stamped.hit.ordinal = in.varint("ordinal", kAnyNumber);
    group.unnamed_hits.push_back(stamped);
  }
  const std::size_t requests = in.count("requests", kMaxTensors);
  const int members = count(group.ranks);
  expected = stamp_of_request(base, 0);
  for (std::size_t i = 0; i < requests; ++i) {
    StampedRequest stamped{read_stamp(in, expected)};
    stamped.request = read_request(in);
    if (has_first_dims(stamped.request))
      stamped.first_dims = read_first_dims(in, stamped.request, members);
    group.requests.push_back(std::move(stamped));
  }
}

// Whether this is the report of one rank, with slots as of the last plan that it has applied.
bool is_of_one_rank(const Report& report) {
  if (report.applied.size() != 1 || count(report.applied[0].ranks) != 1) return false;
  const RankSet& rank = report.applied[0].ranks;
  const auto none_or_this = [&](const RankSet& ranks) { return ranks.empty() || ranks == rank; };
  if (!none_or_this(report.leaving) || !none_or_this(report.ended)) return false;
  if (report.sections.empty()) return true;
  const Report::Section& section = report.sections[0];
  return report.sections.size() == 1 && section.as_of == report.applied[0].last_applied &&
         section.groups.size() == 1 && section.groups[0].ranks == rank;
}

void read_report_of_one_rank(Reader& in, std::uint8_t flags, Report& report) {
  const RankSet rank(static_cast<int>(in.varint("rank", kMaxRanks - 1)));
  const std::uint64_t last_applied = in.varint("last applied plan", kAnyNumber);
  report.applied.push_back({last_applied, rank});
  if ((flags & kSomeLeave) != 0) report.leaving = rank;
  if ((flags & kSomeEnded) != 0) report.ended = rank;
  if ((flags & kOneRankHasItems) == 0) return;
  Report::Section& section = report.sections.emplace_back(Report::Section{last_applied});
  read_items(in, section.groups.emplace_back(Report::Group{rank}));
}

void read_report_of_many_ranks(Reader& in, std::uint8_t flags, Report& report) {
  RankSet known;
  const std::size_t applied = in.count("applied plans", kMaxRanks);
  for (std::size_t i = 0; i < applied; ++i) {
    Report::Applied entry{in.varint("last applied plan", kAnyNumber)};
    entry.ranks = read_ranks_of(in, "ranks of a plan");
    if (intersects(known, entry.ranks)) in.fail("ranks of a plan", "a rank is named twice");
    if (i + 1 < applied) known.add(entry.ranks);
    report.applied.push_back(std::move(entry));
  }
  if ((flags & kSomeLeave) != 0) report.leaving = read_rank_set(in, "leaving ranks");
  if ((flags & kSomeEnded) != 0) report.ended = read_rank_set(in, "ended ranks");
  const std::size_t sections = in.count("sections", kMaxTensors);
  for (std::size_t i = 0; i < sections; ++i) {
    Report::Section section{in.varint("as of plan", kAnyNumber)};
    if (i > 0 && section.as_of <= report.sections.back().as_of)
      in.fail("as of plan", "not ascending");
    const std::size_t groups = in.count("groups", kMaxTensors);
    for (std::size_t g = 0; g < groups; ++g) {
      RankSet ranks = read_ranks_of(in, "ranks of a group");
      read_items(in, section.groups.emplace_back(Report::Group{std::move(ranks)}));
    }
    report.sections.push_back(std::move(section));
  }
}

}  // namespace

Report read_report(Reader& in) {
  Report report;
  const std::uint8_t flags = in.u8("report flags");
  if (flags > kAllReportFlags) in.fail("report flags", text("unknown flag, got ", flags));
  report.overdue = (flags & kOverdue) != 0;
  (flags & kOneRank) != 0 ? read_report_of_one_rank(in, flags, report)
                          : read_report_of_many_ranks(in, flags, report);
  if (!contains(report.leaving, report.ended)) in.fail("ended ranks", "not among the leaving");
  return report;
}

Bytes encode_items(const Report::Group& group) {
  Writer out;
  write_items(out, group);
  return std::move(out).take();
}

Bytes encode(const Report& report) {
  Writer out = start(MessageKind::kReport);
  const bool one_rank = is_of_one_rank(report);
  out.u8(static_cast<std::uint8_t>(
      (report.overdue ? kOverdue : 0) | (report.leaving.empty() ? 0 : kSomeLeave) |
      (report.ended.empty() ? 0 : kSomeEnded) | (one_rank ? kOneRank : 0) |
      (one_rank && !report.sections.empty() ? kOneRankHasItems : 0)));
  if (one_rank) {
    out.varint(static_cast<std::uint64_t>(report.applied[0].ranks.lowest()));
    out.varint(report.applied[0].last_applied);
    if (!report.sections.empty()) write_items(out, report.sections[0].groups[0]);
    return std::move(out).take();
  }
  out.varint(report.applied.size());
  for (const auto& entry : report.applied) {
    out.varint(entry.last_applied);
    write_rank_set(out, entry.ranks);
  }
  if (!report.leaving.empty()) write_rank_set(out, report.leaving);
  if (!report.ended.empty()) write_rank_set(out, report.ended);
  out.varint(report.sections.size());
  for (const auto& section : report.sections) {
    out.varint(section.as_of);
    out.varint(section.groups.size());
    for (const auto& group : section.groups) {
      write_rank_set(out, group.ranks);
      write_items(out, group);
    }
  }
  return std::move(out).take();
}

}  // namespace hvd::wire
