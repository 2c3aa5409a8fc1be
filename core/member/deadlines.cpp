#include "member/deadlines.h"

#include <algorithm>

#include "base/text.h"

namespace hvd::member {
namespace {

constexpr int kPartsOfPeerTimeout = 3000;
constexpr Duration kShortest = std::chrono::milliseconds(1);
constexpr Duration kLongest = std::chrono::hours(24 * 365);

using Settings = TimeSettings;

// docs/elastic_design.md has the same rows; deadlines_test compares the two.
constexpr std::array<LimitRow, kLimitCount> kRows = {{
    {.name = "grace",
     .parts = 1,
     .meaning = "survivors that are ready wait for candidates that are not"},
    {.name = "beat", .parts = 5, .meaning = "between two heartbeats of a rank on its host"},
    {.name = "join window",
     .parts = 100,
     .setting = &Settings::join_window,
     .holds = {Limit::kGrace},
     .meaning = "candidates that join within it are admitted together"},
    {.name = "renewal",
     .parts = 250,
     .holds = {Limit::kBeat},
     .meaning = "between two requests of an agent for its lease"},
    {.name = "ping",
     .parts = 750,
     .holds = {Limit::kBeat},
     .meaning = "between two pings of a process that is silent"},
    {.name = "kill", .parts = 250, .meaning = "an agent ends the ranks of its host"},
    {.name = "heartbeat",
     .parts = 1000,
     .setting = &Settings::heartbeat,
     .holds = {Limit::kRenewal, Limit::kRenewal},
     .meaning = "silence after which hvdrun and an agent count each other as lost"},
    {.name = "fence",
     .parts = 1000,
     .holds = {Limit::kKill},
     .meaning = "from a kill until the process runs no more; then its host is given up"},
    {.name = "lease",
     .parts = 1250,
     .holds = {Limit::kHeartbeat, Limit::kKill},
     .meaning = "after which no process of a lost host runs"},
    {.name = "silence",
     .parts = kPartsOfPeerTimeout,
     .holds = {Limit::kPing, Limit::kPing, Limit::kPing},
     .meaning = "after which a process counts as lost: HVD_PEER_TIMEOUT"},
    {.name = "change",
     .parts = 6000,
     .setting = &Settings::change,
     .holds = {Limit::kJoinWindow, Limit::kSilence, Limit::kFence},
     .meaning = "members reach the commit of a change in order"},
    {.name = "start",
     .parts = 30000,
     .setting = &Settings::start,
     .holds = {Limit::kSilence, Limit::kFence},
     .meaning = "from the start of a process until it joins"},
    {.name = "stall",
     .parts = 60000,
     .setting = &Settings::stall,
     .holds = {Limit::kSilence, Limit::kFence},
     .meaning = "a member that responds leaves a generation, or enters one"},
    {.name = "elastic",
     .parts = 60000,
     .setting = &Settings::elastic,
     .holds = {Limit::kStart, Limit::kLease},
     .meaning = "the job waits for the least number of ranks"},
}};

std::string shown(Duration value) { return value == kNever ? "never" : text(value); }

Duration bounded(Duration value) { return std::clamp(value, kShortest, kLongest); }

Duration share(Duration peer, int parts) {
  return peer / kPartsOfPeerTimeout * parts +
         peer % kPartsOfPeerTimeout * parts / kPartsOfPeerTimeout;
}

Duration setting_of(const LimitRow& row, const TimeSettings& settings, Duration derived) {
  if (row.setting == nullptr || !(settings.*row.setting)) return derived;
  const Duration value = *(settings.*row.setting);
  return value == Duration::zero() ? kNever : bounded(value);
}

/// The longest heartbeat whose lease ends within the peer timeout.
Duration longest(Limit limit, Duration peer) {
  return limit == Limit::kHeartbeat ? peer - peer / 12 : kNever;
}

}  // namespace

std::span<const LimitRow> limit_rows() noexcept { return kRows; }

Deadlines::Deadlines(const TimeSettings& settings) {
  for (std::size_t i = 0; i < kLimitCount; ++i) set(static_cast<Limit>(i), settings);
}

void Deadlines::set(Limit limit, const TimeSettings& settings) {
  const LimitRow& row = kRows[static_cast<std::size_t>(limit)];
  const Duration peer = bounded(settings.peer);
  const Duration derived = share(peer, row.parts);
  const Duration wanted = setting_of(row, settings, derived);
  Duration shortest = Duration::zero();
  for (const auto& inner : row.holds)
    if (inner) shortest = std::min(kNever, shortest + (*this)[*inner]);
  const Duration value = std::max(shortest, std::min(wanted, longest(limit, peer)));
  values_[static_cast<std::size_t>(limit)] = value;
  if (wanted != derived && value != wanted) {
    adjustments_.push_back(text("the deadline '", row.name, "' was changed from ", shown(wanted),
                                " to ", shown(value), " to fit the others"));
  }
}

std::vector<std::string> Deadlines::described() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < kLimitCount; ++i) {
    lines.push_back(text(kRows[i].name, ": ", shown(values_[i]), " (", kRows[i].meaning, ")"));
  }
  return lines;
}

}  // namespace hvd::member
