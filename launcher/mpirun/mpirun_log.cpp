#include "mpirun/mpirun_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "system/text.h"

namespace hvd::launcher {
namespace {

constexpr std::array<std::string_view, 9> kAboutRanks = {
    "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",  // by Hydra
    "Primary job  terminated normally",
    "mpirun noticed that process rank",
    "mpirun has exited due to process rank",
    "mpirun detected that one or more processes exited",
    "MPI_ABORT was invoked on rank",
    "prterun noticed that process rank",
    "prterun has exited due to process rank",
    "prterun detected that one or more processes exited",
};

/// In a line of Hydra's proxy: a consequence of the end of a rank or of mpiexec.
constexpr std::array<std::string_view, 4> kProxyConsequences = {
    "write error",
    "assert (!closed) failed",
    "callback returned error status",
    "demux engine error waiting for event",
};

constexpr std::array<std::string_view, 9> kAboutRanksLines = {
    // By Hydra, below its paragraph.
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING",
    "This typically refers to a problem with your application.",
    "Please see the FAQ page for debugging suggestions",
    " has sent help message help-mpi-api.txt / mpi",
    "Set MCA parameter \"orte_base_help_aggregate\" to 0",
    "/orte/util/show_help.c at line",  // mpirun 4.1 sometimes cannot read its own report of an
                                       // MPI_Abort
    "mpirun: Forwarding signal",
    "mpirun: clean termination accomplished",
    "mpirun: abort is already in progress",
};

constexpr std::array<std::string_view, 3> kLacksSlots = {
    "There are not enough slots available",
    "All nodes which are allocated for this job are already filled",
    "request for more slots than",
};

constexpr std::array<std::string_view, 10> kLostHost = {
    "unable to reliably start one or more daemons",
    "daemon failed to report back",
    "lost communication with",
    "has lost communication with a remote daemon",
    "Could not resolve hostname",
    "launch the remote daemon",
    "unexpectedly died",
    "Launch proxy failed",  // MPICH's Hydra
    // Intel MPI's Hydra.
    "Unable to run bstrap_proxy on",
    "Downstream from host",
};

constexpr std::array<std::string_view, 4> kLacksExecutable = {
    "was unable to find the specified executable",
    "was unable to launch the specified application as it could not access",
    "could not find an executable",
    "execvp error on file",  // Hydra
};

template <std::size_t n>
bool contains_any(std::string_view text, const std::array<std::string_view, n>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](std::string_view pattern) {
    return text.find(pattern) != std::string_view::npos;
  });
}

bool is_consequence(std::string_view line) {
  return contains_any(line, kAboutRanksLines) || is_backtrace(line) ||
         (line.starts_with("[proxy:") && contains_any(line, kProxyConsequences));
}

bool is_rule(std::string_view line) {
  return line.size() >= 20 && (line.find_first_not_of("-\r\n") == std::string_view::npos ||
                               line.find_first_not_of("=\r\n") == std::string_view::npos);
}

/// The number after `marker`.
std::optional<int> number_after(const std::string& text, std::string_view marker) {
  const std::size_t at = text.find(marker);
  int value = 0;
  if (at == std::string::npos || std::sscanf(text.c_str() + at + marker.size(), "%d", &value) != 1)
    return std::nullopt;
  return value;
}

}  // namespace

std::string MpirunLog::feed(std::string_view bytes) {
  std::string shown;
  wrote_ = wrote_ || !bytes.empty();
  partial_ += bytes;
  std::size_t start = 0;
  for (std::size_t end = partial_.find('\n'); end != std::string::npos;
       end = partial_.find('\n', start)) {
    shown += filter_line(partial_.substr(start, end + 1 - start));
    start = end + 1;
  }
  partial_.erase(0, start);
  return shown;
}

std::string MpirunLog::finish() {
  std::string shown;
  if (!partial_.empty()) shown = filter_line(std::exchange(partial_, {}));
  if (in_paragraph_) {
    in_paragraph_ = false;
    shown += filter_paragraph(std::exchange(paragraph_, {}));
  }
  return shown;
}

std::string MpirunLog::filter_line(const std::string& line) {
  if (is_rule(line)) {
    paragraph_ += line;
    in_paragraph_ = !in_paragraph_;
    return in_paragraph_ ? "" : filter_paragraph(std::exchange(paragraph_, {}));
  }
  if (in_paragraph_) {
    paragraph_ += line;
    return "";
  }
  if (contains_any(line, kLostHost)) {
    lost_host_ = true;
    about_hosts_ += line;
  }
  lacks_executable_ = lacks_executable_ || contains_any(line, kLacksExecutable);
  // Holds back backtraces too: mpirun 4.1 often crashes while it ends a job whose host is lost.
  if (!is_consequence(line)) return line;
  held_ += line;
  return "";
}

std::string MpirunLog::filter_paragraph(const std::string& paragraph) {
  lacks_slots_ = lacks_slots_ || contains_any(paragraph, kLacksSlots);
  const bool about_host = contains_any(paragraph, kLostHost);
  lost_host_ = lost_host_ || about_host;
  if (about_host) about_hosts_ += paragraph;
  lacks_executable_ = lacks_executable_ || contains_any(paragraph, kLacksExecutable);
  if (!about_host && !contains_any(paragraph, kAboutRanks)) return paragraph;
  if (!abort_rank_) abort_rank_ = number_after(paragraph, "MPI_ABORT was invoked on rank ");
  if (!improper_rank_) improper_rank_ = number_after(paragraph, "has exited due to process rank ");
  held_ += paragraph;
  return "";
}

}  // namespace hvd::launcher
