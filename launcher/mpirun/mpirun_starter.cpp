#include "mpirun/mpirun_starter.h"

#include <unistd.h>

#include <numeric>
#include <utility>

#include "command/mpirun_command.h"

namespace hvd::launcher {

MpirunStarter::MpirunStarter(asio::io_context& io, LaunchPlan plan, bool verbose, Show show)
    : io_(io), plan_(std::move(plan)), verbose_(verbose), show_(std::move(show)) {}

std::vector<std::string> MpirunStarter::commands() const {
  return {format_command(build_mpirun_command(plan_))};
}

void MpirunStarter::start() {
  remove_abandoned(TemporaryFolder::parent(), TemporaryFolder::kPrefix);
  session_folder_.emplace();
  plan_.session_folder = session_folder_->path();
  const MpirunCommand command = build_mpirun_command(plan_);

  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  SpawnOptions spawn_options;
  spawn_options.argv = command.argv;
  spawn_options.environment = plan_.environment;
  for (const auto& [name, value] : command.added_variables)
    set_variable(spawn_options.environment, name, value);
  spawn_options.stdout_fd = output.write_end.get();
  spawn_options.stderr_fd = errors.write_end.get();
  spawn_options.parent_death_signal = SIGTERM;
  // A terminal's Ctrl-C reaches mpirun too, which would kill the ranks at once. mpirun starts with
  // the signal blocked, so that hvdrun stops the ranks after its grace period.
  spawn_options.blocked_signals = {SIGINT, SIGQUIT, SIGHUP};
  mpirun_ =
      start_process(spawn_options,
                    "; expected the mpirun of Open MPI, MPICH or Intel MPI in PATH: install "
                    "it, name it with HVD_MPIRUN, or start the ranks without it: --controller ucx");
  const auto handler = [this](std::string_view bytes) { on_output(bytes); };
  stdout_.emplace(io_, std::move(output.read_end), handler);
  stderr_.emplace(io_, std::move(errors.read_end), handler);
}

void MpirunStarter::on_output(std::string_view bytes) {
  const std::string useful = log_.feed(bytes);
  show_(verbose_ ? bytes : useful);
  // Hydra lets the supervisors on the other hosts continue.
  if (log_.lacks_executable() && plan_.mpirun_kind != MpirunKind::kOpenMpi && !stopped_) kill();
}

bool MpirunStarter::has_output() const {
  return (stdout_ && stdout_->is_open()) || (stderr_ && stderr_->is_open());
}

std::vector<JobStarter::Exit> MpirunStarter::reap() {
  if (end_ || mpirun_ < 0) return {};
  end_ = try_wait(mpirun_);
  if (!end_) return {};
  Exit exit{.ranks = std::vector<int>(static_cast<std::size_t>(plan_.np)),
            .last = true,
            .ends_ranks = true};
  std::iota(exit.ranks.begin(), exit.ranks.end(), 0);
  return {std::move(exit)};
}

void MpirunStarter::stop(int signal) {
  if (end_) return;
  stopped_ = true;
  ::kill(mpirun_, signal);
}

void MpirunStarter::close_output() {
  if (stdout_) stdout_->close();
  if (stderr_) stderr_->close();
}

std::string MpirunStarter::finish_output() {
  const std::string rest = log_.finish();
  return verbose_ ? std::string() : rest;
}

void MpirunStarter::explain(JobRecord& record) const {
  record.starter = "mpirun";
  if (end_) record.starter_code = end_->code;
  if (end_) record.starter_signal = stopped_ ? 0 : end_->signal;
  record.starter_wrote = log_.wrote();
  record.abort_rank = log_.abort_rank();
  record.improper_rank = log_.improper_rank();
  record.lacks_slots = log_.lacks_slots();
  record.lost_host = log_.lost_host();
  record.lacks_executable = log_.lacks_executable();
  if (record.lost_host) record.suspect_hosts = suspect_hosts();
  mark_ranks_lost_by_mpirun(record);
}

/// The remote hosts that mpirun's output names, or all remote hosts if it names none. mpirun prints
/// the same text for every reason, and the text does not always name the host.
std::vector<std::string> MpirunStarter::suspect_hosts() const {
  std::vector<std::string> others, named;
  for (const Host& host : plan_.hosts) {
    if (is_local_host(host.name, plan_.hostname)) continue;
    others.push_back(host.name);
    if (log_.about_hosts().find(host.name) != std::string::npos) named.push_back(host.name);
  }
  return named.empty() ? others : named;
}

}  // namespace hvd::launcher
