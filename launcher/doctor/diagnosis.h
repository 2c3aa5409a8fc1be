#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "doctor/fact.h"
#include "doctor/facts.h"

namespace hvd::launcher::doctor {

/// A host that was examined.
struct HostResult {
  std::string name;       ///< a name or an address
  int slots = 1;          ///< ranks that it may run
  std::string user = {};  ///< for the remote shell; empty: the shell's own choice
  bool local = false;     ///< this machine
  Fact<HostFacts> facts;  ///< unknown: why the host could not collect them
};

/// The backend for tensors of the ranks of one host (scope "host") or of several ("hosts").
struct ChosenBackend {
  std::string scope;
  std::string backend;  ///< "shm", "hierarchical", "ucx", "mpi"
  std::string why;
};

/// The result of the small job that measures.
struct JobResult {
  bool succeeded = false;
  int np = 0;
  std::string command;     ///< the command that repeats the job
  std::string error;       ///< why it was not run or has failed; empty if it succeeded
  std::string controller;  ///< "ucx: UCX is found"; empty: unknown
  Fact<std::vector<std::string>> transports;  ///< of UCX, as in "tcp/eth0"
  std::vector<std::string> warnings;          ///< logged by hvd, each once
  std::vector<RankReport> ranks;              ///< by rank; those that have reported
};

/// The name of a rank's host.
std::string host_of(const JobResult& job, int rank);

enum class Severity { kInfo, kWarning, kError };
std::string_view to_string(Severity severity);

/// Something that is wrong, or that explains a slow or failing job.
struct Finding {
  std::string id;  ///< a stable name, such as "shm_unusable"
  Severity severity = Severity::kInfo;
  std::string host;    ///< empty: concerns the whole job
  std::string what;    ///< the fact and its meaning
  std::string advice;  ///< the command or the change that mends it; may be empty
};

struct Diagnosis {
  std::string hvdrun_version;
  double seconds = 0;  ///< the time that the doctor took
  std::vector<HostResult> hosts;
  JobResult job;
  std::vector<Finding> findings;  ///< the most severe ones first
};

/// Finds problems of these hosts and this job, the most severe first. Pure; does not read
/// Diagnosis::findings.
std::vector<Finding> find_problems(const Diagnosis& diagnosis);

/// The backends that ran the allreduces of this job, and why they were chosen. Pure.
std::vector<ChosenBackend> chosen_backends(const Diagnosis& diagnosis);

/// The whole diagnosis in JSON. docs/doctor.md describes it.
nlohmann::json to_json(const Diagnosis& diagnosis);

/// The same for people: one block for each host, one for the job, and the findings.
std::string to_text(const Diagnosis& diagnosis);

/// 1 if a finding is an error, else 0.
int exit_code(const Diagnosis& diagnosis);

}  // namespace hvd::launcher::doctor
