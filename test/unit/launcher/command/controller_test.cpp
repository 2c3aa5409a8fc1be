#include "command/controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "processes/job_folder.h"
#include "unit/launcher/program_file.h"

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;

ControllerFacts facts(bool mpirun, bool ucx) {
  ControllerFacts facts;
  facts.has_mpirun = mpirun;
  facts.has_ucx = [ucx] { return ucx; };
  return facts;
}

TEST(Controller, AnExplicitChoiceIsUsed) {
  for (const Controller asked : {Controller::kMpi, Controller::kUcx}) {
    ControllerFacts against = facts(false, false);
    against.batch_system = "SLURM_JOB_ID";
    against.needs_mpi = "./solver needs libmpi.so.40";
    EXPECT_EQ(choose_controller(asked, against).controller, asked);
  }
}

TEST(Controller, MpiWhereSomethingIsMeantForIt) {
  ControllerFacts allocation = facts(true, true), arguments = allocation, named = allocation,
                  program = allocation;
  allocation.batch_system = "SLURM_JOB_ID";
  arguments.mpi_args = true;
  named.names_mpirun = true;
  program.needs_mpi = "./solver needs libmpi.so.40";
  for (const ControllerFacts& given : {allocation, arguments, named, program}) {
    EXPECT_EQ(choose_controller(Controller::kAuto, given).controller, Controller::kMpi);
  }
  EXPECT_THAT(choose_controller(Controller::kAuto, allocation).reason, HasSubstr("SLURM_JOB_ID"));
  EXPECT_EQ(choose_controller(Controller::kAuto, program).reason, "./solver needs libmpi.so.40");
}

TEST(Controller, ElseUcxIfItIsThere) {
  const auto choose = [](bool mpirun, bool ucx) {
    return choose_controller(Controller::kAuto, facts(mpirun, ucx)).controller;
  };
  EXPECT_EQ(choose(true, true), Controller::kUcx);
  EXPECT_EQ(choose(false, true), Controller::kUcx);
  EXPECT_EQ(choose(true, false), Controller::kMpi);
  EXPECT_EQ(choose(false, false), Controller::kMpi) << "whose error says what to do";
}

TEST(Controller, UcxIsNotLookedForInVain) {
  ControllerFacts given = facts(true, true);
  given.mpi_args = true;
  given.has_ucx = []() -> bool { throw std::logic_error("asked"); };
  EXPECT_NO_THROW(choose_controller(Controller::kAuto, given));
  EXPECT_NO_THROW(choose_controller(Controller::kUcx, given));
}

TEST(Controller, AProgramThatNeedsMpiIsFoundInACommand) {
  const TemporaryFolder folder;
  const auto program = [&](const std::string& name, const std::vector<std::string>& libraries) {
    return test::write_program(folder.path() / name, test::program_that_needs(libraries));
  };
  const std::string solver = program("solver", {"libm.so.6", "libmpi.so.40"});
  const std::string other = program("other", {"libmpir.so.23", "libc.so.6"});
  const std::string needs = solver + " needs libmpi.so.40";
  EXPECT_EQ(program_that_needs_mpi({solver}), needs);
  EXPECT_EQ(program_that_needs_mpi({"env", "A=1", solver, "-n"}), needs);
  EXPECT_EQ(program_that_needs_mpi({other, "solver"}), "") << "what is in no folder is a word";
  EXPECT_EQ(program_that_needs_mpi({folder.path() / "none", folder.path()}), "");
  for (const std::string library : {"libmpi_cxx.so.40", "libmpi_mpifh.so.40", "libmpich.so.12"})
    EXPECT_NE(program_that_needs_mpi({program("named", {library})}), "") << library;
  std::filesystem::permissions(solver, std::filesystem::perms::owner_read);
  EXPECT_EQ(program_that_needs_mpi({"cat", solver}), "") << "it is not run";
}

TEST(Controller, Names) {
  for (const Controller controller : {Controller::kAuto, Controller::kMpi, Controller::kUcx})
    EXPECT_EQ(parse_controller(to_string(controller)), controller);
  EXPECT_EQ(parse_controller("tcp"), std::nullopt);
}

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
