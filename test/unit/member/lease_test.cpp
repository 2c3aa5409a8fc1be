#include "member/lease.h"

#include <gtest/gtest.h>

namespace hvd::member {
namespace {

using std::chrono::seconds;

TimePoint at(int second) { return TimePoint(seconds(second)); }

TEST(Lease, HoldsFromTheRequestThatWasAnsweredAndNotFromTheAnswer) {
  Lease lease(seconds(3), seconds(10), at(100));
  EXPECT_EQ(lease.expiry(), at(110));
  EXPECT_EQ(lease.next_request(), at(103));
  const auto first = lease.request(at(103));
  const auto second = lease.request(at(106));
  EXPECT_EQ(lease.next_request(), at(109));
  EXPECT_EQ(lease.expiry(), at(110)) << "no answer yet";
  lease.answered(first);
  EXPECT_EQ(lease.expiry(), at(113));
  EXPECT_FALSE(lease.expired(at(112)));
  EXPECT_TRUE(lease.expired(at(113)));
  lease.answered(second);
  EXPECT_EQ(lease.expiry(), at(116));
}

TEST(Lease, AnAnswerThatIsLateOrRepeatedDoesNotShortenIt) {
  Lease lease(seconds(3), seconds(10), at(0));
  const auto first = lease.request(at(3));
  const auto second = lease.request(at(6));
  lease.answered(second);
  lease.answered(first);
  lease.answered(second);
  EXPECT_EQ(lease.expiry(), at(16));
}

}  // namespace
}  // namespace hvd::member
