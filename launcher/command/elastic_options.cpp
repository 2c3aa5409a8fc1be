#include "command/elastic_options.h"

#include <cstdlib>
#include <utility>

#include "base/text.h"
#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

constexpr int kMaxRanks = 1'000'000;

std::optional<int> parse_count(const char* option, const std::string& given, int minimum) {
  if (given.empty()) return std::nullopt;
  const auto number = parse_number<int>(given);
  if (number && *number >= minimum && *number <= kMaxRanks) return number;
  throw LaunchError(ExitCode::kUsage,
                    text(option, ": expected a number, at least ", minimum, ", got '", given, "'"));
}

std::optional<double> parse_seconds(const std::string& given) {
  if (given.empty()) return std::nullopt;
  return std::strtod(given.c_str(), nullptr);  // checked when the command line was parsed
}

std::pair<double, double> parse_cooldown(const std::vector<std::string>& given) {
  const double first = *parse_seconds(given.front());
  const double longest = *parse_seconds(given.back());
  if (given.size() == 2 && first <= longest) return {first, longest};
  throw LaunchError(ExitCode::kUsage,
                    text("--blacklist-cooldown-range: expected two numbers of seconds, the first "
                         "not above the second, as in 10 3600; got '",
                         join_text(given, " "), "'"));
}

void read_discovery(const ElasticOptionTexts& texts, ElasticOptions& options) {
  options.discovery = shell_split(texts.discovery);
  const auto slots = parse_count("--slots", texts.slots, 1);
  if (slots && options.discovery.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      "--slots is for --host-discovery-script; with -H and --hostfile give each "
                      "host its slots, as in HOST:4");
  }
  options.slots = slots.value_or(1);
}

}  // namespace

bool selects_elastic(const ElasticOptionTexts& texts) {
  return !texts.min_np.empty() || !texts.max_np.empty() || !texts.spares.empty() ||
         !texts.max_resets.empty() || !texts.discovery.empty();
}

ElasticOptions make_elastic_options(const ElasticOptionTexts& texts, int np) {
  ElasticOptions options;
  const auto min_np = parse_count("--min-np", texts.min_np, 1);
  const auto max_np = parse_count("--max-np", texts.max_np, 1);
  options.min_np = min_np.value_or(np);
  options.max_np = max_np.value_or(np);
  options.spares = parse_count("--spares", texts.spares, 0).value_or(0);
  options.max_resets = parse_count("--reset-limit", texts.max_resets, 0);
  options.max_failures =
      parse_count("--failure-limit", texts.max_failures, 0).value_or(options.max_failures);
  options.timeout_s = parse_seconds(texts.timeout);
  options.heartbeat_s = parse_seconds(texts.heartbeat);
  options.window_s = parse_seconds(texts.window);
  options.change_s = parse_seconds(texts.change);
  if (!texts.cooldown.empty()) options.cooldown_s = parse_cooldown(texts.cooldown);
  read_discovery(texts, options);
  if (min_np && max_np && *min_np > *max_np) {
    throw LaunchError(ExitCode::kUsage, text("--min-np ", *min_np, " is above --max-np ", *max_np,
                                             "; lower --min-np or raise --max-np"));
  }
  if (np < options.min_np || np > options.max_np) {
    throw LaunchError(ExitCode::kUsage,
                      text("-np ", np, ", the ranks to start with, is ",
                           np < options.min_np ? text("below --min-np ", options.min_np)
                                               : text("above --max-np ", options.max_np),
                           "; expected a number from --min-np to --max-np"));
  }
  return options;
}

ElasticOptions make_elastic_options(const ElasticOptionTexts& texts, const NodeOptions& node) {
  for (const auto& [option, value] :
       {std::pair("--min-np", &texts.min_np), std::pair("--max-np", &texts.max_np),
        std::pair("--spares", &texts.spares),
        std::pair("--host-discovery-script", &texts.discovery),
        std::pair("--slots", &texts.slots)}) {
    if (value->empty()) continue;
    throw LaunchError(ExitCode::kUsage,
                      text("--nnodes ", node.nodes, ":", node.max_nodes,
                           " gives the numbers of ranks, and the nodes join by themselves; "
                           "remove ",
                           option));
  }
  const int ranks = node.nodes * node.processes;
  ElasticOptionTexts numbers = texts;
  numbers.min_np = text(ranks);
  numbers.max_np = text(node.max_nodes * node.processes);
  return make_elastic_options(numbers, ranks);
}

void refuse_elastic_settings(const ElasticOptionTexts& texts) {
  const std::string cooldown = join_text(texts.cooldown, " ");
  for (const auto& [option, value] :
       {std::pair("--failure-limit", &texts.max_failures),
        std::pair("--elastic-timeout", &texts.timeout), std::pair("--heartbeat", &texts.heartbeat),
        std::pair("--join-window", &texts.window), std::pair("--change-patience", &texts.change),
        std::pair("--slots", &texts.slots), std::pair("--blacklist-cooldown-range", &cooldown)}) {
    if (value->empty()) continue;
    throw LaunchError(ExitCode::kUsage,
                      text(option,
                           " is for elastic jobs; add --min-np N, the least number of "
                           "ranks, or remove it"));
  }
}

}  // namespace hvd::launcher
