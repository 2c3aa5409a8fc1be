#include "backend/nccl/library.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace hvd {
namespace {

TEST(NcclLibraryTest, FindsTheLibraryAndItsFunctions) {
  std::string reason;
  const auto library = nccl::load_library(reason);
  ASSERT_NE(library, nullptr) << reason;
  EXPECT_GE(library->version(), 21800);
  EXPECT_EQ(library->has_registration(), library->version() >= 21900);
  EXPECT_NE(nccl::describe_library().find("2."), std::string::npos);
}

TEST(NcclLibraryTest, ALibraryThatIsNotThereIsAReason) {
  ::setenv("HVD_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  std::string reason;
  EXPECT_EQ(nccl::load_library(reason), nullptr);
  EXPECT_NE(reason.find("/nowhere/libnccl.so.2"), std::string::npos) << reason;
  // A library, but not NCCL.
  ::setenv("HVD_NCCL_LIBRARY", "libm.so.6", 1);
  EXPECT_EQ(nccl::load_library(reason), nullptr);
  EXPECT_NE(reason.find("without ncclGetVersion"), std::string::npos) << reason;
  ::unsetenv("HVD_NCCL_LIBRARY");
}

}  // namespace
}  // namespace hvd
