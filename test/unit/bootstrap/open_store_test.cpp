#include "bootstrap/open_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "hvd/error.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OpenStore, RefusesSizesAndTextsThatAreTooLarge) {
  const auto outcome = [](const RankInfo& own) {
    return outcome_of([&] { open_store("file:///tmp/job", own, soon()); });
  };
  EXPECT_THAT(outcome({.rank = 0, .size = 100'000'000}),
              AllOf(HasSubstr("usage: "), HasSubstr("at most 1000000, got 100000000 on rank 0")));
  EXPECT_THAT(outcome({.token = std::string(70'000, 'x'), .rank = 1, .size = 2}),
              HasSubstr("HVD_JOB_TOKEN: expected at most 4096 bytes, got 70000 on rank 1"));
  EXPECT_THAT(outcome({.job = std::string(5'000, 'x'), .rank = 1, .size = 2}),
              HasSubstr("HVD_JOB_NAME: expected at most 4096 bytes"));
  EXPECT_THAT(outcome({.rank = 2, .size = 2}), HasSubstr("expected a rank from 0 to 1"));
  EXPECT_THAT(outcome({.rank = -1, .size = 2}), HasSubstr("usage: "));
}

TEST(OpenStore, RefusesUnknownMethods) {
  for (const char* const method :
       {"", "file", "file://", "file:///", "file://relative/job", "file:///folder/", "smoke://x",
        "tcp://[::1", "tcp://[::1:29400", "tcp://::1]:29400", "tcp://[]:29400", "tcp://h",
        "tcp://h:0", "tcp://h:65536"}) {
    try {
      open_store(method, {}, short_time());
      ADD_FAILURE() << method;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(std::string("'") + method + "'"),
                                      HasSubstr("expected"), HasSubstr("file:///")));
    }
  }
}

}  // namespace
}  // namespace hvd::rendezvous
