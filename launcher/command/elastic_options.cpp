#include "command/elastic_options.h"

#include <cstdlib>
#include <utility>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

constexpr int kMostRanks = 1'000'000;

std::optional<int> parse_count(const char* option, const std::string& given, int least) {
  if (given.empty()) return std::nullopt;
  const auto number = parse_number<int>(given);
  if (number && *number >= least && *number <= kMostRanks) return number;
  throw LaunchError(ExitCode::kUsage,
                    text(option, ": expected a number, at least ", least, ", got '", given, "'"));
}

std::optional<double> parse_seconds(const std::string& given) {
  if (given.empty()) return std::nullopt;
  return std::strtod(given.c_str(), nullptr);  // checked when the command line was parsed
}

}  // namespace

bool selects_elastic(const ElasticWords& words) {
  return !words.least.empty() || !words.most.empty() || !words.spares.empty() ||
         !words.most_resets.empty();
}

ElasticOptions make_elastic_options(const ElasticWords& words, int np) {
  ElasticOptions options;
  const auto least = parse_count("--min-np", words.least, 1);
  const auto most = parse_count("--max-np", words.most, 1);
  options.least = least.value_or(np);
  options.most = most.value_or(np);
  options.spares = parse_count("--spares", words.spares, 0).value_or(0);
  options.most_resets = parse_count("--reset-limit", words.most_resets, 0);
  options.timeout_s = parse_seconds(words.timeout);
  options.heartbeat_s = parse_seconds(words.heartbeat);
  if (least && most && *least > *most) {
    throw LaunchError(ExitCode::kUsage, text("--min-np ", *least, " is above --max-np ", *most,
                                             "; lower --min-np or raise --max-np"));
  }
  if (np < options.least || np > options.most) {
    throw LaunchError(ExitCode::kUsage,
                      text("-np ", np, ", the ranks to start with, is ",
                           np < options.least ? text("below --min-np ", options.least)
                                              : text("above --max-np ", options.most),
                           "; expected a number from --min-np to --max-np"));
  }
  return options;
}

void refuse_elastic_times(const ElasticWords& words) {
  for (const auto& [option, value] : {std::pair("--elastic-timeout", &words.timeout),
                                      std::pair("--heartbeat", &words.heartbeat)}) {
    if (value->empty()) continue;
    throw LaunchError(ExitCode::kUsage,
                      text(option,
                           " is for elastic jobs; add --min-np N, the least number of "
                           "ranks, or leave it out"));
  }
}

}  // namespace hvd::launcher
