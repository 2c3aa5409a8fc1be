#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "fault/campaign_plan.h"
#include "support/campaign.h"

/// Reads the output of a job's ranks, and compares it with the plan.
namespace hvd::campaign {

/// A failed operation, after which the job goes on.
struct Failure {
  std::string error;
  std::string key;
  std::vector<int> members;
  double seconds = 0;
  std::string message;
};

/// The last error that one rank got from hvd.
struct Loss {
  std::string error;
  double time = 0;
  bool in_init = false;
  int rank = -1;
  std::string message;
};

struct Witness {
  pid_t pid = 0;
  double fault = 0;    ///< when it failed; 0: it did not fail
  bool final = false;  ///< only the last barrier and the last shutdown were left
  std::vector<Failure> failures;
  std::vector<Loss> losses;      ///< PeerLostError and the like
  std::vector<Loss> departures;  ///< ShutdownError
  std::vector<std::string> wrong;
  std::vector<double> shutdowns;
  std::string end;
};

struct Run {
  std::string output;
  std::map<int, Witness> ranks;
  double seconds = 0;
  bool cut_off = false;  ///< by the driver, because it did not end
};

/// Adds a line that a rank has written.
void read_line(const std::string& line, std::map<int, Witness>&);
testing::JudgedJob judge(const Plan&, const Run&);

}  // namespace hvd::campaign
