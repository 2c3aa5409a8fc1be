#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "doctor/diagnosis.h"
#include "system/children.h"

/// Reads the output of the doctor's processes. Pure.
namespace hvd::launcher::doctor {

/// The facts in a process's output, or `failure` if there are none.
template <class Facts>
Fact<Facts> read_record(std::string_view output, const std::string& failure) {
  const std::size_t found = output.rfind(kRecordPrefix);
  if (found == std::string_view::npos) return unknown<Facts>(failure);
  const std::string_view rest = output.substr(found + std::string_view(kRecordPrefix).size());
  const auto json = nlohmann::json::parse(rest.substr(0, rest.find('\n')), nullptr, false);
  try {
    return json.get<Facts>();
  } catch (const nlohmann::json::exception& error) {
    return unknown<Facts>(std::string("the host has another version of hvd: ") + error.what());
  }
}

/// Why a process has failed: hvdrun's own messages, else the end of its stderr.
std::string explain(const ChildResult& result);

struct RankOutputs {
  std::string out = {}, err = {};
};

/// Fills in the result of the job from the output of hvdrun and of its ranks.
void read_job(const ChildResult& result, const std::vector<RankOutputs>& ranks, JobResult& job);

}  // namespace hvd::launcher::doctor
