#include "command/controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;

ControllerFacts facts(bool mpirun, bool ucx) {
  ControllerFacts facts;
  facts.has_mpirun = mpirun;
  facts.has_ucx = [ucx] { return ucx; };
  return facts;
}

TEST(Controller, WhatIsAskedForIsTaken) {
  for (const Controller asked : {Controller::kMpi, Controller::kUcx}) {
    ControllerFacts against = facts(false, false);
    against.batch_system = "SLURM_JOB_ID";
    EXPECT_EQ(choose_controller(asked, against).controller, asked);
  }
}

TEST(Controller, MpiWhereSomethingIsMeantForIt) {
  ControllerFacts allocation = facts(true, true), arguments = allocation, named = allocation;
  allocation.batch_system = "SLURM_JOB_ID";
  arguments.mpi_args = true;
  named.names_mpirun = true;
  for (const ControllerFacts& given : {allocation, arguments, named}) {
    EXPECT_EQ(choose_controller(Controller::kAuto, given, false).controller, Controller::kMpi);
  }
  EXPECT_THAT(choose_controller(Controller::kAuto, allocation, false).reason,
              HasSubstr("SLURM_JOB_ID"));
}

TEST(Controller, WhatIsThereDecides) {
  const auto choose = [](bool mpirun, bool ucx, bool prefer_mpi) {
    return choose_controller(Controller::kAuto, facts(mpirun, ucx), prefer_mpi).controller;
  };
  EXPECT_EQ(choose(true, true, true), Controller::kMpi);
  EXPECT_EQ(choose(true, true, false), Controller::kUcx);
  for (const bool prefer_mpi : {true, false}) {
    EXPECT_EQ(choose(true, false, prefer_mpi), Controller::kMpi);
    EXPECT_EQ(choose(false, true, prefer_mpi), Controller::kUcx);
    EXPECT_EQ(choose(false, false, prefer_mpi), Controller::kMpi) << "whose error says what to do";
  }
}

TEST(Controller, UcxIsNotLookedForInVain) {
  ControllerFacts given = facts(true, true);
  given.has_ucx = []() -> bool { throw std::logic_error("asked"); };
  EXPECT_NO_THROW(choose_controller(Controller::kAuto, given, true));
  EXPECT_NO_THROW(choose_controller(Controller::kUcx, given));
}

TEST(Controller, Names) {
  for (const Controller controller : {Controller::kAuto, Controller::kMpi, Controller::kUcx})
    EXPECT_EQ(parse_controller(to_string(controller)), controller);
  EXPECT_EQ(parse_controller("tcp"), std::nullopt);
}

}  // namespace
}  // namespace hvd::launcher
