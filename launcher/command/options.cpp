#include "command/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>

#include "base/text.h"
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
    "reach; 70 internal; 124 --timeout; 126, 127 the program cannot be run, is not found; 130, 143 "
    "SIGINT, SIGTERM.\n"
    "HVD_MPIRUN names another mpirun (Open MPI, MPICH or Intel MPI). See docs/launching.md.";

class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: hvdrun -np N [-H h1:2,h2:2 | --hostfile FILE] [OPTIONS] [--] PROGRAM "
           "[ARGS...]\n";
  }
};

/// The option values that CLI11 fills in as text, before they are checked.
struct RawOptions {
  std::optional<std::string> np;
  std::string host_list, hostfile, bind = "auto", controller = "auto", rsh, mpi_args, output_folder,
                                   timeline;
  std::vector<std::string> exports;
  bool no_tag = false, dry_run = false, check_build = false, version = false;
};

/// Checks a number of seconds. CLI11's own checks would print their limits with 300 digits.
CLI::Validator seconds(bool zero_is_allowed) {
  return CLI::Validator(
      [zero_is_allowed](std::string& given) -> std::string {
        constexpr double kMost = 1e9;
        char* end = nullptr;
        const double value = std::strtod(given.c_str(), &end);
        const bool number = !given.empty() && *end == '\0';
        if (number && (value > 0 || (zero_is_allowed && value == 0)) && value <= kMost) return "";
        return text("expected a number of seconds", zero_is_allowed ? ", 0 or more" : " above 0",
                    ", got '", given, "'");
      },
      "");
}

void declare(CLI::App& app, LaunchOptions& options, RawOptions& raw) {
  app.add_option("-n,--np", raw.np, "Number of ranks (also -np)")->type_name("N");
  auto* list = app.add_option("-H,--host", raw.host_list, "Hosts and their slots: h1:2,h2:2")
                   ->type_name("HOSTS");
  app.add_option("--hostfile", raw.hostfile, "File with lines 'HOST slots=N' or 'HOST:N'")
      ->type_name("FILE")
      ->excludes(list);
  app.add_option("--bind", raw.bind, "Pin ranks: auto, none, core or numa")
      ->type_name("WHAT")
      ->capture_default_str();
  app.add_option("--controller", raw.controller,
                 "What starts the ranks: mpi (mpirun), ucx (hvdrun itself) or auto (ucx, "
                 "but mpi in an allocation and for a program linked with MPI)")
      ->type_name("WHAT")
      ->capture_default_str();
  app.add_option("--rsh", raw.rsh, "Remote shell, run as AGENT HOST COMMAND... (ssh)")
      ->type_name("AGENT");
  app.add_option("-x", raw.exports,
                 "Give the ranks VAR, from the environment or with this value (repeat)")
      ->type_name("VAR[=VALUE]")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  app.add_option("--mpi-args", raw.mpi_args, "More arguments for mpirun, quoted as one")
      ->type_name("ARGS");
  app.add_option("--output-filename", raw.output_folder, "Also write DIR/rank.N/stdout and stderr")
      ->type_name("DIR");
  app.add_flag("--no-tag", raw.no_tag, "Do not put [rank] before each line");
  app.add_option("--timeline", raw.timeline, "Write a timeline there (sets HVD_TIMELINE)")
      ->type_name("PATH");
  const auto add_seconds = [&](const char* name, double& value, bool zero_is_allowed,
                               const char* description) {
    return app.add_option(name, value, description)
        ->type_name("S")
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
  app.add_option("--tail", options.tail_lines,
                 "Lines of the failing rank's stderr in the last message")
      ->type_name("LINES")
      ->check(CLI::Range(0, 10000).description(""))
      ->capture_default_str();
  app.add_flag("--dry-run", raw.dry_run, "Print what would be run and stop");
  app.add_flag("--check-build", raw.check_build, "Print versions and what was left out and why");
  app.add_flag("-v,--verbose", options.verbose,
               "Print what is run, where each rank starts, and all output of mpirun");
  app.add_flag("--version", raw.version, "Print the version");
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
                           " for each rank; leave it out (-np N is the number of ranks, -H and "
                           "--hostfile give the number for each host)"));
  }
  if (equals == std::string::npos) return {std::move(name), std::nullopt};
  return {std::move(name), given.substr(equals + 1)};
}

int parse_np(const std::optional<std::string>& given) {
  constexpr int kMost = 1'000'000;
  if (!given) {
    throw LaunchError(ExitCode::kUsage,
                      "expected the number of ranks, as in: hvdrun -np 2 ./train; got no -np "
                      "(options stand before PROGRAM; what follows it is its own)");
  }
  const auto np = parse_number<int>(*given);
  if (!np || *np < 1 || *np > kMost) {
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

}  // namespace

LaunchOptions parse_options(const std::vector<std::string>& arguments,
                            const std::optional<std::string>& default_hostfile) {
  LaunchOptions options;
  RawOptions raw;
  CLI::App app(kDescription, "hvdrun");
  app.formatter(std::make_shared<Formatter>());
  app.footer(kFooter);
  app.prefix_command();
  declare(app, options, raw);

  // CLI11 would read -np as -n with the value "p". This also replaces words of the program, but
  // program_words() takes them from `arguments`.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  std::replace(reversed.begin(), reversed.end(), std::string("-np"), std::string("--np"));
  try {
    app.parse(reversed);
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
  options.remote_shell = shell_split(raw.rsh);
  options.tag = !raw.no_tag;
  if (raw.dry_run) options.action = Action::kDryRun;
  if (!raw.output_folder.empty()) options.output_folder = raw.output_folder;
  if (!raw.timeline.empty()) options.timeline = raw.timeline;
  options.mpi_args = shell_split(raw.mpi_args);
  for (const std::string& given : raw.exports) options.exports.push_back(parse_export(given));
  if (!raw.host_list.empty()) {
    options.hosts = parse_host_list(raw.host_list);
  } else if (!raw.hostfile.empty()) {
    options.hosts = read_hostfile(raw.hostfile);
  } else if (default_hostfile && !default_hostfile->empty()) {
    options.hosts = read_hostfile(*default_hostfile);
  }
  options.program = program_words(app, arguments);
  options.np = parse_np(raw.np);
  check_slots(options);
  if (options.controller == Controller::kUcx && !options.mpi_args.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "--mpi-args is for mpirun, which --controller ucx does not run; leave one of "
                      "them out");
  }
  if (options.program.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "expected a program to run, as in: hvdrun -np 2 ./train; got none");
  }
  return options;
}

}  // namespace hvd::launcher
