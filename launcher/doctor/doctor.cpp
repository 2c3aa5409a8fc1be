#include "doctor/doctor.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/text.h"
#include "command/hosts.h"
#include "doctor/diagnosis.h"
#include "doctor/records.h"
#include "mpirun/job_folder.h"
#include "reports/rank_output.h"
#include "system/children.h"
#include "system/error.h"
#include "system/process.h"
#include "system/text.h"
#include "version.h"

namespace hvd::launcher::doctor {
namespace {

constexpr double kHostSeconds = 6;
constexpr double kJobSeconds = 15;

struct DoctorOptions {
  std::optional<int> np;
  std::vector<Host> hosts;
  std::vector<std::string> passed_on;  ///< options of hvdrun for the job
  bool json = false;
  std::string help;  ///< to be printed instead
};

DoctorOptions parse(const std::vector<std::string>& arguments) {
  DoctorOptions options;
  std::string host_list, hostfile, controller, rsh;
  std::vector<std::string> exports;
  CLI::App app{
      "Runs a small job on the given hosts, measures it, and reports what is wrong and how to mend "
      "it. Without hosts: two ranks on this one. Exit code: 1 if a finding is an error, else 0. "
      "See "
      "docs/doctor.md.",
      "hvdrun doctor"};
  app.add_option("-n,--np", options.np, "Number of ranks (also -np); default: one per host, or 2")
      ->type_name("N")
      ->check(CLI::Range(1, 100'000));
  auto* list = app.add_option("-H,--host", host_list, "Hosts and their slots: h1,h2 or h1:2,h2:2")
                   ->type_name("HOSTS");
  app.add_option("--hostfile", hostfile, "File with lines 'HOST slots=N' or 'HOST:N'")
      ->type_name("FILE")
      ->excludes(list);
  app.add_option("--controller", controller, "As hvdrun's: mpi, ucx or auto")->type_name("WHAT");
  app.add_option("--rsh", rsh, "Remote shell, run as AGENT HOST COMMAND... (ssh)")
      ->type_name("AGENT");
  app.add_option("-x", exports, "Give the ranks VAR, or VAR=VALUE (repeat)")
      ->type_name("VAR[=VALUE]")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  app.add_flag("--json", options.json, "Print JSON, whose schema docs/doctor.md describes");
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  std::replace(reversed.begin(), reversed.end(), std::string("-np"), std::string("--np"));
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
  } catch (const CLI::ParseError& error) {
    throw LaunchError(ExitCode::kUsage,
                      text("doctor: ", error.what(), "; 'hvdrun doctor --help' lists the options"));
  }
  if (!host_list.empty()) options.hosts = parse_host_list(host_list);
  if (!hostfile.empty()) options.hosts = read_hostfile(hostfile);
  for (const auto& [name, value] : {std::pair("--controller", controller), std::pair("--rsh", rsh)})
    if (!value.empty()) options.passed_on.insert(options.passed_on.end(), {name, value});
  for (const std::string& exported : exports)
    options.passed_on.insert(options.passed_on.end(), {"-x", exported});
  return options;
}

/// The program beside hvdrun, or in libexec of the same installation.
std::string rank_program() {
  const auto folder = std::filesystem::path(own_executable()).parent_path();
  const auto installed = (folder / HVD_DOCTOR_FOLDER / "hvd-doctor-rank").lexically_normal();
  for (const auto& path : {folder / "hvd-doctor-rank", installed})
    if (::access(path.c_str(), X_OK) == 0) return path;
  throw LaunchError(ExitCode::kNotFound,
                    text("doctor: hvd-doctor-rank not found: expected it beside hvdrun or at ",
                         installed, "; install hvd again"));
}

/// The hosts, with the slots that the job uses.
std::vector<HostResult> chosen_hosts(const DoctorOptions& options) {
  std::vector<HostResult> hosts;
  std::vector<Host> given = options.hosts;
  if (!given.empty()) mark_local_hosts(given, own_names());
  for (const Host& host : given)
    hosts.push_back({.name = host.name,
                     .slots = host.slots,
                     .user = host.user,
                     .local = host.local,
                     .facts = {}});
  if (hosts.empty())
    hosts.push_back(
        {.name = own_hostname(), .slots = options.np.value_or(2), .local = true, .facts = {}});
  if (!options.np && hosts.size() == 1 && options.hosts.size() == 1)
    hosts.front().slots = std::max(2, hosts.front().slots);
  if (!options.np && hosts.size() > 1)
    for (HostResult& host : hosts) host.slots = 1;
  return hosts;
}

/// Collects the facts of each host: this host's in a child process, the others' through hvdrun.
void collect_facts(const DoctorOptions& options, const std::string& program,
                   std::vector<HostResult>& hosts) {
  std::vector<ChildCommand> commands;
  for (const HostResult& host : hosts) {
    if (host.local) {
      commands.push_back({{program, "--host"}});
      continue;
    }
    std::vector<std::string> argv = {own_executable(),
                                     "-np",
                                     "1",
                                     "-H",
                                     format_hosts({{.name = host.name, .user = host.user}}),
                                     "--no-tag",
                                     "--bind",
                                     "none",
                                     "--tail",
                                     "0",
                                     "--fail-grace",
                                     "1",
                                     "--start-timeout",
                                     text(static_cast<int>(kHostSeconds))};
    argv.insert(argv.end(), options.passed_on.begin(), options.passed_on.end());
    argv.insert(argv.end(), {program, "--host"});
    commands.push_back({std::move(argv)});
  }
  const std::vector<ChildResult> results = run_children(commands, kHostSeconds + 2);
  for (std::size_t i = 0; i < hosts.size(); ++i)
    hosts[i].facts = read_record<HostFacts>(results[i].out, explain(results[i]));
}

std::string file_content(const std::filesystem::path& path) {
  std::ifstream stream(path);
  std::ostringstream content;
  content << stream.rdbuf();
  return content.str();
}

/// Runs the job that measures, on the hosts that have answered.
JobResult run_job(const DoctorOptions& options, const std::string& program,
                  const std::vector<HostResult>& hosts) {
  JobResult job;
  std::vector<Host> reached;
  for (const HostResult& host : hosts)
    if (host.facts) reached.push_back({.name = host.name, .slots = host.slots, .user = host.user});
  if (reached.empty()) {
    job.error = "no host could collect its facts";
    return job;
  }
  const int slots = total_slots(reached);
  job.np = std::min(options.np.value_or(slots), slots);
  const TemporaryFolder folder;
  std::vector<std::string> argv = {own_executable(), "-np", text(job.np)};
  if (!options.hosts.empty()) argv.insert(argv.end(), {"-H", format_hosts(reached)});
  argv.insert(argv.end(), options.passed_on.begin(), options.passed_on.end());
  std::vector<std::string> repeat = argv;
  repeat.insert(repeat.end(), {program, "--rank"});
  for (std::string& word : repeat) word = shell_quote(word);
  job.command = join_text(repeat, " ");
  argv.insert(argv.end(), {"-x", "HVD_LOG_LEVEL=debug", "-x", "UCX_LOG_LEVEL=info", "--verbose",
                           "--tail", "0", "--start-timeout", text(static_cast<int>(kHostSeconds)),
                           "--timeout", text(static_cast<int>(kJobSeconds)), "--fail-grace", "2",
                           "--output-filename", folder.path(), program, "--rank"});
  const ChildResult result = run_children({{std::move(argv)}}, kJobSeconds + 3).front();
  std::vector<RankOutputs> outputs;
  for (int rank = 0; rank < job.np; ++rank) {
    const auto files = folder.path() / rank_folder(rank, job.np);
    outputs.push_back({file_content(files / "stdout"), file_content(files / "stderr")});
  }
  read_job(result, outputs, job);
  return job;
}

}  // namespace

int run_doctor(const std::vector<std::string>& arguments) {
  const auto begin = std::chrono::steady_clock::now();
  const DoctorOptions options = parse(arguments);
  if (!options.help.empty()) {
    std::fputs(options.help.c_str(), stdout);
    return 0;
  }
  const std::string program = rank_program();
  Diagnosis diagnosis;
  diagnosis.hvdrun_version = kVersion;
  diagnosis.hosts = chosen_hosts(options);
  collect_facts(options, program, diagnosis.hosts);
  diagnosis.job = run_job(options, program, diagnosis.hosts);
  diagnosis.findings = find_problems(diagnosis);
  diagnosis.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::string printed = options.json ? to_json(diagnosis).dump(2) + "\n" : to_text(diagnosis);
  std::fputs(printed.c_str(), stdout);
  return exit_code(diagnosis);
}

}  // namespace hvd::launcher::doctor
