#pragma once

#include <optional>
#include <string>

namespace hvd::launcher {

/// The settings of an elastic job, whose number of ranks may change.
struct ElasticOptions {
  int least = 1;                      ///< --min-np
  int most = 1;                       ///< --max-np
  int spares = 0;                     ///< --spares
  std::optional<int> most_resets;     ///< --reset-limit
  std::optional<double> timeout_s;    ///< --elastic-timeout
  std::optional<double> heartbeat_s;  ///< --heartbeat
  std::optional<double> start_s;      ///< --start-timeout
  std::optional<int> replacements;    ///< --max-restarts
  bool operator==(const ElasticOptions&) const = default;
};

/// The values of the options as text. Empty: not given.
struct ElasticWords {
  std::string least = {}, most = {}, spares = {}, most_resets = {}, timeout = {}, heartbeat = {};
};

/// Whether one of the options that select an elastic job is given.
bool selects_elastic(const ElasticWords& words);

/// Without --min-np and --max-np, each is -np.
/// @param np the ranks to start with
/// @throws LaunchError (kUsage) that names the option
ElasticOptions make_elastic_options(const ElasticWords& words, int np);

/// @throws LaunchError (kUsage) if an option is given that has an effect in an elastic job only
void refuse_elastic_times(const ElasticWords& words);

}  // namespace hvd::launcher
