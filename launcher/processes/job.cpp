#include "processes/job.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "base/text.h"
#include "command/mpirun_command.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/text.h"
#include "system/times.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

/// The time from the end of a survivor's grace period to SIGKILL.
constexpr milliseconds kKillDelay{500};
/// The time from the starter's SIGTERM, which follows the ranks' grace period, to its SIGKILL.
constexpr milliseconds kStarterGrace{1000};
/// How long to wait for the agents' last reports after the starter has ended.
constexpr milliseconds kReportTimeout{1500};
/// Limit of the events that are handled before the timers, which cost time for each rank.
constexpr int kMaxEventsAtOnce = 64;
/// A repetition of a signal within this time belongs to the same request: timeout(1) sends its
/// signal to hvdrun and then to hvdrun's process group.
constexpr milliseconds kSameRequest{200};

constexpr std::array kHandled = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

std::string describe(const Ended& ended) {
  return ended.signal != 0 ? text("killed by signal ", ended.signal)
                           : text("exit code ", ended.code);
}

/// @param folder of the rank
void set_streams(OutputOptions& output, const RankStreams& streams,
                 const std::filesystem::path& folder) {
  output.shown = streams.shown;
  output.logs = {};
  if (streams.logged[0]) output.logs[0] = folder / "stdout.log";
  if (streams.logged[1]) output.logs[1] = folder / "stderr.log";
}

}  // namespace

std::filesystem::path make_log_folder(const LaunchOptions& options) {
  const LogOptions& logs = options.logs;
  if (logs.redirects.empty() && logs.tee.empty()) return {};
  std::error_code error;
  const std::filesystem::path base =
      logs.folder ? std::filesystem::path(*logs.folder) : std::filesystem::temp_directory_path();
  std::filesystem::create_directories(base, error);
  std::string folder = base / ((options.node ? options.node->run_id : "hvdrun") + "_XXXXXX");
  if (error || ::mkdtemp(folder.data()) == nullptr) {
    throw LaunchError(ExitCode::kUsage, text("--log-dir: cannot create a folder in ", base, ": ",
                                             error ? error.message() : std::strerror(errno)));
  }
  return folder;
}

Job::Job(const LaunchOptions& options, LaunchPlan plan, const Attempt& attempt)
    : options_(options),
      plan_(std::move(plan)),
      output_(io_, {.reader_gone = [this](const std::string& stream) { on_reader_gone(stream); },
                    .lost = [this] { record_.output_lost = true; }}),
      server_(io_, options.np, random_token(),
              terminal_size(options.tag ? static_cast<int>(rank_prefix(0, plan_.world_size).size())
                                        : 0),
              plan_.local_only, silence_limit_ms(value_for_ranks(plan_, kPeerTimeoutVariable)),
              *this),
      rendezvous_(options.np, exported(plan_, "HVD_JOB_NAME").value_or(job_name(server_.token())),
                  exported(plan_, "HVD_JOB_TOKEN").value_or(job_token(server_.token())),
                  [this](int rank, std::uint32_t session, const RankRendezvous::Bytes& bytes,
                         bool last) { server_.send_rendezvous(rank, session, bytes, last); }) {
  OutputOptions output{.tag = options_.tag, .tail_lines = options_.tail_lines};
  const std::string name = text("attempt_", attempt.number);
  // Later attempts use other folders, so the output of a failed attempt is kept.
  if (options_.output_folder && attempt.number == 0) output.folder = *options_.output_folder;
  if (options_.output_folder && attempt.number > 0)
    output.folder = std::filesystem::path(*options_.output_folder) / name;
  const std::filesystem::path logs = attempt.logs / name;
  if (options_.max_restarts > 0)
    plan_.variables.emplace_back(kRestartCountVariable, text(attempt.number));
  for (int rank = 0; rank < size(); ++rank) {
    // All ranks of a job with these options are on one host, so the numbers are the local ones.
    set_streams(output, streams_of(options_.logs, rank), logs / text(rank));
    outputs_.push_back(std::make_unique<RankOutput>(plan_.first_rank + rank, plan_.world_size,
                                                    output, output_.console(), output_.files()));
  }
  record_.first_rank = plan_.first_rank;
  // torchrun's options also start programs that use LibTorch without hvd.
  record_.expects_hvd = options_.controller == Controller::kAuto && !options_.node &&
                        plan_.controller.controller == Controller::kUcx;
  record_.ranks.resize(static_cast<std::size_t>(size()));
  locations_.resize(record_.ranks.size());
  for (int rank = 0; rank < size(); ++rank) record_.rank(rank).host = planned_host(plan_, rank);
  record_.grace_s = options_.grace_s;
  record_.tail_lines = options_.tail_lines;
}

int Job::run() {
  signals_.emplace(io_, block_unignored(kHandled), [this](int signal) { on_signal(signal); });
  record_.started_ns = realtime_ns();
  if (options_.timeout_s > 0)
    timeout_at_ = Clock::now() + milliseconds(whole_ms(options_.timeout_s));
  start_timeout_at_ = Clock::now() + milliseconds(whole_ms(options_.start_timeout_s));
  start_agents();
  while (!over()) {
    alarm_.set(next_deadline());
    io_.run_one();
    for (int more = 0; more < kMaxEventsAtOnce && io_.poll_one() > 0; ++more) {
    }
    after_events();
  }
  return finish();
}

void Job::after_events() {
  if (output_.has_room()) server_.give_credit();
  output_.report_failures();
  check_starter();
  on_timers();
}

void Job::start_agents() {
  plan_.variables.emplace_back(kPortVariable, text(server_.port()));
  plan_.variables.emplace_back(kTokenVariable, server_.token());
  plan_.silence_limit_s = silence_limit_ms(value_for_ranks(plan_, kPeerTimeoutVariable)) / 1000;
  starter_ = make_starter(io_, plan_, options_.verbose, [this](std::string_view output) {
    output_.console().write(Stream::kStderr, Console::kNoOwner, output);
  });
  starter_->start();
  if (options_.verbose) {
    output_.print_line(
        text("controller ", plan_.controller.controller, ": ", plan_.controller.reason));
    for (const std::string& command : starter_->commands()) output_.print_line(command);
  }
}

std::optional<Job::TimePoint> Job::next_deadline() {
  std::optional<TimePoint> next;
  for (const auto& timer :
       {timeout_at_, start_timeout_at_, end_starter_at_, kill_starter_at_, give_up_at_,
        output_.files().next_deadline(), rendezvous_.next_deadline()})
    keep_earlier(next, timer);
  const TimePoint now = Clock::now();
  for (const auto& output : outputs_) keep_earlier(next, output->show_partial(now));
  return next;
}

void Job::on_timers() {
  const TimePoint now = Clock::now();
  rendezvous_.on_time(now);
  const auto due = [now](std::optional<TimePoint>& timer) {
    if (!timer || now < *timer) return false;
    timer.reset();
    return true;
  };
  if (due(start_timeout_at_) && !stopping() && !all_connected()) {
    record_.timeout_s = options_.start_timeout_s;
    begin_stop(StopCause::kStartTimeout, SIGTERM, options_.fail_grace_s);
  }
  if (due(timeout_at_) && !stopping()) {
    record_.timeout_s = options_.timeout_s;
    begin_stop(StopCause::kTimeout, SIGTERM, options_.grace_s);
  }
  if (due(end_starter_at_) && !starter_ended_) {
    starter_->terminate();
    kill_starter_at_ = now + kStarterGrace;
  }
  if (due(kill_starter_at_) && !starter_ended_) {
    starter_->kill();
    server_.close_all();
  }
  if (due(give_up_at_)) {
    server_.close_all();
    starter_->close_output();
  }
}

void Job::on_signal(int signal) {
  if (finishing_) {
    // Shortens the wait for the reader of the output.
    hurried_ = hurried_ || signal == SIGINT || signal == SIGTERM || signal == SIGQUIT;
  } else if (signal == SIGUSR1 || signal == SIGUSR2) {
    for (int rank = 0; rank < size(); ++rank)
      server_.send(rank, {.signal = signal, .stop = false, .kill_after_ms = -1});
  } else if (signal != SIGCHLD) {
    on_user_signal(signal);
  }
}

bool Job::may_restart() const noexcept {
  return record_.cause == StopCause::kRankFailed && !interrupted_ && !hurried_;
}

void Job::on_user_signal(int signal) {
  interrupted_ = true;
  const TimePoint now = Clock::now();
  if (record_.cause == StopCause::kUserSignal) {
    if (signal == record_.user_signal && now - user_signal_at_ < kSameRequest) return;
    if (!hurried_) record_.grace_s = std::chrono::duration<double>(now - user_signal_at_).count();
    hurried_ = true;
    return kill_now();
  }
  if (stopping()) return kill_now();  // the survivors of a failed job get no second grace period
  record_.user_signal = signal;
  user_signal_at_ = now;
  begin_stop(StopCause::kUserSignal, signal, options_.grace_s);
}

void Job::begin_stop(StopCause cause, int signal, double grace_s) {
  if (stopping()) return;
  record_.cause = cause;
  record_.stop_ns = realtime_ns();
  stop_signal_ = signal;
  stop_grace_ms_ = whole_ms(grace_s);
  for (int rank = 0; rank < size(); ++rank) order_stop(rank);
  // Only the starter can stop ranks that have not connected yet.
  const bool reached_all = all_connected() || cause == StopCause::kRankFailed;
  end_starter_at_ =
      Clock::now() +
      (reached_all ? milliseconds(stop_grace_ms_) + kKillDelay + kStarterGrace : milliseconds(0));
  if (starter_ended_) await_last_reports();
  release_if_settled();
}

void Job::order_stop(int rank) {
  if (!record_.rank(rank).connected || is_settled(rank)) return;
  record_.rank(rank).ordered_to_stop = true;
  SignalOrder order{.signal = stop_signal_, .stop = true, .kill_after_ms = stop_grace_ms_};
  if (record_.cause == StopCause::kRankFailed &&
      (record_.rank(rank).uses_hvd || rendezvous_.has_requested_join(rank))) {
    // hvd reports the loss to the rank, which may save its state before it ends.
    order.after_ms = stop_grace_ms_;
    order.kill_after_ms = static_cast<int>(kKillDelay.count());
  }
  server_.send(rank, order);
}

void Job::kill_now() {
  for (int rank = 0; rank < size(); ++rank) {
    if (!is_settled(rank))
      server_.send(rank, {.signal = SIGKILL, .stop = true, .kill_after_ms = 0});
  }
  end_starter_at_ = Clock::now() + milliseconds(200);
}

void Job::on_hello(const Hello& hello, const std::string& address) {
  for (const Seat& seat : hello.seats) admit(seat, hello, address);
  if (!stopping() && all_connected()) order_starts();
}

void Job::admit(const Seat& seat, const Hello& hello, const std::string& address) {
  const int rank = seat.rank;
  RankRecord& record = record_.rank(rank);
  record.connected = true;
  record.connected_ns = realtime_ns();
  record.host = hello.host;
  record.local_rank = seat.local_rank;
  locations_[static_cast<std::size_t>(rank)] = {.host = hello.host,
                                                .local_rank = seat.local_rank,
                                                .address = address,
                                                .master_port = hello.master_port};
  if (options_.verbose && rank == 0 && seat.omp_threads > 0) {
    output_.print_line(text("OMP_NUM_THREADS is unset: set to ", seat.omp_threads,
                            ", the cores divided by the ranks of a host"));
  }
  if (options_.verbose && seat.bound_cpus > 0) {
    output_.print_line(text("rank ", plan_.first_rank + rank, " is bound to ", seat.bound_cpus,
                            " hardware threads of its host"));
  }
  if (stopping()) order_stop(rank);
}

void Job::order_starts() {
  const std::vector<StartOrder> orders = plan_starts(locations_);
  for (int rank = 0; rank < size(); ++rank)
    server_.start(rank, orders[static_cast<std::size_t>(rank)]);
}

void Job::on_started(int rank, const ProgramStarted& started) {
  RankRecord& record = record_.rank(rank);
  record.pid = started.pid;
  if (options_.verbose) {
    output_.print_line(text("rank ", plan_.first_rank + rank, " runs on ", record.host,
                            ", local rank ", record.local_rank, ", pid ", started.pid));
  }
}

void Job::on_notice(int rank, const Notice& notice) {
  Notice local = notice;
  local.about -= plan_.first_rank;
  if (local.about < 0 || local.about >= size()) local.about = -1;
  apply_notice(record_.rank(rank), std::move(local));
}

void Job::on_rendezvous(int rank, const RendezvousBytes& bytes) {
  rendezvous_.receive(rank, bytes, Clock::now());
}

void Job::on_output(int rank, Stream stream, std::string_view bytes) {
  outputs_[static_cast<std::size_t>(rank)]->feed(stream, bytes, Clock::now());
}

void Job::on_ended(int rank, const Ended& ended) {
  check_starter();  // first, because the starter's end may be the cause of this one
  RankRecord& record = record_.rank(rank);
  record.ended = ended;
  rendezvous_.rank_ended(rank, describe(ended), record.loss.has_value(), Clock::now());
  server_.give_full_credit(rank);
  if (ended.code != 0 && !stopping()) {
    begin_stop(ended.stopped ? StopCause::kStarterEnded : StopCause::kRankFailed, SIGTERM,
               options_.fail_grace_s);
  }
  if (abandoned_rank(record_.ranks))
    begin_stop(StopCause::kRankFailed, SIGTERM, options_.fail_grace_s);
}

void Job::on_drained(int rank) {
  record_.rank(rank).drained = true;
  outputs_[static_cast<std::size_t>(rank)]->finish();
  if (!stopping() && !must_be_held(record_.rank(rank))) server_.release(rank);
  release_if_settled();
}

void Job::on_lost(int rank) {
  record_.rank(rank).lost_ns = realtime_ns();
  rendezvous_.rank_ended(rank, "its agent is lost", false, Clock::now());
  outputs_[static_cast<std::size_t>(rank)]->finish();
  if (!stopping()) {
    begin_stop(StopCause::kRankFailed, SIGTERM, options_.fail_grace_s);
  } else {
    release_if_settled();
  }
}

void Job::release_if_settled() {
  if (!all_settled()) return;
  for (int rank = 0; rank < size(); ++rank) server_.release(rank);
  // The starter waits a long time for a lost host.
  const bool lost = std::any_of(record_.ranks.begin(), record_.ranks.end(),
                                [](const RankRecord& rank) { return rank.lost_ns.has_value(); });
  const TimePoint soon = Clock::now() + kStarterGrace;
  if (lost && end_starter_at_ && soon < *end_starter_at_) end_starter_at_ = soon;
  if (starter_ended_) await_last_reports();
}

void Job::check_starter() {
  for (const JobStarter::Exit& exit : starter_->reap()) {
    const bool all_connected = std::all_of(exit.ranks.begin(), exit.ranks.end(), [this](int rank) {
      return record_.rank(rank).connected;
    });
    if (!all_connected || exit.ends_ranks)
      begin_stop(StopCause::kStarterEnded, SIGTERM, options_.fail_grace_s);
    if (exit.last) on_last_starter_end();
  }
}

void Job::on_last_starter_end() {
  starter_ended_ = true;
  end_starter_at_.reset();
  kill_starter_at_.reset();
  if (all_settled() || stopping()) await_last_reports();
}

/// Limits the time for the last reports. Only the agents can still end the ranks.
void Job::await_last_reports() {
  give_up_at_ = Clock::now() +
                (all_settled() ? milliseconds(0) : milliseconds(stop_grace_ms_) + kKillDelay) +
                kReportTimeout;
}

bool Job::all_settled() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (record_.rank(rank).connected && !is_settled(rank)) return false;
  }
  return true;
}

bool Job::is_settled(int rank) const {
  const RankRecord& record = record_.rank(rank);
  return record.drained || record.lost_ns.has_value();
}

bool Job::all_connected() const {
  return std::all_of(record_.ranks.begin(), record_.ranks.end(),
                     [](const RankRecord& rank) { return rank.connected; });
}

bool Job::over() const {
  return starter_ended_ && !starter_->has_output() && server_.open_connections() == 0;
}

void Job::on_reader_gone(const std::string& stream) {
  record_.lost_reader = stream;
  begin_stop(StopCause::kReaderGone, SIGTERM, options_.fail_grace_s);
}

void Job::collect_outcome() {
  record_.ended_ns = realtime_ns();
  starter_->explain(record_);
  mark_lost_ranks(record_.ranks);
  const auto leaver = early_leaver(record_);
  if (const auto blamed = leaver ? leaver : first_failure(record_.ranks)) {
    record_.stderr_tail = outputs_[static_cast<std::size_t>(*blamed)]->stderr_tail();
  }
}

int Job::finish() {
  finishing_ = true;
  for (const auto& output : outputs_) output->finish();
  output_.write_files(hurried_);
  output_.console().write(Stream::kStderr, Console::kNoOwner, starter_->finish_output());
  collect_outcome();
  if (!options_.verbose && exit_code(record_) != 0 && !is_explained(record_))
    output_.console().write(Stream::kStderr, Console::kNoOwner, starter_->held_output());
  const std::string message = final_message(record_);
  if (options_.tag || !message.empty()) output_.console().finish_lines();
  output_.console().write(Stream::kStderr, Console::kNoOwner, message);
  output_.write_out(exit_code(record_) != 0, hurried_);
  return exit_code(record_);
}

std::vector<StartOrder> plan_starts(const std::vector<RankLocation>& locations) {
  std::vector<StartOrder> orders(locations.size());
  if (locations.empty()) return orders;
  std::map<std::string, int> nodes;
  std::map<int, int> crossing;  // ranks by local rank
  for (std::size_t rank = 0; rank < locations.size(); ++rank) {
    const RankLocation& location = locations[rank];
    orders[rank].node = nodes.emplace(location.host, static_cast<int>(nodes.size())).first->second;
    orders[rank].cross_rank = crossing[location.local_rank]++;
  }
  // See Note [Rendezvous under hvdrun] in agent.cpp.
  const RankLocation& first = locations.front();
  const bool beside_hvdrun = is_loopback(first.address);
  for (std::size_t rank = 0; rank < locations.size(); ++rank) {
    StartOrder& order = orders[rank];
    if (!beside_hvdrun) order.address = first.address;
    order.master_port = first.master_port;
    const auto peer =
        std::find_if(locations.begin(), locations.end(), [&](const RankLocation& location) {
          return location.host != locations[rank].host && !is_loopback(location.address);
        });
    if (peer != locations.end()) order.peer = peer->address;
    order.nodes = static_cast<int>(nodes.size());
    order.cross_size = crossing[locations[rank].local_rank];
  }
  return orders;
}

}  // namespace hvd::launcher
