#include "system/needed_libraries.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "system/temporary_folder.h"
#include "unit/launcher/program_file.h"

namespace hvd::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NeededLibraries : public ::testing::Test {
 protected:
  std::vector<std::string> of(const std::string& bytes) const {
    return needed_libraries(test::write_program(folder_.path() / "program", bytes));
  }
  const TemporaryFolder folder_;
};

TEST_F(NeededLibraries, OfAProgram) {
  EXPECT_THAT(of(test::program_that_needs({"libmpi.so.40", "libc.so.6"})),
              ElementsAre("libmpi.so.40", "libc.so.6"));
  EXPECT_THAT(of(test::program_that_needs({})), IsEmpty());
  EXPECT_THAT(needed_libraries("/proc/self/exe"), Contains("libc.so.6"));
}

TEST_F(NeededLibraries, OfAFileThatIsNoProgram) {
  EXPECT_THAT(of(""), IsEmpty());
  EXPECT_THAT(of("#!/bin/sh\nexec ./program libmpi.so.40\n"), IsEmpty());
  EXPECT_THAT(needed_libraries("/no/such/file"), IsEmpty());
  EXPECT_THAT(needed_libraries("/"), IsEmpty());
}

TEST_F(NeededLibraries, OfOneThatEndsAnywhere) {
  const std::string whole = test::program_that_needs({"libmpi.so.40"});
  for (std::size_t size = 0; size + 20 < whole.size(); ++size)
    EXPECT_THAT(of(whole.substr(0, size)), IsEmpty()) << size;
}

// Offsets, counts and sizes that the file does not have.
TEST_F(NeededLibraries, OfAMalformedProgram) {
  const std::string whole = test::program_that_needs({"libmpi.so.40"});
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(0xff);
    EXPECT_LE(of(changed).size(), 2U) << at;
  }
}

}  // namespace
}  // namespace hvd::launcher
