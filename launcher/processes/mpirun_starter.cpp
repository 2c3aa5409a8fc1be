#include "processes/mpirun_starter.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <numeric>

#include "command/mpirun_command.h"

namespace hvd::launcher {

MpirunStarter::MpirunStarter(LaunchPlan plan, bool verbose, Show show)
    : plan_(std::move(plan)), verbose_(verbose), show_(std::move(show)) {}

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
