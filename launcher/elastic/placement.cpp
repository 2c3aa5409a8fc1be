#include "elastic/placement.h"

#include <algorithm>
#include <utility>

namespace hvd::launcher {
namespace {

using std::chrono::seconds;

constexpr Duration kLongestPause = seconds(60);
constexpr Duration kFailureWindow = seconds(60);
constexpr std::size_t kFailuresOfAHost = 3;

/// The pause before the next start, after this many failures in a row.
Duration pause_after(int failures) {
  if (failures <= 1) return Duration::zero();
  const int doublings = std::min(failures - 2, 6);
  return std::min(kLongestPause, Duration(seconds(1)) * (1 << doublings));
}

}  // namespace

Placement::Placement(const std::vector<int>& slots, WorkerCounts counts, TimePoint now,
                     Cooldown cooldown, bool discovered)
    : counts_(counts), cooldown_(cooldown), discovered_(discovered) {
  for (const int of_host : slots) add_host(of_host, now);
}

std::size_t Placement::add_host(int slots, TimePoint now, bool joins) {
  hosts_.push_back(
      {.joins = joins, .agent_due = now, .cooldown = cooldown_.first, .out_until = now});
  resize_host(hosts_.size() - 1, slots);
  return hosts_.size() - 1;
}

int Placement::resize_host(std::size_t index, int slots) {
  Host& host = hosts_[index];
  host.usable = static_cast<std::size_t>(slots);
  int added = 0;
  for (; host.slots.size() < host.usable; ++added) {
    slots_.push_back({.host = index, .position = host.slots.size()});
    host.slots.push_back(static_cast<int>(slots_.size()) - 1);
  }
  return added;
}

void Placement::forget_failures(std::size_t index, TimePoint now) {
  Host& host = hosts_[index];
  host.refused = false;
  host.agent_failures = 0;
  host.agent_due = host.out_until = now;
  host.failures.clear();
}

bool Placement::has_place(int number) const {
  const Slot& slot = slots_[static_cast<std::size_t>(number)];
  return slot.position < hosts_[slot.host].usable;
}

void Placement::host_connected(std::size_t host) { hosts_[host].agent = Host::Agent::kConnected; }

void Placement::host_lost(std::size_t host, TimePoint now) {
  Host& lost = hosts_[host];
  lost.agent = Host::Agent::kAbsent;
  lost.agent_due = now + pause_after(++lost.agent_failures);
  for (Slot& slot : slots_)
    if (slot.host == host) slot.used = slot.alive = false;
}

void Placement::refuse_host(std::size_t host) { hosts_[host].refused = true; }

void Placement::runs(int number) {
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  slot.ran = ran_ = true;
  hosts_[slot.host].agent_failures = 0;
}

void Placement::lost(int number, std::uint64_t id, TimePoint now) {
  Slot& slot = slots_[static_cast<std::size_t>(number)];
  slot.alive = false;
  const int failures = slot.ran ? 1 : slot.failures + 1;
  if (!ran_) failed_starts_ = std::max(failed_starts_, failures);
  vacancies_.push_back({.due = now + pause_after(failures),
                        .failures = failures,
                        .replaces = id,
                        .host = slot.host});
  record_failure(slot.host, now);
}

void Placement::left(int slot) { slots_[static_cast<std::size_t>(slot)].alive = false; }

void Placement::freed(int slot) { slots_[static_cast<std::size_t>(slot)].used = false; }

void Placement::record_failure(std::size_t index, TimePoint now) {
  Host& host = hosts_[index];
  host.failures.push_back(now);
  while (host.failures.front() + kFailureWindow < now) host.failures.pop_front();
  if (host.failures.size() < kFailuresOfAHost || host.out_until > now) return;
  int others = 0;
  for (const Host& other : hosts_)
    if (&other != &host && usable(other, now)) others += static_cast<int>(other.usable);
  if (others < counts_.min_np) return;
  host.out_until = now + host.cooldown;
  left_out_.push_back({.host = index, .cooldown = host.cooldown});
  host.cooldown = std::min(cooldown_.longest, 2 * host.cooldown);
  host.failures.clear();
}

bool Placement::usable(const Host& host, TimePoint now) const {
  return host.agent == Host::Agent::kConnected && !host.refused && host.out_until <= now;
}

int Placement::usable_slots() const {
  int slots = 0;
  for (const Host& host : hosts_) slots += static_cast<int>(host.usable);
  return slots;
}

int Placement::wanted() const {
  const int max_np = ran_ ? std::max(counts_.start, counts_.max_np) : counts_.start;
  return std::min(max_np + counts_.spares, usable_slots());
}

int Placement::living() const {
  return static_cast<int>(std::count_if(slots_.begin(), slots_.end(), [this](const Slot& slot) {
    return slot.alive && slot.position < hosts_[slot.host].usable;
  }));
}

bool Placement::exhausted() const {
  if (!counts_.replacements || replaced_ < *counts_.replacements) return false;
  const auto unfilled = std::count_if(vacancies_.begin(), vacancies_.end(),
                                      [](const Vacancy& vacancy) { return vacancy.replaces != 0; });
  const auto others = static_cast<int>(vacancies_.size()) - static_cast<int>(unfilled);
  return unfilled > 0 && living() + others < counts_.min_np;
}

int Placement::reachable_slots() const {
  int slots = 0;
  for (const Host& host : hosts_)
    if (host.agent != Host::Agent::kAbsent && !host.refused) slots += static_cast<int>(host.usable);
  return slots;
}

std::vector<Placement::LeftOut> Placement::take_left_out() { return std::exchange(left_out_, {}); }

std::vector<std::size_t> Placement::agents_due(TimePoint now) {
  std::vector<std::size_t> due;
  for (std::size_t index = 0; index < hosts_.size(); ++index) {
    Host& host = hosts_[index];
    if (host.agent != Host::Agent::kAbsent || host.refused || host.agent_due > now) continue;
    if (host.usable == 0 || host.joins) continue;
    host.agent = Host::Agent::kStarting;
    due.push_back(index);
  }
  return due;
}

std::optional<int> Placement::free_slot(std::size_t index) const {
  const Host& host = hosts_[index];
  for (std::size_t position = 0; position < host.usable; ++position)
    if (!slots_[static_cast<std::size_t>(host.slots[position])].used) return host.slots[position];
  return std::nullopt;
}

/// A replacement is placed on the same host if the host has a free slot.
std::optional<int> Placement::free_slot(const Vacancy& vacancy, TimePoint now) const {
  if (vacancy.host && usable(hosts_[*vacancy.host], now))
    if (const auto slot = free_slot(*vacancy.host)) return slot;
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    if (!usable(hosts_[host], now)) continue;
    if (const auto slot = free_slot(host)) return slot;
  }
  return std::nullopt;
}

/// Whether workers may be started. The first workers fill the hosts in order, so they wait for the
/// first attempt to start each agent. With a discovery script they wait only for as many slots as
/// they need, because some of its hosts may be out of reach.
bool Placement::settled() const {
  if (ran_) return true;
  int connected = 0;
  for (const Host& host : hosts_)
    if (host.agent == Host::Agent::kConnected && !host.refused)
      connected += static_cast<int>(host.usable);
  if (discovered_ && connected >= counts_.start) return true;
  return std::none_of(hosts_.begin(), hosts_.end(), [](const Host& host) {
    return host.agent == Host::Agent::kStarting && host.agent_failures == 0;
  });
}

std::vector<Placement::Start> Placement::workers_due(TimePoint now) {
  std::vector<Start> starts;
  if (!settled()) return starts;
  const int missing = wanted() - living();
  while (static_cast<int>(vacancies_.size()) < missing) vacancies_.push_back({.due = now});
  // The last vacancies are the most recent.
  while (static_cast<int>(vacancies_.size()) > std::max(0, missing)) vacancies_.pop_back();
  for (auto vacancy = vacancies_.begin(); vacancy != vacancies_.end();) {
    const bool permitted =
        vacancy->replaces == 0 || !counts_.replacements || replaced_ < *counts_.replacements;
    const auto slot =
        permitted && vacancy->due <= now ? free_slot(*vacancy, now) : std::optional<int>();
    if (!slot) {
      ++vacancy;
      continue;
    }
    Slot& taken = slots_[static_cast<std::size_t>(*slot)];
    taken = {.host = taken.host,
             .position = taken.position,
             .used = true,
             .alive = true,
             .failures = vacancy->failures};
    if (vacancy->replaces != 0) ++replaced_;
    starts.push_back({.slot = *slot, .replaces = vacancy->replaces});
    vacancy = vacancies_.erase(vacancy);
  }
  return starts;
}

std::optional<TimePoint> Placement::next_due(TimePoint now) const {
  std::optional<TimePoint> next;
  const auto consider = [&](TimePoint time) {
    if (time > now && (!next || time < *next)) next = time;
  };
  for (const Vacancy& vacancy : vacancies_) consider(vacancy.due);
  for (const Host& host : hosts_) {
    consider(host.out_until);
    if (host.agent == Host::Agent::kAbsent && host.usable > 0) consider(host.agent_due);
  }
  return next;
}

}  // namespace hvd::launcher
