#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"

namespace hvd::bench {

/// A subcommand, declared with its options.
struct Command {
  CLI::App* app = nullptr;
  /// Collective over the ranks of the session; "correct" in what it returns decides the exit code.
  std::function<Json(const Session&, std::ostream&)> measure = {};
  /// Instead of measure: needs neither hvd nor MPI.
  std::function<void()> work = {};
};

/// Declares the options for repetitions, which several subcommands share.
void declare_repetitions(CLI::App& app, RepetitionLimits& limits, const std::string& per);
void declare_gloo(CLI::App& app, std::string& path);

/// The subcommands that need LibTorch; empty in a build without it.
std::vector<Command> torch_commands(CLI::App& app);

}  // namespace hvd::bench
