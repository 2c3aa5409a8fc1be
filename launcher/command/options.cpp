#include "command/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <memory>

#include "base/text.h"
#include "command/option_sources.h"
#include "command/probes.h"
#include "command/rank_environment.h"
#include "system/error.h"
#include "system/text.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kDescription =
    "Runs PROGRAM on N ranks, tags their output, and reports which rank failed first and why.";

constexpr const char* kFooter =
    "\nExit code: the first failing rank's own (128 + signal when killed); 2 usage; 69 not enough "
    "slots or a host out of\n"
    "reach; 70 internal; 75, 76 the end of an elastic job; 124 --timeout; 126, 127 the program "
    "cannot be run, is not found;\n"
    "130, 143 SIGINT, SIGTERM.\n"
    "HVD_MPIRUN names another mpirun (Open MPI, MPICH or Intel MPI). See docs/launching.md.";

class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: hvdrun -np N [-H h1:2,h2:2 | --hostfile FILE] [OPTIONS] [--] PROGRAM "
           "[ARGS...]\n"
           "       hvdrun --nproc-per-node N [--nnodes N --node-rank K --master-addr HOST] "
           "[OPTIONS] [--] PROGRAM [ARGS...]\n";
  }
};

/// The option values that CLI11 fills in as text, before they are checked.
struct RawOptions {
  std::optional<std::string> np;
  std::string host_list, hostfile, bind = "auto", controller = "auto", rsh, mpi_args, output_folder,
                                   timeline, config_file;
  std::vector<std::string> exports;
  bool no_tag = false, dry_run = false, check_build = false, version = false, print_config = false;
  NodeOptionTexts node;
  ElasticOptionTexts elastic;
  std::string log_dir, redirects, tee, local_ranks;
  std::string ignored;
  bool module = false, no_python = false;
};

constexpr const char* kHosts = "Ranks and hosts";
constexpr const char* kElastic =
    "Elastic jobs (any of the first five selects one; docs/elastic.md)";
constexpr const char* kNodes = "Ranks and nodes, as for torchrun (the same line on every node)";
constexpr const char* kOutput = "Output";
constexpr const char* kTimes = "Times";
constexpr const char* kInformation = "Information";

/// torchrun's options, which also have a spelling with underscores, and whose values may also come
/// from a variable: PET_NNODES for --nnodes.
constexpr std::array kTorchrunOptions = {
    "nnodes",      "nproc-per-node",   "node-rank",     "master-addr",
    "master-port", "rdzv-backend",     "rdzv-endpoint", "rdzv-id",
    "standalone",  "max-restarts",     "role",          "no-python",
    "log-dir",     "redirects",        "tee",           "local-ranks-filter",
    "rdzv-conf",   "monitor-interval", "start-method",  "module"};
/// The number of these options, counted from the first, that make hvdrun start the ranks of one
/// node.
constexpr std::size_t kNodeOptions = 9;
/// Options that are not settings of a job.
constexpr std::array kActions = {"help",    "version",      "check-build",
                                 "dry-run", "print-config", "config-file"};

/// Checks a number of seconds. CLI11's own checks would print their limits with 300 digits.
CLI::Validator seconds(bool zero_is_allowed) {
  return CLI::Validator(
      [zero_is_allowed](std::string& given) -> std::string {
        constexpr double kMaxSeconds = 1e9;
        char* end = nullptr;
        const double value = std::strtod(given.c_str(), &end);
        const bool number = !given.empty() && *end == '\0';
        if (number && (value > 0 || (zero_is_allowed && value == 0)) && value <= kMaxSeconds)
          return "";
        return text("expected a number of seconds", zero_is_allowed ? ", 0 or more" : " above 0",
                    ", got '", given, "'");
      },
      "");
}

void declare_hosts(CLI::App& app, RawOptions& raw) {
  app.add_option("-n,--np", raw.np, "Number of ranks (also -np)")->type_name("N")->group(kHosts);
  auto* list = app.add_option("-H,--host", raw.host_list,
                              "Hosts and their slots: h1:2,user@h2:2,[fd00::3]:2")
                   ->type_name("HOSTS")
                   ->group(kHosts);
  app.add_option("--hostfile", raw.hostfile, "File with lines 'HOST slots=N' or 'HOST:N'")
      ->type_name("FILE")
      ->group(kHosts)
      ->excludes(list);
  app.add_option("--bind", raw.bind, "Pin ranks: auto, none, core or numa")
      ->type_name("WHAT")
      ->group(kHosts)
      ->capture_default_str();
  app.add_option("--controller", raw.controller,
                 "What starts the ranks: mpi (mpirun), ucx (hvdrun itself) or auto (ucx, "
                 "but mpi in an allocation and for a program linked with MPI)")
      ->type_name("WHAT")
      ->group(kHosts)
      ->capture_default_str();
  app.add_option("--rsh", raw.rsh, "Remote shell, run as AGENT HOST COMMAND... (ssh)")
      ->type_name("AGENT")
      ->group(kHosts);
  app.add_option("-x", raw.exports,
                 "Give the ranks VAR, from the environment or with this value (repeat)")
      ->type_name("VAR[=VALUE]")
      ->group(kHosts)
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--mpi-args", raw.mpi_args, "More arguments for mpirun, quoted as one")
      ->type_name("ARGS")
      ->group(kHosts);
}

void declare_nodes(CLI::App& app, RawOptions& raw) {
  const auto add = [&](const char* name, std::string& value, const char* type,
                       const char* description) {
    app.add_option(name, value, description)->type_name(type)->group(kNodes);
  };
  add("--nnodes", raw.node.nodes, "N|A:B",
      "Number of nodes (1), or a range for an elastic job, whose nodes join and leave");
  add("--nproc-per-node", raw.node.processes, "N",
      "Ranks on each node: a number, auto, cpu or gpu");
  add("--node-rank", raw.node.rank, "K", "This node's rank, from 0");
  add("--master-addr", raw.node.master_address, "HOST", "The host of node 0");
  add("--master-port", raw.node.master_port, "PORT", "A free port there (29500)");
  add("--rdzv-backend", raw.node.backend, "WHAT", "static, or c10d: the nodes need no --node-rank");
  add("--rdzv-endpoint", raw.node.endpoint, "HOST:PORT", "Where the nodes find each other");
  add("--rdzv-id", raw.node.run_id, "ID", "The name of the job");
  app.add_flag("--standalone", raw.node.standalone, "One node, beside other jobs")->group(kNodes);
  add("--role", raw.node.role, "NAME", "Value of ROLE_NAME for the ranks (default)");
  add("--max-restarts", raw.node.max_restarts, "N",
      "How often all ranks are started again after one has failed (0)");
  app.add_flag("-m,--module", raw.module, "PROGRAM is a Python module: runs python3 -u -m PROGRAM")
      ->group(kNodes);
  app.add_flag("--no-python", raw.no_python,
               "Run a PROGRAM whose name ends in .py without python3 -u")
      ->group(kNodes);
  for (const char* const ignored : {"--rdzv-conf", "--monitor-interval", "--start-method"})
    add(ignored, raw.ignored, "VALUE", "Accepted and not used");
}

void declare_elastic(CLI::App& app, RawOptions& raw) {
  const auto add = [&](const char* name, std::string& value, const char* type,
                       const char* description) {
    return app.add_option(name, value, description)->type_name(type)->group(kElastic);
  };
  add("--min-np", raw.elastic.min_np, "N", "Fewest ranks with which the job goes on (-np)");
  add("--max-np", raw.elastic.max_np, "N", "Most ranks, which the job grows to (-np)");
  add("--spares", raw.elastic.spares, "N", "Workers beyond that, which wait to replace a rank (0)");
  add("--reset-limit", raw.elastic.max_resets, "N",
      "End the job instead of the change after N changes of the ranks");
  add("--failure-limit", raw.elastic.max_failures, "N",
      "End the job when its program has thrown an exception N times in a row at the same or an "
      "earlier commit (10; 0: no limit)");
  add("--host-discovery-script", raw.elastic.discovery, "SCRIPT",
      "A program that hvdrun runs every second; it prints the hosts to use now, as 'HOST' or "
      "'HOST:SLOTS'");
  add("--slots", raw.elastic.slots, "N", "Slots of a host that SCRIPT prints without a number (1)");
  app.add_option("--blacklist-cooldown-range", raw.elastic.cooldown,
                 "How long a host that fails is left out at first, and at most (10 3600)")
      ->type_name("S")
      ->group(kElastic)
      ->expected(2)
      ->take_all()
      ->allow_extra_args(false)
      ->check(seconds(false));
  add("--elastic-timeout", raw.elastic.timeout, "S",
      "End the job when it has had too few ranks for S seconds (600)")
      ->check(seconds(true));
  add("--heartbeat", raw.elastic.heartbeat, "S",
      "Silence after which a host counts as lost, and ends its ranks (10)")
      ->check(seconds(false));
  add("--join-window", raw.elastic.window, "S",
      "Workers that join within S seconds become ranks together (1)")
      ->check(seconds(false));
  add("--change-patience", raw.elastic.change, "S",
      "Ranks have S seconds to reach the commit at which workers join or leave (60)")
      ->check(seconds(true));
}

void declare_output(CLI::App& app, LaunchOptions& options, RawOptions& raw) {
  const auto add = [&](const char* name, std::string& value, const char* type,
                       const char* description) {
    app.add_option(name, value, description)->type_name(type)->group(kOutput);
  };
  add("--output-filename", raw.output_folder, "DIR", "Also write DIR/rank.N/stdout and stderr");
  add("--log-dir", raw.log_dir, "DIR", "Folder for --redirects and --tee, as torchrun's");
  add("-r,--redirects", raw.redirects, "STREAMS",
      "Write to files instead: 1 stdout, 2 stderr, 3 both; or by local rank: 0:1,1:3");
  add("-t,--tee", raw.tee, "STREAMS", "Also write to files");
  add("--local-ranks-filter", raw.local_ranks, "RANKS", "Show only these local ranks: 0,1");
  app.add_flag("--no-tag", raw.no_tag, "Do not put [rank] before each line")->group(kOutput);
  add("--timeline", raw.timeline, "PATH", "Write a timeline there (sets HVD_TIMELINE)");
  app.add_option("--tail", options.tail_lines,
                 "Lines of the failing rank's stderr in the last message")
      ->type_name("LINES")
      ->group(kOutput)
      ->check(CLI::Range(0, 10000).description(""))
      ->capture_default_str();
  app.add_flag("-v,--verbose", options.verbose,
               "Print what is run, where each rank starts, and all output of mpirun")
      ->group(kOutput);
}

void declare_times(CLI::App& app, LaunchOptions& options) {
  const auto add_seconds = [&](const char* name, double& value, bool zero_is_allowed,
                               const char* description) {
    return app.add_option(name, value, description)
        ->type_name("S")
        ->group(kTimes)
        ->check(seconds(zero_is_allowed));
  };
  add_seconds("--timeout", options.timeout_s, false, "Stop the job after S seconds; exit code 124");
  add_seconds("--start-timeout", options.start_timeout_s, false,
              "Give up when ranks have not started after S seconds")
      ->capture_default_str();
  add_seconds("--grace", options.grace_s, true, "Seconds from SIGINT or SIGTERM to SIGKILL")
      ->capture_default_str();
  add_seconds("--fail-grace", options.fail_grace_s, true,
              "Seconds that the other ranks get when one has failed")
      ->capture_default_str();
}

void declare(CLI::App& app, LaunchOptions& options, RawOptions& raw) {
  declare_hosts(app, raw);
  declare_elastic(app, raw);
  declare_nodes(app, raw);
  declare_output(app, options, raw);
  declare_times(app, options);
  app.add_option("--config-file", raw.config_file,
                 "Read options from a YAML file, as in 'np: 4'; the command line takes precedence")
      ->type_name("FILE")
      ->group(kInformation);
  app.add_flag("--print-config", raw.print_config, "Print each option with its source and stop")
      ->group(kInformation);
  app.add_flag("--dry-run", raw.dry_run, "Print what would be run and stop")->group(kInformation);
  app.add_flag("--check-build", raw.check_build, "Print versions and what was left out and why")
      ->group(kInformation);
  app.add_flag("--version", raw.version, "Print the version")->group(kInformation);
  app.set_help_flag("-h,--help", "Print this help message and exit")->group(kInformation);
}

std::pair<std::string, std::optional<std::string>> parse_export(const std::string& given) {
  const std::size_t equals = given.find('=');
  std::string name = given.substr(0, equals);
  const bool valid = !name.empty() && std::isdigit(static_cast<unsigned char>(name[0])) == 0 &&
                     std::all_of(name.begin(), name.end(),
                                 [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
  if (!valid) {
    throw LaunchError(ExitCode::kUsage, text("-x: expected VAR or VAR=VALUE, got '", given, "'"));
  }
  if (is_set_by_hvdrun(name)) {
    throw LaunchError(ExitCode::kUsage,
                      text("-x ", given, ": hvdrun sets ", name,
                           " for each rank; remove it (-np N is the number of ranks, -H and "
                           "--hostfile give the number for each host)"));
  }
  if (equals == std::string::npos) return {std::move(name), std::nullopt};
  return {std::move(name), given.substr(equals + 1)};
}

int parse_np(const std::optional<std::string>& given) {
  constexpr int kMaxNp = 1'000'000;
  if (!given) {
    throw LaunchError(ExitCode::kUsage,
                      "expected the number of ranks, as in: hvdrun -np 2 ./train; got no -np "
                      "(options go before PROGRAM; the words after it are the program's)");
  }
  const auto np = parse_number<int>(*given);
  if (!np || *np < 1 || *np > kMaxNp) {
    throw LaunchError(ExitCode::kUsage,
                      text("-np: expected a number of ranks, at least 1, as in: hvdrun -np 2 "
                           "./train; got '",
                           *given, "'"));
  }
  return *np;
}

void check_slots(const LaunchOptions& options) {
  if (!options.hosts.empty() && options.np > total_slots(options.hosts)) {
    throw LaunchError(ExitCode::kUnavailable,
                      text("not enough slots: -np ", options.np, " needs as many, got ",
                           total_slots(options.hosts), " (", format_hosts(options.hosts),
                           "); give the hosts more slots, as in HOST:4, or lower -np"));
  }
}

/// The program and its arguments. CLI11's prefix mode stops at the first word that is not an option
/// of hvdrun; that word must be the program.
std::vector<std::string> program_words(const CLI::App& app,
                                       const std::vector<std::string>& arguments) {
  const std::size_t count = app.remaining(true).size();
  std::vector<std::string> words(arguments.end() - static_cast<std::ptrdiff_t>(count),
                                 arguments.end());
  const bool after_separator =
      count < arguments.size() && arguments[arguments.size() - count - 1] == "--";
  if (!words.empty() && words.front() == "--") {
    words.erase(words.begin());
  } else if (!words.empty() && words.front().starts_with('-') && !after_separator) {
    throw LaunchError(ExitCode::kUsage,
                      text("expected an option or the program, got '", words.front(),
                           "'; 'hvdrun --help' lists the options"));
  }
  return words;
}

/// The words for CLI11, in reverse order, with the spellings that it does not support replaced:
/// -np, which it would read as -n with the value "p", and torchrun's underscores. This also changes
/// words of the program, but program_words() takes them from the original.
std::vector<std::string> words_for_parser(const std::vector<std::string>& arguments) {
  std::vector<std::string> words(arguments.rbegin(), arguments.rend());
  for (std::string& word : words) {
    if (word == "-np") word = "--np";
    std::string name = word.substr(0, word.find('='));
    if (!name.starts_with("--")) continue;
    std::replace(name.begin(), name.end(), '_', '-');
    if (std::find(kTorchrunOptions.begin(), kTorchrunOptions.end(), name.substr(2)) !=
        kTorchrunOptions.end())
      word.replace(0, name.size(), name);
  }
  return words;
}

/// The option by which the user gives the number of ranks or their hosts in hvdrun's own way, if
/// any.
std::optional<std::string> host_option(const OptionSources& sources) {
  for (const char* const name : {"np", "host", "hostfile"})
    if (sources.is_given(name)) return name;
  return std::nullopt;
}

/// The first of torchrun's options that describe the job, if any. A file may set standalone to
/// false.
std::optional<std::string> node_option(const OptionSources& sources, const RawOptions& raw) {
  for (std::size_t i = 0; i < kNodeOptions; ++i) {
    const std::string name = kTorchrunOptions[i];
    if (name == "standalone" ? raw.node.standalone : sources.is_set(name)) return name;
  }
  return std::nullopt;
}

void read_sources(OptionSources& sources, const RawOptions& raw, const Lookup& variable) {
  if (!raw.config_file.empty()) sources.read_file(raw.config_file);
  const bool has_ranks = host_option(sources).has_value();
  for (const char* const option : kTorchrunOptions) {
    if (has_ranks) break;
    std::string name = std::string("PET_") + option;
    for (char& c : name)
      c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    sources.read_variable(option, name.c_str(), variable);
  }
  if (!sources.is_set("host") && !sources.is_set("host-discovery-script") &&
      !node_option(sources, raw))
    sources.read_variable("hostfile", "OMPI_MCA_orte_default_hostfile", variable);
}

/// Makes the command line of a Python program as torchrun does: with torchrun's options, or where
/// PYTHON_EXEC names the interpreter, as `python -m hvd` sets it.
void add_interpreter(const RawOptions& raw, const Lookup& variable, LaunchOptions& options) {
  if (raw.module && raw.no_python) {
    throw LaunchError(ExitCode::kUsage, "-m runs a module with Python; remove --no-python or -m");
  }
  if (options.program.empty()) return;
  const std::optional<std::string> named = variable("PYTHON_EXEC");
  const bool is_script = (options.node || named) && options.program.front().ends_with(".py");
  if (!raw.module && (!is_script || raw.no_python)) return;
  std::vector<std::string> interpreter = {named.value_or("python3"), "-u"};
  if (raw.module) interpreter.emplace_back("-m");
  options.program.insert(options.program.begin(), interpreter.begin(), interpreter.end());
}

void read_logs(const RawOptions& raw, LogOptions& logs) {
  if (!raw.log_dir.empty()) logs.folder = raw.log_dir;
  if (!raw.redirects.empty()) logs.redirects = parse_streams("--redirects", raw.redirects);
  if (!raw.tee.empty()) logs.tee = parse_streams("--tee", raw.tee);
  if (!raw.local_ranks.empty()) logs.shown_ranks = parse_local_ranks(raw.local_ranks);
}

/// Reads the options whose values are words from a list.
void read_choices(const RawOptions& raw, LaunchOptions& options) {
  const auto bind = parse_bind(raw.bind);
  if (!bind)
    throw LaunchError(ExitCode::kUsage,
                      text("--bind: expected auto, none, core or numa; got '", raw.bind, "'"));
  options.bind = *bind;
  const auto controller = parse_controller(raw.controller);
  if (!controller)
    throw LaunchError(ExitCode::kUsage,
                      text("--controller: expected auto, mpi or ucx; got '", raw.controller, "'"));
  options.controller = *controller;
}

/// Reads the number of ranks and their hosts.
void read_ranks(const RawOptions& raw, const OptionSources& sources, LaunchOptions& options) {
  options.max_restarts = parse_max_restarts(raw.node);
  if (const auto node = node_option(sources, raw)) {
    if (const auto host = host_option(sources)) {
      throw LaunchError(
          ExitCode::kUsage,
          text("-np, -H and --hostfile start ranks on several hosts, and --nproc-per-node and "
               "torchrun's other options start those of one node; remove one of them: --",
               *host, " (", sources.source_of(*host), ") or --", *node, " (",
               sources.source_of(*node), ")"));
    }
    options.node = make_node_options(raw.node, {.cpus = usable_cpus, .gpus = visible_gpus});
    options.np = options.node->processes;
    return;
  }
  if (!raw.host_list.empty()) {
    options.hosts = parse_host_list(raw.host_list);
  } else if (!raw.hostfile.empty()) {
    options.hosts = read_hostfile(raw.hostfile);
  }
  // As in Horovod: the least number of ranks, if only that is given.
  options.np = parse_np(raw.np || raw.elastic.min_np.empty() ? raw.np : raw.elastic.min_np);
  check_slots(options);
}

/// Refuses options that cannot be combined with an elastic job.
void check_elastic(const LaunchOptions& options) {
  if (options.controller == Controller::kMpi || !options.mpi_args.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      text("an elastic job (--min-np, --max-np, --spares, --reset-limit) runs "
                           "without MPI, which does not survive the death of a rank; remove ",
                           options.mpi_args.empty() ? "--controller mpi" : "--mpi-args"));
  }
  if (options.logs.any()) {
    throw LaunchError(ExitCode::kUsage,
                      "--log-dir, --redirects, --tee and --local-ranks-filter concern ranks, which "
                      "change in an elastic job; use --output-filename");
  }
  const int slots = total_slots(options.hosts);
  if (options.elastic->spares == 0 || options.hosts.empty() ||
      options.np + options.elastic->spares <= slots)
    return;
  throw LaunchError(ExitCode::kUnavailable,
                    text("not enough slots: -np ", options.np, " and --spares ",
                         options.elastic->spares, " need ", options.np + options.elastic->spares,
                         ", got ", slots, " (", format_hosts(options.hosts),
                         "); give the hosts more slots, as in HOST:4, or lower --spares"));
}

/// Makes the settings of an elastic job, if an option selects one.
void read_elastic(const RawOptions& raw, const OptionSources& sources, LaunchOptions& options) {
  const bool nodes = options.node && options.node->is_elastic();
  if (!nodes && !selects_elastic(raw.elastic)) return refuse_elastic_settings(raw.elastic);
  if (const auto node = node_option(sources, raw); node && !nodes) {
    throw LaunchError(
        ExitCode::kUsage,
        text("--", *node, " (", sources.source_of(*node),
             ") starts the ranks of one node; start an elastic job with -np N and -H h1:2,h2:2, or "
             "with --nnodes A:B"));
  }
  for (const char* const hosts : {"host", "hostfile"}) {
    if (raw.elastic.discovery.empty() || !sources.is_set(hosts)) continue;
    throw LaunchError(
        ExitCode::kUsage,
        text("--", hosts, " (", sources.source_of(hosts),
             ") and --host-discovery-script both name the hosts; remove one of them"));
  }
  options.elastic = nodes ? make_elastic_options(raw.elastic, *options.node)
                          : make_elastic_options(raw.elastic, options.np);
  if (nodes) options.np = options.elastic->min_np;
  if (sources.is_set("start-timeout")) options.elastic->start_s = options.start_timeout_s;
  if (sources.is_set("max-restarts")) options.elastic->replacements = options.max_restarts;
  check_elastic(options);
}

void check_combinations(const LaunchOptions& options) {
  if (options.controller == Controller::kUcx && !options.mpi_args.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "--mpi-args is for mpirun, which --controller ucx does not run; remove one "
                      "of them");
  }
  if (options.node && options.node->nodes > 1 &&
      (options.controller == Controller::kMpi || !options.mpi_args.empty())) {
    throw LaunchError(ExitCode::kUsage,
                      "--nnodes starts the ranks without mpirun; remove --controller mpi and "
                      "--mpi-args, or use -np N -H h1:2,h2:2");
  }
  if (options.logs.any() && !options.hosts.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "--log-dir, --redirects, --tee and --local-ranks-filter concern the ranks of "
                      "one host; with -H and --hostfile use --output-filename");
  }
  if (options.program.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "expected a program to run, as in: hvdrun -np 2 ./train; got none");
  }
}

}  // namespace

LaunchOptions parse_options(const std::vector<std::string>& arguments, const Lookup& variable) {
  LaunchOptions options;
  RawOptions raw;
  CLI::App app(kDescription, "hvdrun");
  app.formatter(std::make_shared<Formatter>());
  app.footer(kFooter);
  app.prefix_command();
  declare(app, options, raw);
  std::vector<std::string> words = words_for_parser(arguments);
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    options.action = Action::kPrint;
    options.text = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    throw LaunchError(ExitCode::kUsage, text(error.what(), "; 'hvdrun --help' lists the options"));
  }
  if (raw.version) {
    options.action = Action::kPrint;
    options.text = text("hvdrun (hvd) ", kVersion, "\n");
    return options;
  }
  if (raw.check_build) {
    options.action = Action::kCheckBuild;
    return options;
  }
  OptionSources sources(app, {kActions.begin(), kActions.end()});
  read_sources(sources, raw, variable);
  options.program = program_words(app, arguments);
  if (raw.print_config) {
    options.action = Action::kPrint;
    options.text = sources.print();
    return options;
  }

  read_choices(raw, options);
  options.remote_shell = shell_split(raw.rsh);
  options.tag = !raw.no_tag;
  if (raw.dry_run) options.action = Action::kDryRun;
  if (!raw.output_folder.empty()) options.output_folder = raw.output_folder;
  if (!raw.timeline.empty()) options.timeline = raw.timeline;
  options.mpi_args = shell_split(raw.mpi_args);
  for (const std::string& given : raw.exports) options.exports.push_back(parse_export(given));
  read_logs(raw, options.logs);
  read_ranks(raw, sources, options);
  read_elastic(raw, sources, options);
  add_interpreter(raw, variable, options);
  check_combinations(options);
  return options;
}

}  // namespace hvd::launcher
