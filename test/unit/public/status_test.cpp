#include "hvd/status.h"

#include <gtest/gtest.h>

#include <typeinfo>

#include "hvd/error.h"

namespace hvd {
namespace {

template <class Expected>
void expect_class(StatusCode code) {
  const Status status{code, "rank 3 is gone", 3};
  EXPECT_FALSE(status.ok());
  try {
    status.raise_if_error();
    ADD_FAILURE() << "code " << static_cast<int>(code) << " did not throw";
  } catch (const std::exception& error) {
    EXPECT_EQ(typeid(error), typeid(Expected)) << "code " << static_cast<int>(code);
    EXPECT_STREQ(error.what(), "rank 3 is gone");
  }
}

TEST(Status, EveryCodeHasItsErrorClass) {
  expect_class<UsageError>(StatusCode::kUsage);
  expect_class<MismatchError>(StatusCode::kMismatch);
  expect_class<StalledError>(StatusCode::kStalled);
  expect_class<PeerLostError>(StatusCode::kPeerLost);
  expect_class<ShutdownError>(StatusCode::kShutdown);
  expect_class<Error>(StatusCode::kInternal);
}

TEST(Status, ALostPeerKeepsItsRank) {
  try {
    Status{StatusCode::kPeerLost, "lost", 3}.raise_if_error();
    ADD_FAILURE() << "did not throw";
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), 3);
  }
}

TEST(Status, OkDoesNotThrow) {
  EXPECT_TRUE(Status{}.ok());
  EXPECT_NO_THROW(Status{}.raise_if_error());
}

}  // namespace
}  // namespace hvd
