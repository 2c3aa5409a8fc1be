#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command/node_options.h"

namespace hvd::launcher {

/// The settings of an elastic job, whose number of ranks may change.
struct ElasticOptions {
  int min_np = 1;                     ///< --min-np
  int max_np = 1;                     ///< --max-np
  int spares = 0;                     ///< --spares
  std::optional<int> max_resets;      ///< --reset-limit
  int max_failures = 10;              ///< --failure-limit; 0: no limit
  std::optional<double> timeout_s;    ///< --elastic-timeout
  std::optional<double> heartbeat_s;  ///< --heartbeat
  std::optional<double> window_s;     ///< --join-window
  std::optional<double> change_s;     ///< --change-patience
  std::optional<double> start_s;      ///< --start-timeout
  std::optional<int> replacements;    ///< --max-restarts
  /// --host-discovery-script: the script and its arguments; empty: the hosts are fixed
  std::vector<std::string> discovery = {};
  int slots = 1;  ///< --slots: of a host that the script prints without a number
  /// --blacklist-cooldown-range, in seconds
  std::pair<double, double> cooldown_s = {10, 3600};
  bool operator==(const ElasticOptions&) const = default;
};

/// The values of the options as text. Empty: not given.
struct ElasticOptionTexts {
  std::string min_np = {}, max_np = {}, spares = {}, max_resets = {}, max_failures = {},
              timeout = {}, heartbeat = {}, window = {}, change = {}, discovery = {}, slots = {};
  std::vector<std::string> cooldown = {};
};

/// Whether one of the options that select an elastic job is given.
bool selects_elastic(const ElasticOptionTexts& texts);

/// Without --min-np and --max-np, each is -np.
/// @param np the ranks to start with
/// @throws LaunchError (kUsage) that names the option
ElasticOptions make_elastic_options(const ElasticOptionTexts& texts, int np);

/// The options of a job whose number of nodes is a range (--nnodes A:B), which determines the
/// numbers of ranks. @throws LaunchError (kUsage) that names the option
ElasticOptions make_elastic_options(const ElasticOptionTexts& texts, const NodeOptions& node);

/// @throws LaunchError (kUsage) if an option is given that has an effect in an elastic job only, or
/// with --host-discovery-script only
void refuse_elastic_settings(const ElasticOptionTexts& texts);

}  // namespace hvd::launcher
