#include "capi/guard.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "hvd/elastic.h"

namespace hvd::capi::testing {
namespace {

template <class Exception>
hvd_status_t status_of(const Exception& exception) {
  return guarded([&] { throw exception; });
}

TEST(Guard, EveryClassOfErrorHasItsStatusAndKeepsItsText) {
  EXPECT_EQ(status_of(UsageError("u")), HVD_ERROR_USAGE);
  EXPECT_STREQ(hvd_last_error(), "u");
  EXPECT_EQ(status_of(NotInitializedError("n")), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_EQ(status_of(elastic::GenerationOver("g")), HVD_ERROR_GENERATION_OVER);
  EXPECT_EQ(status_of(MismatchError("m")), HVD_ERROR_MISMATCH);
  EXPECT_EQ(status_of(StalledError("s")), HVD_ERROR_STALLED);
  EXPECT_EQ(status_of(ShutdownError("d")), HVD_ERROR_SHUTDOWN);
  EXPECT_EQ(status_of(Error("e")), HVD_ERROR_INTERNAL);
  EXPECT_STREQ(hvd_last_error(), "e");
}

TEST(Guard, NamesTheLostRankUntilTheNextError) {
  EXPECT_EQ(status_of(PeerLostError("gone", 3)), HVD_ERROR_PEER_LOST);
  EXPECT_EQ(hvd_last_error_rank(), 3);
  EXPECT_EQ(guarded([] {}), HVD_OK);
  EXPECT_EQ(hvd_last_error_rank(), 3);
  EXPECT_EQ(status_of(UsageError("u")), HVD_ERROR_USAGE);
  EXPECT_EQ(hvd_last_error_rank(), -1);
}

TEST(Guard, NothingIsThrownIntoC) {
  EXPECT_EQ(status_of(std::bad_alloc()), HVD_ERROR_INTERNAL);
  EXPECT_STREQ(hvd_last_error(), "out of memory");
  EXPECT_EQ(status_of(std::logic_error("a bug")), HVD_ERROR_INTERNAL);
  EXPECT_STREQ(hvd_last_error(), "a bug");
  EXPECT_EQ(status_of(42), HVD_ERROR_INTERNAL);
  EXPECT_STREQ(hvd_last_error(), "an exception of an unknown type");
}

TEST(Guard, EveryStatusHasAName) {
  for (int status = HVD_OK; status <= HVD_ERROR_GENERATION_OVER; ++status) {
    EXPECT_STRNE(hvd_status_name(static_cast<hvd_status_t>(status)), "unknown") << status;
  }
}

}  // namespace
}  // namespace hvd::capi::testing
