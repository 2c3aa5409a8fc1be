#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "doctor/collect.h"
#include "doctor/measure.h"
#include "hvd/hvd.h"
#include "system/process.h"

/// hvd-doctor-rank: the program that `hvdrun doctor` runs, on each host for its facts and as the
/// ranks of a job that measures. It prints a line with kRecordPrefix and JSON.
///
/// It is a separate program because hvdrun does not link hvd: hvdrun runs once per rank and must
/// start in milliseconds.
namespace {

using namespace hvd::launcher;

constexpr double kJoinSeconds = 8;

void print_record(const nlohmann::json& record) {
  // A file name or a library's text may contain any bytes.
  const std::string line =
      record.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
  std::fputs((doctor::kRecordPrefix + line).c_str(), stdout);
  std::fflush(stdout);
}

int print_facts() {
  print_record(doctor::collect_host_facts({own_executable(), "--build-info"}));
  return 0;
}

int print_measurements() {
  doctor::RankReport report;
  report.host = own_hostname();
  // For the report of a rank that cannot join.
  if (const char* const rank = std::getenv("HVD_RANK")) report.rank = std::atoi(rank);
  if (const char* const rank = std::getenv("HVD_LOCAL_RANK")) report.local_rank = std::atoi(rank);
  ::unsetenv("HVD_TIMELINE");  // measure_job() writes one of its own
  hvd::Options options;
  options.init_timeout = std::chrono::milliseconds(static_cast<int>(kJoinSeconds * 1000));
  try {
    hvd::init(options);
    doctor::measure_job(report);
    hvd::shutdown();
  } catch (const std::exception& error) {
    report.error = error.what();
  }
  print_record(report);
  return report.error.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string task = argc == 2 ? argv[1] : "";
  if (task == "--build-info") {
    std::fputs(hvd::build_info().c_str(), stdout);
    return 0;
  }
  if (task == "--host") return print_facts();
  if (task == "--rank") return print_measurements();
  std::fputs("hvd-doctor-rank is for hvdrun's own use: run hvdrun doctor\n", stderr);
  return 2;
}
