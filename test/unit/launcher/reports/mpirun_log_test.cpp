#include "reports/mpirun_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;

const std::string kRule = std::string(74, '-') + "\n";

std::string paragraph(const std::string& text) { return kRule + text + "\n" + kRule; }

TEST(MpirunLog, ShowsTextThatIsNotAboutRanks) {
  MpirunLog log;
  EXPECT_EQ(log.feed("[host:1] warn"), "");
  EXPECT_EQ(log.feed("ing\n"), "[host:1] warning\n");
  const std::string text = paragraph("There was an error initializing an OpenFabrics device.");
  EXPECT_EQ(log.feed(text), text);
  EXPECT_EQ(log.feed("unfinished"), "");
  EXPECT_EQ(log.finish(), "unfinished");
  EXPECT_EQ(log.held(), "");
}

TEST(MpirunLog, HoldsBackItsAccountOfRanks) {
  MpirunLog log;
  const std::string text =
      paragraph("Primary job  terminated normally, but 1 process returned\na non-zero exit code.") +
      paragraph(
          "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).");
  for (const char c : text) EXPECT_EQ(log.feed(std::string(1, c)), "");
  EXPECT_EQ(log.finish(), "");
  EXPECT_EQ(log.held(), text);
}

TEST(MpirunLog, HoldsBackHydrasAccountOfRanks) {
  MpirunLog log;
  const std::string rule = std::string(83, '=') + "\n";
  const std::string text =
      "\n" + rule +
      "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 72 RUNNING AT vm\n" +
      rule +
      "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
      "This typically refers to a problem with your application.\n"
      "[proxy:0@vm] HYDU_sock_write: write error (Broken pipe)\n";
  EXPECT_EQ(log.feed(text), "\n");
  EXPECT_EQ(log.finish(), "");
  EXPECT_EQ("\n" + log.held(), text);
}

TEST(MpirunLog, ReadsAnAbort) {
  MpirunLog log;
  EXPECT_EQ(
      log.feed(paragraph(
          "MPI_ABORT was invoked on rank 12 in communicator MPI_COMM_WORLD\nwith errorcode 5.")),
      "");
  EXPECT_EQ(log.feed("[vm:12] 1 more process has sent help message help-mpi-api.txt / mpi-abort\n"),
            "");
  EXPECT_EQ(log.abort_rank(), 12);
}

TEST(MpirunLog, ReadsAnImproperEnd) {
  MpirunLog log;
  log.feed(paragraph(
      "mpirun has exited due to process rank 3 with PID 0 on\nnode vm exiting improperly."));
  EXPECT_EQ(log.improper_rank(), 3);
}

TEST(MpirunLog, KnowsSlotsAndHosts) {
  MpirunLog slots;
  EXPECT_THAT(
      slots.feed(paragraph("There are not enough slots available in the system to satisfy the 4")),
      HasSubstr("not enough"));
  EXPECT_TRUE(slots.lacks_slots());
  EXPECT_FALSE(slots.lost_host());

  MpirunLog host;
  EXPECT_THAT(host.feed("ssh: Could not resolve hostname x: Name or service not known\n"),
              HasSubstr("ssh:"));
  EXPECT_EQ(host.feed(paragraph("ORTE was unable to reliably start one or more daemons.")), "");
  EXPECT_TRUE(host.lost_host());
  EXPECT_THAT(host.held(), HasSubstr("unable to reliably start"));

  MpirunLog executable;
  executable.feed(paragraph("mpirun was unable to find the specified executable file"));
  EXPECT_TRUE(executable.lacks_executable());
}

TEST(MpirunLog, AnUnfinishedParagraphIsStillClassified) {
  MpirunLog log;
  log.feed(kRule + "There are not enough slots available in the system\n");
  EXPECT_THAT(log.finish(), HasSubstr("not enough slots"));
  EXPECT_TRUE(log.lacks_slots());
}

TEST(MpirunLog, ItsOwnBacktraceIsHeldBack) {
  MpirunLog log;
  EXPECT_EQ(log.feed("[h:12] *** Process received signal ***\n[h:12] [ 0] /lib/x\nuseful\n"),
            "useful\n");
  EXPECT_NE(log.held().find("Process received signal"), std::string::npos);
  EXPECT_TRUE(log.wrote());
}

}  // namespace
}  // namespace hvd::launcher
