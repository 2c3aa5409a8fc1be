#include "bootstrap/settings_agreement.h"

#include <gtest/gtest.h>

#include <vector>

namespace hvd::runtime {
namespace {

TEST(SettingsAgreement, NamesTheFirstRankThatDiffers) {
  const Topology topology = make_topology(0, {"a", "a", "b"});
  RuntimeOptions options;
  std::vector<SettingsReport> reports(3, report_of(options));
  EXPECT_EQ(find_different_setting(reports, topology), std::nullopt);
  options.backend = "mpi";
  reports[2] = report_of(options);
  EXPECT_EQ(find_different_setting(reports, topology),
            "HVD_BACKEND must be the same on every rank: it is unset on rank 0 (a) and mpi on rank "
            "2 (b); set it for all, for instance with 'hvdrun -x HVD_BACKEND=VALUE'");
  options = {};
  options.cache_capacity = 0;
  reports[2] = report_of(options);
  EXPECT_NE(find_different_setting(reports, topology)->find("HVD_CACHE_CAPACITY"),
            std::string::npos);
  options = {};
  options.control_radix = 4;
  reports[1] = report_of(options);
  EXPECT_NE(find_different_setting(reports, topology)->find("4 on rank 1"), std::string::npos);
}

}  // namespace
}  // namespace hvd::runtime
