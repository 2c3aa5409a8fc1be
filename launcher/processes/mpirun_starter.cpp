#include "processes/mpirun_starter.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <numeric>

#include "processes/job_folder.h"
#include "system/error.h"

namespace hvd::launcher {

MpirunStarter::MpirunStarter(LaunchSpec spec, std::string hostname, bool verbose, Show show)
    : spec_(std::move(spec)),
      hostname_(std::move(hostname)),
      verbose_(verbose),
      show_(std::move(show)) {}

std::vector<std::string> MpirunStarter::commands() const {
  return {format_command(build_mpirun_command(spec_))};
}

void MpirunStarter::start() {
  remove_abandoned(TemporaryFolder::parent(), TemporaryFolder::kPrefix);
  session_folder_.emplace();
  spec_.session_folder = session_folder_->path();
  const MpirunCommand command = build_mpirun_command(spec_);

  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  SpawnOptions spawn_options;
  spawn_options.argv = command.argv;
  spawn_options.environment = spec_.environment;
  for (const auto& [name, value] : command.added_variables)
    set_variable(spawn_options.environment, name, value);
  spawn_options.stdout_fd = output.write_end.get();
  spawn_options.stderr_fd = errors.write_end.get();
  spawn_options.parent_death_signal = SIGTERM;
  // A terminal's Ctrl-C reaches mpirun too, which would kill the ranks at once. The signal is
  // blocked there, so that hvdrun stops the ranks after its grace period.
  spawn_options.blocked_signals = {SIGINT, SIGQUIT, SIGHUP};
  const SpawnResult result = spawn(spawn_options);
  if (result.error != 0) {
    throw LaunchError(
        result.error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun,
        "cannot run '" + command.argv[0] + "': " + std::strerror(result.error) +
            "; expected Open MPI's mpirun in PATH: install it, name it with HVD_MPIRUN, or start "
            "the ranks without it: --controller ucx");
  }
  mpirun_ = result.pid;
  stdout_ = std::move(output.read_end);
  stderr_ = std::move(errors.read_end);
}

void MpirunStarter::add_to(Poller& poller) {
  for (UniqueFd* from : {&stdout_, &stderr_}) {
    if (*from) poller.add(from->get(), POLLIN, [this, from](short) { on_output(*from); });
  }
}

void MpirunStarter::on_output(UniqueFd& from) {
  if (!from) return;
  std::array<char, 8192> buffer;
  const ssize_t count = ::read(from.get(), buffer.data(), buffer.size());
  if (count < 0 && errno == EINTR) return;
  if (count <= 0) return from.reset();
  const std::string_view bytes(buffer.data(), static_cast<std::size_t>(count));
  const std::string useful = log_.feed(bytes);
  show_(verbose_ ? bytes : useful);
}

std::vector<JobStarter::End> MpirunStarter::take_ends() {
  if (end_ || mpirun_ < 0) return {};
  end_ = try_wait(mpirun_);
  if (!end_) return {};
  End end{.ranks = std::vector<int>(static_cast<std::size_t>(spec_.np)),
          .last = true,
          .ends_ranks = true};
  std::iota(end.ranks.begin(), end.ranks.end(), 0);
  return {std::move(end)};
}

void MpirunStarter::terminate() {
  if (end_) return;
  stopped_ = true;
  ::kill(mpirun_, SIGTERM);
}

void MpirunStarter::kill() {
  if (end_) return;
  stopped_ = true;
  ::kill(mpirun_, SIGKILL);
}

void MpirunStarter::close_output() {
  stdout_.reset();
  stderr_.reset();
}

std::string MpirunStarter::finish_output() {
  const std::string rest = log_.finish();
  return verbose_ ? std::string() : rest;
}

void MpirunStarter::explain(JobRecord& record) const {
  record.starter = "mpirun";
  if (end_) record.starter_code = end_->code;
  if (end_) record.starter_signal = stopped_ ? 0 : end_->signal;
  record.starter_spoke = log_.spoke();
  if (log_.abort()) record.abort_rank = log_.abort()->rank;
  record.improper_rank = log_.improper_rank();
  record.lacks_slots = log_.lacks_slots();
  record.lost_host = log_.lost_host();
  record.lacks_executable = log_.lacks_executable();
  if (record.lost_host) record.suspect_hosts = suspect_hosts();
  take_losses_from_mpirun(record);
}

/// mpirun prints the same text for every reason, and the text does not always name the host.
std::vector<std::string> MpirunStarter::suspect_hosts() const {
  std::vector<std::string> others, named;
  for (const Host& host : spec_.hosts) {
    if (is_local_host(host.name, hostname_)) continue;
    others.push_back(host.name);
    if (log_.about_hosts().find(host.name) != std::string::npos) named.push_back(host.name);
  }
  return named.empty() ? others : named;
}

}  // namespace hvd::launcher
