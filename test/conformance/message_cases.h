#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "conformance/thread_ranks.h"

/// Runs the suite on backends that send messages, with any carrier and with ranks that are threads.
namespace hvd::conformance {

struct MessageSetting {
  const char* name = "";
  const char* hosts = "";  ///< the host of each rank, a letter per rank
  int every = 8;           ///< one in this many cases runs; all cases in a long run

  int size() const { return static_cast<int>(std::string(hosts).size()); }
};

/// @tparam Setting a MessageSetting or a derived class
template <class Setting>
using MessageParameter = std::tuple<Setting, OpKind>;

template <class Setting>
std::string message_case_name(const ::testing::TestParamInfo<MessageParameter<Setting>>& info) {
  return std::string(std::get<Setting>(info.param).name) + "_" +
         std::string(to_string(std::get<OpKind>(info.param)));
}

template <class Setting>
void run_message_cases(const MessageParameter<Setting>& parameter, const MakeParts& make_parts) {
  const auto& [setting, kind] = parameter;
  run_threads(setting.size(), make_parts,
              [&, kind = kind, every = setting.every](Harness& harness) {
                run_cases(harness, some_cases_of(kind, harness.size(), every));
              });
}

/// The kinds that the hierarchical backend serves.
inline auto kinds_of_hosts() {
  return ::testing::Values(OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast);
}

}  // namespace hvd::conformance
