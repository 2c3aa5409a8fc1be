#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "unit/transport/ucx/fake_worker.h"

namespace hvd::testing {

inline std::string error_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

inline ucx::JobMembers members(int rank, int size, std::uint32_t generation = 3) {
  ucx::JobMembers made{.rank = rank, .generation = generation, .key = "key", .addresses = {}};
  const auto others = std::make_shared<FakeUcx>();
  for (int other = 0; other < size; ++other)
    made.addresses.push_back(fake_workers(others, other).address());
  return made;
}

/// Rank 1 of 4.
class UcxCarrierTest : public ::testing::Test {
 protected:
  FakeUcx::Request& sending(int peer) { return ucx->last("send to " + std::to_string(peer)); }
  void end(FakeUcx::Request& request, ucx::Status status, std::size_t bytes = 0) {
    request.status = status;
    request.bytes = bytes;
  }
  void check() {
    carrier->check_connections([this](int rank) { return rank != ignored; });
  }
  /// Completes the connections, so that waiting messages are sent.
  void connect() {
    for (int answer = 0; answer < 8; ++answer) carrier->progress();
  }

  static constexpr message::Tag kTag = 77 << message::kKindBits;
  const std::shared_ptr<FakeUcx> ucx = std::make_shared<FakeUcx>();
  std::shared_ptr<message::Carrier> carrier =
      ucx::make_ucx_carrier(fake_workers(ucx, 1), members(1, 4));
  int ignored = -1;  ///< a rank whose broken connections do not count
  std::vector<std::byte> memory = std::vector<std::byte>(64);
};

}  // namespace hvd::testing
