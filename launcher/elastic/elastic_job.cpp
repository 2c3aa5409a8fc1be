#include "elastic/elastic_job.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <utility>
#include <variant>

#include "base/text.h"
#include "member/messages.h"
#include "reports/outcome.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"
#include "system/times.h"

// Note [An elastic job in hvdrun]
//
// The coordinator decides on membership, and Placement on processes; neither does input or output.
// ElasticJob connects the two: it reports to the coordinator which workers were started and have
// ended, and to Placement which of them were lost. When the coordinator gives up a worker, its
// agent kills it, and reports when none of its threads runs any more. The next generation may begin
// then, usually long before the kernel has freed the worker's memory. The slot is used again only
// after the end of the process and of its output.
//
// If the coordinator gives up a host, hvdrun closes the connection to its agent and kills the
// process that has started the agent. The agent then ends its workers; if it is cut off, it does so
// when its lease expires.

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

/// Limit of the events that are handled before the timers.
constexpr int kMaxEventsAtOnce = 64;
constexpr milliseconds kSameRequest{200};
constexpr std::chrono::seconds kProofTimeout{10};
/// Number of consecutive failures after which a job without a generation ends.
constexpr int kMaxFailedStarts = 3;

constexpr std::array kJobSignals = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

Duration to_duration(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}
std::optional<Duration> to_duration(const std::optional<double>& seconds) {
  return seconds ? std::optional(to_duration(*seconds)) : std::nullopt;
}

std::vector<HostRanks> slots_of(const LaunchOptions& options, const LaunchPlan& plan) {
  const ElasticOptions& elastic = *options.elastic;
  if (plan.hosts.empty() && !elastic.discovery.empty()) return {};
  if (options.node) return place_ranks(options.node->processes, {}, plan.hostname);
  const int slots = plan.hosts.empty() ? elastic.max_np + elastic.spares : total_slots(plan.hosts);
  std::vector<HostRanks> hosts = place_ranks(slots, plan.hosts, plan.hostname);
  int next = 0;  // numbered as in Placement, even if two names of one host are not adjacent
  for (HostRanks& host : hosts)
    for (int& slot : host.ranks) slot = next++;
  return hosts;
}

std::vector<int> sizes(const std::vector<HostRanks>& hosts) {
  std::vector<int> sizes;
  for (const HostRanks& host : hosts) sizes.push_back(static_cast<int>(host.ranks.size()));
  return sizes;
}

std::string token_of(const LaunchOptions& options) {
  if (!options.node) return random_token();
  return rendezvous_token(options.node->run_id, environment_variable("HVD_JOB_TOKEN").value_or(""));
}

Welcome welcome_of(const LaunchOptions& options, const member::Deadlines& deadlines) {
  Welcome welcome = terminal_size(options.tag ? static_cast<int>(worker_prefix(1).size()) : 0);
  welcome.renewal = deadlines[member::Limit::kRenewal].count();
  welcome.heartbeat = deadlines[member::Limit::kHeartbeat].count();
  welcome.kill = deadlines[member::Limit::kKill].count();
  return welcome;
}

int total(const std::vector<HostRanks>& hosts) {
  int slots = 0;
  for (const int size : sizes(hosts)) slots += size;
  return slots;
}

}  // namespace

member::Deadlines deadlines_of(const ElasticOptions& options, const LaunchPlan& plan) {
  member::TimeSettings settings;
  const auto seconds = [&](const char* name) {
    const auto value = value_for_ranks(plan, name);
    return value ? std::strtod(value->c_str(), nullptr) : 0.0;
  };
  if (const double peer = seconds(kPeerTimeoutVariable); peer > 0)
    settings.peer = to_duration(std::min(peer, 1e9));
  if (value_for_ranks(plan, "HVD_STALL_SHUTDOWN"))
    settings.stall = to_duration(std::clamp(seconds("HVD_STALL_SHUTDOWN"), 0.0, 1e9));
  settings.heartbeat = to_duration(options.heartbeat_s);
  settings.join_window = to_duration(options.window_s);
  settings.change = to_duration(options.change_s);
  settings.start = to_duration(options.start_s);
  settings.elastic = to_duration(options.timeout_s);
  return member::Deadlines(settings);
}

ElasticJob::ElasticJob(const LaunchOptions& options, LaunchPlan plan)
    : options_(options),
      plan_(std::move(plan)),
      deadlines_(deadlines_of(*options.elastic, plan_)),
      slots_(total(slots_of(options, plan_))),
      output_(io_, {.reader_gone =
                        [this](const std::string& stream) {
                          begin_stop(static_cast<int>(ExitCode::kReaderGone), SIGTERM,
                                     options_.fail_grace_s,
                                     text("the reader of ", stream, " has closed it"));
                        },
                    .lost = [this] { output_lost_ = true; }}),
      server_(io_, slots_, token_of(options), welcome_of(options, deadlines_), plan_.local_only,
              silence_limit_ms(value_for_ranks(plan_, kPeerTimeoutVariable)), *this, kProofTimeout,
              static_cast<std::uint16_t>(options.node ? options.node->master_port : 0)),
      spawner_(io_, plan_),
      placement_(sizes(slots_of(options, plan_)),
                 {.start = options.np,
                  .min_np = options.elastic->min_np,
                  .max_np = options.elastic->max_np,
                  .spares = options.elastic->spares,
                  .replacements = options.elastic->replacements},
                 time_now(),
                 {.first = to_duration(options.elastic->cooldown_s.first),
                  .longest = to_duration(options.elastic->cooldown_s.second)},
                 !options.elastic->discovery.empty()),
      coordinator_({.start_size = options.np,
                    .min_np = options.elastic->min_np,
                    .max_np = options.elastic->max_np,
                    .max_resets = options.elastic->max_resets,
                    .max_failures = options.elastic->max_failures,
                    .deadlines = deadlines_},
                   time_now()) {
  for (HostRanks& place : slots_of(options, plan_)) {
    host_of_slot_.resize(host_of_slot_.size() + place.ranks.size(), hosts_.size());
    const auto slots = static_cast<int>(place.ranks.size());
    hosts_.push_back({.place = std::move(place), .slots = slots});
  }
  for (const launcher::Host& host : plan_.hosts) index_of(host);
  if (!options.elastic->discovery.empty())
    discovery_.emplace(options.elastic->discovery, options.elastic->slots);
  plan_.variables.emplace_back(kPortVariable, text(server_.port()));
  plan_.variables.emplace_back(kTokenVariable, server_.token());
}

int ElasticJob::run() {
  signals_.emplace(io_, block_unignored(kJobSignals), [this](int signal) { on_signal(signal); });
  if (options_.timeout_s > 0)
    timeout_at_ = Clock::now() + milliseconds(whole_ms(options_.timeout_s));
  Pipe pipe = make_pipe();
  agents_output_end_ = std::move(pipe.write_end);
  agents_output_.emplace(io_, std::move(pipe.read_end), [this](std::string_view bytes) {
    output_.console().write(Stream::kStderr, Console::kNoOwner, bytes);
  });
  describe_deadlines();
  run_coordinator();
  while (!over()) {
    alarm_.set(next_deadline());
    io_.run_one();
    for (int more = 0; more < kMaxEventsAtOnce && io_.poll_one() > 0; ++more) {
    }
    after_events();
  }
  return finish();
}

void ElasticJob::describe_deadlines() {
  for (const std::string& sentence : deadlines_.adjustments()) output_.print_line(sentence);
  if (!options_.verbose) return;
  output_.print_line("the deadlines of this job:");
  for (const std::string& line : deadlines_.described()) output_.print_line("  " + line);
}

void ElasticJob::after_events() {
  if (output_.has_room()) server_.give_credit();
  output_.report_failures();
  reap_agents();
  run_coordinator();
  on_timers();
  if (ending_ && !closed_ && workers_.empty()) end_agents();
}

std::optional<Deadline> ElasticJob::next_deadline() {
  std::optional<Deadline> next;
  for (const auto& timer : {timeout_at_, kill_at_, give_up_at_, output_.files().next_deadline()})
    keep_earlier(next, timer);
  for (const Host& host : hosts_) keep_earlier(next, host.connect_by);
  const Deadline present = Clock::now();
  for (const auto& [slot, worker] : workers_)
    keep_earlier(next, worker.output->show_partial(present));
  if (ending_) return next;
  if (discovery_) keep_earlier(next, discovery_->next_deadline());
  keep_earlier(next, as_deadline(coordinator_.next_check(time_now())));
  if (const auto due = placement_.next_due(time_now())) keep_earlier(next, as_deadline(*due));
  return next;
}

void ElasticJob::on_timers() {
  const Deadline present = Clock::now();
  const auto due = [present](std::optional<Deadline>& timer) {
    if (!timer || present < *timer) return false;
    timer.reset();
    return true;
  };
  for (Host& host : hosts_)
    if (due(host.connect_by) && host.agent > 0) ::kill(host.agent, SIGKILL);
  if (due(timeout_at_))
    begin_stop(
        static_cast<int>(ExitCode::kTimeout), SIGTERM, options_.grace_s,
        text("the job was stopped after ", format_duration(options_.timeout_s), " (--timeout)"));
  if (due(kill_at_)) {
    for (const Host& host : hosts_)
      if (host.agent > 0) ::kill(host.agent, SIGKILL);
    for (const pid_t agent : former_agents_) ::kill(agent, SIGKILL);
  }
  if (due(give_up_at_) && !closed_) {
    workers_.clear();
    end_agents();
  }
}

void ElasticJob::on_signal(int signal) {
  if (signal == SIGCHLD) return;
  if (signal == SIGUSR1 || signal == SIGUSR2) {
    for (const auto& [slot, worker] : workers_)
      server_.send(slot, {.signal = signal, .stop = false, .kill_after_ms = -1});
    return;
  }
  if (finishing_) {
    hurried_ = true;
    return;
  }
  on_user_signal(signal);
}

void ElasticJob::on_user_signal(int signal) {
  const Deadline present = Clock::now();
  if (user_signal_ != 0) {
    if (signal == user_signal_ && present - user_signal_at_ < kSameRequest) return;
    hurried_ = true;
    stop_workers(SIGKILL, 0);
    give_up_at_ = present + kLastReports;
    return;
  }
  user_signal_ = signal;
  user_signal_at_ = present;
  if (ending_) {
    stop_workers(signal, whole_ms(options_.grace_s));
    if (record_.code == 0) record_.code = 128 + signal;
    return;
  }
  begin_stop(128 + signal, signal, options_.grace_s,
             text("the job was stopped by ", signal_name(signal)));
}

// The coordinator.

void ElasticJob::run_coordinator() {
  if (ending_) return;
  coordinator_.check(time_now());
  carry_out();
  discover();
  for (std::size_t host = 0; host < hosts_.size() && !ending_; ++host)
    if (hosts_[host].has_workers && !coordinator_.has_host(label(host))) host_down(host);
  if (!ending_) dismiss_agents();
  if (!ending_) check_limits();
  if (ending_) return;
  spawn_agents();
  for (const Placement::Start& start : placement_.workers_due(time_now())) start_worker(start);
  for (const Placement::LeftOut& left : placement_.take_left_out()) {
    output_.print_line(text("host ", label(left.host), " is left out for ", text(left.cooldown),
                            ", because its workers have failed three times in a minute"));
  }
  carry_out();
}

/// Carries out the coordinator's decisions since the last call.
void ElasticJob::carry_out() {
  if (ending_) return;
  for (const member::CoordinatorAction& action : coordinator_.take_actions()) {
    if (const auto* const message = std::get_if<member::Deliver>(&action)) {
      deliver(*message);
    } else {
      kill(std::get<member::Kill>(action));
    }
  }
  const auto& losses = coordinator_.losses();
  for (; losses_seen_ < losses.size(); ++losses_seen_) {
    const member::Loss& loss = losses[losses_seen_];
    record_.lost.push_back({.id = loss.worker,
                            .host = label(host_of(slot_of_.at(loss.worker))),
                            .generation = loss.generation,
                            .cause = loss.cause});
  }
  for (const std::string& note : coordinator_.take_notes()) output_.print_line(note);
  if (const auto outcome = coordinator_.outcome()) on_outcome(*outcome);
}

void ElasticJob::deliver(const member::Deliver& deliver) {
  const int slot = slot_of_.at(deliver.to);
  Worker* const worker = find(slot);
  if (worker == nullptr || worker->id != deliver.to) return;
  if (std::holds_alternative<member::Go>(deliver.message)) {
    placement_.runs(slot);
    ran_ = true;
  }
  if (std::holds_alternative<member::Refused>(deliver.message)) worker->refused = true;
  if (std::holds_alternative<member::End>(deliver.message)) worker->dismissed = true;
  server_.send_member(slot, frame_member_message(member::encode(deliver.message)));
}

void ElasticJob::kill(const member::Kill& kill) {
  const auto known = slot_of_.find(kill.worker);
  Worker* const worker = known == slot_of_.end() ? nullptr : find(known->second);
  if (worker == nullptr || worker->id != kill.worker) return;
  worker->cause = kill.cause;
  server_.send(known->second, {.signal = SIGKILL, .stop = true, .kill_after_ms = 0});
}

void ElasticJob::on_member(int slot, std::string_view bytes) {
  Worker* const worker = find(slot);
  if (worker == nullptr || worker->over || ending_) return;
  const member::WorkerId id = worker->id;
  try {
    worker->incoming.feed(bytes);
    while (const auto message = worker->incoming.next()) {
      coordinator_.receive(id, member::decode_to_coordinator(*message), time_now());
      carry_out();
      if (ending_) return;
    }
  } catch (const wire::WireError& error) {
    worker->over = true;  // stops reading its messages
    const std::string cause = text("it has sent an invalid message: ", error.what());
    kill({.worker = id, .cause = cause});
    placement_.lost(slot, id, time_now());
    coordinator_.worker_ended(id, cause, time_now());
    carry_out();
  }
}

void ElasticJob::on_gone(int slot) {
  if (Worker* const worker = find(slot)) worker_over(*worker, slot, worker->cause);
}

void ElasticJob::on_lease(int slot) {
  coordinator_.host_reported(label(host_of(slot)), time_now());
}

void ElasticJob::worker_over(Worker& worker, int slot, const std::string& cause) {
  if (std::exchange(worker.over, true) || ending_) return;
  if (worker.refused) placement_.refuse_host(worker.host);
  if (worker.dismissed) {
    placement_.left(slot);
  } else {
    placement_.lost(slot, worker.id, time_now());
  }
  coordinator_.worker_ended(worker.id, cause, time_now());
  carry_out();
}

void ElasticJob::on_outcome(member::Outcome outcome) {
  const ElasticOptions& elastic = *options_.elastic;
  ending_ = true;
  complete_ = outcome == member::Outcome::kComplete;
  if (complete_) {
    record_.code = 0;  // replaces the code of a worker that failed before the first generation
    return;
  }
  give_up_at_ = Clock::now() + kLastReports;
  const bool limit =
      outcome == member::Outcome::kTooManyResets || outcome == member::Outcome::kFailsAgain;
  record_.code = static_cast<int>(limit ? ExitCode::kLimit : ExitCode::kTooFewRanks);
  if (outcome == member::Outcome::kTooFew) {
    record_.reason =
        text("the job has ended: it had fewer than ", elastic.min_np, " ranks (--min-np) for ",
             deadlines_[member::Limit::kElastic], " (--elastic-timeout)");
  } else if (outcome == member::Outcome::kStateLost) {
    record_.reason =
        "the job has ended: no rank that had the state is left, and the program does not load one";
  } else if (outcome == member::Outcome::kFailsAgain) {
    record_.reason =
        text("the job has ended: its program has thrown an exception ", elastic.max_failures,
             " times in a row at the same or an earlier commit (--failure-limit), the last "
             "time on ",
             coordinator_.failure());
  } else {
    record_.reason = text("the job has ended: its ranks have changed ", *elastic.max_resets,
                          " times (--reset-limit)");
  }
}

void ElasticJob::check_limits() {
  if (placement_.exhausted()) {
    return begin_stop(static_cast<int>(ExitCode::kLimit), SIGTERM, options_.fail_grace_s,
                      text("the job has ended: ", placement_.replaced(),
                           " workers were replaced (--max-restarts), and fewer than ",
                           options_.elastic->min_np, " are left (--min-np)"));
  }
  const bool could_start = placement_.failed_starts() < kMaxFailedStarts;
  if (ran_ || could_start || record_.lost.empty()) return;
  const LostWorker& last = record_.lost.back();
  begin_stop(record_.code != 0 ? record_.code : 1, SIGTERM, options_.fail_grace_s,
             text("the job has not begun: ", kMaxFailedStarts,
                  " workers have failed one after the other, the last one (worker ", last.id,
                  " on ", last.host, ") with: ", last.cause));
}

// Workers.

void ElasticJob::start_worker(const Placement::Start& start) {
  const member::WorkerId id = ++last_id_;
  const std::size_t host = host_of(start.slot);
  OutputOptions output{.tag = options_.tag, .tail_lines = options_.tail_lines, .of_worker = true};
  if (options_.output_folder) output.folder = *options_.output_folder;
  Worker worker{.id = id, .host = host};
  worker.output = std::make_unique<RankOutput>(static_cast<int>(id), slots_, output,
                                               output_.console(), output_.files());
  workers_.insert_or_assign(start.slot, std::move(worker));
  slot_of_[id] = start.slot;
  if (start.replaces != 0)
    if (LostWorker* const lost = lost_record(start.replaces)) lost->replacement = id;
  hosts_[host].has_workers = true;
  coordinator_.worker_started(id, label(host), time_now());
  server_.start_next(start.slot, order_for(host, id));
}

StartOrder ElasticJob::order_for(std::size_t host, member::WorkerId id) const {
  StartOrder order{.node = static_cast<int>(host),
                   .nodes = static_cast<int>(hosts_.size()),
                   .job = id_,
                   .worker = static_cast<long long>(id),
                   .restarts = placement_.replaced()};
  for (std::size_t other = 0; other < hosts_.size(); ++other) {
    const Host& peer = hosts_[other];
    if (other != host && peer.connected && !peer.address.empty() && !is_loopback(peer.address))
      order.peer = peer.address;
  }
  return order;
}

void ElasticJob::on_started(int slot, const ProgramStarted& started) {
  const Worker* const worker = find(slot);
  if (worker == nullptr || !options_.verbose) return;
  output_.print_line(
      text("worker ", worker->id, " runs on ", label(worker->host), ", pid ", started.pid));
}

void ElasticJob::on_notice(int slot, const Notice& notice) {
  Worker* const worker = find(slot);
  if (worker == nullptr) return;
  RankRecord record;
  apply_notice(record, notice);
  if (record.death) worker->death = record.death;
}

void ElasticJob::on_output(int slot, Stream stream, std::string_view bytes) {
  if (Worker* const worker = find(slot)) worker->output->feed(stream, bytes, Clock::now());
}

void ElasticJob::on_ended(int slot, const Ended& ended) {
  Worker* const worker = find(slot);
  if (worker == nullptr) return;
  server_.give_full_credit(slot);
  const bool by_hvdrun = ended.stopped && !worker->cause.empty();
  const std::string cause = by_hvdrun ? worker->cause : describe_end(ended, worker->death);
  if (!ran_ && !ending_ && !ended.stopped && ended.code != 0) record_.code = ended.code;
  worker_over(*worker, slot, cause);
  LostWorker* const lost = lost_record(worker->id);
  if (lost != nullptr && !by_hvdrun) lost->cause = cause;
  if (!complete_ || ended.stopped || ended.code == 0) return;
  // After the end of the job only the program's own failures count.
  if (ended.signal == SIGKILL) {
    record_.lost.push_back({.id = worker->id,
                            .host = label(worker->host),
                            .generation = coordinator_.generation(),
                            .cause = cause + ", after all ranks had reached the end"});
  } else if (record_.code == 0) {
    record_.code = ended.code;
    record_.reason = text("worker ", worker->id, " on ", label(worker->host),
                          " failed after the end of the elastic part: ", cause);
  }
}

void ElasticJob::on_drained(int slot) {
  const auto found = workers_.find(slot);
  if (found == workers_.end()) return;
  found->second.output->finish();
  const bool failed = lost_record(found->second.id) != nullptr || (complete_ && record_.code != 0);
  auto tail = found->second.output->stderr_tail();
  if (failed && !tail.empty()) {
    record_.tail_worker = found->second.id;
    record_.stderr_tail = std::move(tail);
  }
  workers_.erase(found);
  server_.release(slot);
  placement_.freed(slot);
}

ElasticJob::Worker* ElasticJob::find(int slot) {
  const auto found = workers_.find(slot);
  return found == workers_.end() ? nullptr : &found->second;
}

LostWorker* ElasticJob::lost_record(member::WorkerId id) {
  const auto found = std::find_if(record_.lost.rbegin(), record_.lost.rend(),
                                  [id](const LostWorker& worker) { return worker.id == id; });
  return found == record_.lost.rend() ? nullptr : &*found;
}

}  // namespace hvd::launcher
