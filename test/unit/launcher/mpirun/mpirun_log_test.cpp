#include "mpirun/mpirun_log.h"

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
      "[proxy:0@vm] HYDU_sock_write: write error (Broken pipe)\n"
      "[proxy:0@vm] main (proxy/pmip.c:127): demux engine error waiting for event\n";
  EXPECT_EQ(log.feed(text), "\n");
  EXPECT_EQ(log.finish(), "");
  EXPECT_EQ("\n" + log.held(), text);
}

TEST(MpirunLog, ShowsOtherLinesOfHydrasProxies) {
  for (const std::string line :
       {"[proxy:0@vm] no space left on device\n", "[mpiexec@vm] write error (Broken pipe)\n"}) {
    MpirunLog log;
    EXPECT_EQ(log.feed(line), line);
    EXPECT_FALSE(log.lost_host() || log.lacks_executable()) << line;
  }
}

TEST(MpirunLog, KnowsThatHydraDidNotReachAHost) {
  for (const std::string line :
       {"[mpiexec@vm] ui_cmd_cb (mpiexec/pmiserv_pmci.c:51): Launch proxy failed.\n",
        "[mpiexec@vm] Error: Unable to run bstrap_proxy on node7 (pid 17967, exit code 65280)\n",
        "[mpiexec@vm] Error: Downstream from host node7 exited abnormally\n"}) {
    MpirunLog log;
    EXPECT_EQ(log.feed(line), line);
    EXPECT_TRUE(log.lost_host()) << line;
    EXPECT_EQ(log.about_hosts(), line);
    EXPECT_FALSE(log.lacks_executable()) << line;
  }
}

TEST(MpirunLog, KnowsThatHydraDidNotFindTheProgram) {
  for (const std::string line :
       {"[proxy:1@vm] HYDU_create_process (lib/utils/launch.c:73): execvp error on file "
        "/opt/hvdrun (No such file or directory)\n",
        "[proxy:0:0@vm] HYD_spawn (libhydra/spawn/intel/hydra_spawn.c:177): execvp error on file "
        "/opt/hvdrun (No such file or directory)\n"}) {
    MpirunLog log;
    EXPECT_EQ(log.feed(line), line);
    EXPECT_TRUE(log.lacks_executable()) << line;
    EXPECT_FALSE(log.lost_host()) << line;
  }
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

  for (const std::string text :
       {"mpirun was unable to find the specified executable file",
        "mpirun was unable to launch the specified application as it could not access\nor execute "
        "an executable:"}) {
    MpirunLog executable;
    executable.feed(paragraph(text));
    EXPECT_TRUE(executable.lacks_executable()) << text;
  }
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
