#include "doctor/records.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/text.h"
#include "system/text.h"

namespace hvd::launcher::doctor {
namespace {

constexpr std::string_view kHvdrun = "hvdrun: ";
constexpr std::string_view kController = "controller ";

/// The lines of `output` that begin with `prefix`, without it.
std::vector<std::string> lines_after(const std::string& output, std::string_view prefix) {
  std::vector<std::string> lines;
  for (const std::string_view line : split_text(output, '\n'))
    if (line.starts_with(prefix)) lines.emplace_back(line.substr(prefix.size()));
  return lines;
}

/// Whether the line is of a rank's log, or of hvdrun's --verbose.
bool is_detail(std::string_view line) {
  constexpr std::array kDetails = {" hvd debug [",  " hvd info [", ", local rank ",
                                   " is bound to ", ", each: ",    "hvdrun: controller "};
  return std::any_of(kDetails.begin(), kDetails.end(), [&](std::string_view detail) {
    return line.find(detail) != std::string_view::npos;
  });
}

/// The last lines, joined, without details.
std::string end_of(const std::string& output) {
  constexpr std::size_t kLines = 3;
  std::vector<std::string> lines;
  for (const std::string_view line : split_text(output, '\n')) {
    if (!is_detail(line) && !trim(line).empty()) lines.emplace_back(trim(line));
  }
  if (lines.size() > kLines) lines.erase(lines.begin(), lines.end() - kLines);
  return join_text(lines, "; ");
}

/// The transports in UCX's lines about endpoints, such as "ep_cfg[1]: tag(tcp/eth0) ka(tcp/eth0)".
void add_transports(const std::string& log, std::set<std::string>& transports) {
  for (const std::string_view line : split_text(log, '\n')) {
    const std::size_t found = line.find("ep_cfg[");
    if (found == std::string_view::npos) continue;
    std::string words(line.substr(found));
    std::replace_if(words.begin(), words.end(), [](char c) { return c == '(' || c == ')'; }, ' ');
    for (const std::string_view word : split_text(words, ' '))
      if (word.find('/') != std::string_view::npos) transports.emplace(word);
  }
}

/// The texts of hvd's warnings and errors in a rank's log.
void add_warnings(const std::string& log, std::vector<std::string>& warnings) {
  for (const std::string_view line : split_text(log, '\n')) {
    for (const std::string_view level : {" hvd warning [", " hvd error ["}) {
      const std::size_t found = line.find(level);
      if (found == std::string_view::npos) continue;
      const std::size_t end = line.find("] ", found);
      if (end == std::string_view::npos) continue;
      std::string warning(line.substr(end + 2));
      if (std::find(warnings.begin(), warnings.end(), warning) == warnings.end())
        warnings.push_back(std::move(warning));
    }
  }
}

}  // namespace

std::string explain(const ChildResult& result) {
  if (result.timed_out) return "no answer in time";
  std::string reason = end_of(result.err);
  if (reason.empty()) reason = "it wrote no message";
  const bool has_code = reason.find("exit code") != std::string::npos;
  return has_code ? reason : text(reason, " (exit code ", result.code, ")");
}

void read_job(const ChildResult& result, const std::vector<RankOutputs>& ranks, JobResult& job) {
  job.succeeded = result.code == 0;
  std::set<std::string> transports;
  for (const RankOutputs& rank : ranks) {
    const auto report = read_record<RankReport>(rank.out, "");
    if (report) {
      job.ranks.push_back(*report);
      if (!report->error.empty() && job.error.empty())
        job.error = text("rank ", report->rank, " on ", report->host, ": ", report->error);
    }
    add_transports(rank.err, transports);
    add_warnings(rank.err, job.warnings);
  }
  for (const std::string& line : lines_after(result.err, text(kHvdrun, kController)))
    job.controller = line;
  if (transports.empty()) {
    job.transports = unknown<std::vector<std::string>>(
        job.controller.starts_with("mpi") ? "MPI carries the messages"
                                          : "UCX has logged no endpoint; ranks of one "
                                            "host need none");
  } else {
    job.transports = std::vector<std::string>(transports.begin(), transports.end());
  }
  if (!job.succeeded && job.error.empty()) job.error = explain(result);
}

}  // namespace hvd::launcher::doctor
