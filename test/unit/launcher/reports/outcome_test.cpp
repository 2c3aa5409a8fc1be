#include "reports/outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr long long kSecond = 1'000'000'000;

RankRecord running(const std::string& host, int local_rank, int pid) {
  RankRecord rank;
  rank.connected = true;
  rank.host = host;
  rank.local_rank = local_rank;
  rank.pid = pid;
  return rank;
}

RankRecord ended(int code, double at, bool stopped = false) {
  RankRecord rank = running("h", 0, 100);
  rank.ended = Ended{.time_ns = static_cast<long long>(at * kSecond),
                     .pid = 100,
                     .code = code,
                     .signal = code > 128 ? code - 128 : 0,
                     .stopped = stopped};
  return rank;
}

RankRecord lost(double at) {
  RankRecord rank = running("h", 0, 100);
  rank.lost_ns = static_cast<long long>(at * kSecond);
  return rank;
}

void init_again(RankRecord& rank) {
  Notice notice;
  notice.kind = "init";
  apply_notice(rank, notice);
}

RankRecord with_notice(RankRecord rank, const std::string& kind, double at, int code = 0,
                       const std::string& text = "") {
  init_again(rank);
  apply_notice(
      rank,
      {.kind = kind, .time_ns = static_cast<long long>(at * kSecond), .code = code, .text = text});
  return rank;
}

JobRecord job_of(std::vector<RankRecord> ranks) {
  JobRecord job;
  job.ranks = std::move(ranks);
  job.cause = StopCause::kRankFailed;
  job.grace_s = 5;
  return job;
}

TEST(FirstFailure, IsTheEarliestWithoutAnOrderToStop) {
  EXPECT_EQ(first_failure({ended(0, 1), ended(0, 2)}), std::nullopt);
  EXPECT_EQ(first_failure({ended(1, 3), ended(137, 2), ended(0, 1)}), 1);
  EXPECT_EQ(first_failure({ended(143, 1, true), ended(3, 2)}), 1);
  EXPECT_EQ(first_failure({ended(143, 1, true)}), std::nullopt);
  EXPECT_EQ(first_failure({ended(1, 2), lost(1)}), 1);
  EXPECT_EQ(first_failure({ended(1, 1), lost(2)}), 0);
  EXPECT_EQ(first_failure({ended(4, 2), ended(5, 2)}), 0);
}

TEST(FinalMessage, NumbersTheRanksOfANodeAfterThoseOfTheNodesBefore) {
  JobRecord job = job_of({ended(0, 1), ended(3, 2), ended(143, 3, true)});
  job.first_rank = 4;
  const std::string message = final_message(job);
  EXPECT_THAT(message, HasSubstr("hvdrun: rank 5 failed first: exited with code 3"));
  EXPECT_THAT(message, HasSubstr("rank 5 wrote nothing to stderr"));
  EXPECT_THAT(message, HasSubstr("stopped the other 1 rank (6)"));
}

TEST(FinalMessage, WarnsOfRanksThatHaveNotJoined) {
  JobRecord job = job_of({ended(0, 1), ended(0, 2)});
  job.cause = StopCause::kNone;
  EXPECT_THAT(final_message(job), IsEmpty());
  job.expects_hvd = true;
  EXPECT_THAT(final_message(job), HasSubstr("none of the 2 ranks has joined a job of hvd"));
  EXPECT_EQ(exit_code(job), 0);
  init_again(job.ranks[1]);
  EXPECT_THAT(final_message(job), IsEmpty()) << "a rank has joined";
  job.ranks = {ended(0, 1)};
  EXPECT_THAT(final_message(job), IsEmpty()) << "one rank is a job of its own";
  job.ranks = {ended(0, 1), ended(2, 2)};
  EXPECT_THAT(final_message(job), HasSubstr("rank 1 failed first"));
}

TEST(FirstFailure, ARankLostAfterTheOrderToStopIsNotBlamed) {
  RankRecord stopped_rank = lost(1);
  stopped_rank.ordered_to_stop = true;
  EXPECT_EQ(first_failure({stopped_rank, ended(3, 2)}), 1);
}

TEST(FirstFailure, ARankThatEndedForAnothersLossIsNotTheFirst) {
  const RankRecord lost_peer = with_notice(ended(134, 1.2), "loss", 1.1, 4, "lost rank 1");
  EXPECT_EQ(first_failure({lost_peer, with_notice(ended(134, 1.5), "throw", 1.0, 134)}), 1)
      << "the cause takes longer to die than the ranks that report its loss";
  EXPECT_EQ(first_failure({lost_peer, ended(137, 1.5)}), 1);
  EXPECT_EQ(first_failure({lost_peer, ended(0, 2)}), 0) << "no other rank failed";
  EXPECT_EQ(first_failure({with_notice(ended(3, 1.0), "loss", 1.1, 4), ended(4, 1.5)}), 0)
      << "it failed before the loss was reported";
}

TEST(FirstFailure, ARankThatAnnouncedItsEndMayBeStoppedMeanwhile) {
  const RankRecord lost_peer = with_notice(ended(134, 1.2), "loss", 1.1, 5);
  const RankRecord leaving = with_notice(ended(143, 1.5, true), "exit", 1.0, 3);
  EXPECT_EQ(first_failure({lost_peer, leaving}), 1);
  EXPECT_EQ(exit_code(job_of({lost_peer, leaving})), 3);
  EXPECT_THAT(final_message(job_of({lost_peer, leaving})),
              HasSubstr("rank 1 failed first: exited with code 3"));
  RankRecord after_stop = with_notice(ended(143, 1.5, true), "exit", 1.0, 3);
  after_stop.death->stopped = true;
  EXPECT_EQ(first_failure({lost_peer, after_stop}), 0) << "it ended because hvdrun stopped it";
}

TEST(FirstFailure, AnotherInitForgetsTheNoticesBefore) {
  RankRecord rank = with_notice(ended(3, 2), "loss", 1, 4);
  init_again(rank);
  EXPECT_EQ(first_failure({with_notice(ended(3, 2.5), "loss", 2, 4), rank}), 1);
}

/// Adds a notice to the record: at the time `at`, the rank reported the loss of rank `about`.
RankRecord without(RankRecord rank, double at, int about) {
  init_again(rank);
  apply_notice(rank, {.kind = "loss",
                      .time_ns = static_cast<long long>(at * kSecond),
                      .code = 4,
                      .text = "lost rank " + std::to_string(about),
                      .about = about});
  return rank;
}

RankRecord in_job(RankRecord rank) {
  init_again(rank);
  return rank;
}

TEST(LostRank, IsAbandonedWhenAllOthersHaveEndedAndReportIt) {
  const RankRecord stopped = in_job(running("h", 1, 101));
  EXPECT_EQ(abandoned_rank({without(ended(0, 2), 1, 1), stopped}), 1);
  EXPECT_EQ(abandoned_rank({without(ended(0, 2), 1, 2), without(ended(0, 2), 1, 2), stopped}), 2);
  EXPECT_EQ(abandoned_rank({without(running("h", 0, 100), 1, 1), stopped}), std::nullopt)
      << "the other one may still save its work";
  EXPECT_EQ(abandoned_rank({in_job(ended(0, 2)), stopped}), std::nullopt);
  EXPECT_EQ(abandoned_rank({without(ended(0, 2), 1, 1), without(ended(0, 2), 1, 0), stopped}),
            std::nullopt);
  EXPECT_EQ(abandoned_rank({without(ended(0, 2), 1, 1), without(stopped, 1, 0)}), std::nullopt)
      << "the network between them is cut";
  RankRecord over = stopped;
  apply_notice(over, {.kind = "over"});
  EXPECT_EQ(abandoned_rank({without(ended(0, 2), 1, 1), over}), std::nullopt)
      << "it has left the job, and may run on";
  EXPECT_EQ(abandoned_rank({stopped}), std::nullopt);
}

TEST(LostRank, IsToBlameThoughHvdrunEndedIt) {
  JobRecord job = job_of({without(ended(0, 2), 1, 1), in_job(ended(137, 9, true))});
  mark_lost_ranks(job.ranks);
  EXPECT_EQ(first_failure(job.ranks), 1);
  EXPECT_EQ(exit_code(job), 69);
  EXPECT_THAT(final_message(job),
              HasSubstr("rank 1 failed first: the other ranks lost it, and hvdrun ended it"));
  EXPECT_THAT(final_message(job), HasSubstr("        lost rank 1\n"));
  JobRecord died = job_of({without(ended(134, 2), 1, 1), in_job(ended(137, 9, true))});
  mark_lost_ranks(died.ranks);
  EXPECT_EQ(first_failure(died.ranks), 1) << "the other rank died because of the loss";
  JobRecord earlier = job_of({without(ended(3, 0.5), 1, 1), in_job(ended(143, 9, true))});
  mark_lost_ranks(earlier.ranks);
  EXPECT_EQ(first_failure(earlier.ranks), 0);
}

TEST(HeldRank, IsOneWhoseMpiIsHvds) {
  RankRecord rank = in_job(ended(0, 1));
  EXPECT_TRUE(must_be_held(rank));
  apply_notice(rank, {.kind = "left"});
  apply_notice(rank, {.kind = "over"});
  EXPECT_TRUE(must_be_held(rank)) << "_Exit() leaves MPI_Finalize out";
  EXPECT_FALSE(must_be_held(ended(0, 1))) << "the program does not use hvd";
  apply_notice(rank, {.kind = "init", .code = 1});
  EXPECT_FALSE(must_be_held(rank)) << "the program started MPI, and must end it";
}

TEST(ExitCode, OfAnUntroubledJob) {
  JobRecord job = job_of({ended(0, 1), ended(0, 2)});
  job.cause = StopCause::kStarterEnded;
  EXPECT_EQ(exit_code(job), 0);
  EXPECT_THAT(final_message(job), IsEmpty());
  job.starter_code = 1;
  EXPECT_EQ(exit_code(job), 0) << "every rank ended well: mpirun's own trouble is not the job's";
}

TEST(ExitCode, OfFailures) {
  EXPECT_EQ(exit_code(job_of({ended(3, 2), ended(139, 1)})), 139);
  EXPECT_EQ(exit_code(job_of({lost(1), ended(143, 2, true)})), 69);
}

TEST(ExitCode, OfSignalsAndTimeouts) {
  JobRecord job = job_of({ended(1, 1), ended(143, 2, true)});
  job.cause = StopCause::kUserSignal;
  job.user_signal = SIGINT;
  EXPECT_EQ(exit_code(job), 130) << "the way a rank ends by the user's signal is not its failure";
  job.cause = StopCause::kTimeout;
  EXPECT_EQ(exit_code(job), 124);
}

TEST(ExitCode, WhenMpirunCouldNotStart) {
  JobRecord job = job_of({RankRecord{}, RankRecord{}});
  job.cause = StopCause::kStarterEnded;
  job.starter_code = 213;
  EXPECT_EQ(exit_code(job), 70);
  job.starter_code = 1;
  EXPECT_EQ(exit_code(job), 1);
  EXPECT_THAT(final_message(job), HasSubstr("had started, and without a message; exit code 1\n"));
  job.starter_wrote = true;
  EXPECT_THAT(final_message(job), HasSubstr("mpirun ended with code 1 before 2 ranks (0 and 1) had "
                                            "started (mpirun's message is above); exit code 1\n"));
  job.lost_host = true;
  EXPECT_EQ(exit_code(job), 69);
  job.lost_host = false;
  job.lacks_executable = true;
  EXPECT_EQ(exit_code(job), 127);
  job.lacks_slots = true;
  EXPECT_EQ(exit_code(job), 69);
  EXPECT_FALSE(is_explained(job));
}

TEST(EarlyLeaver, NeedsBothAccountsToAgree) {
  JobRecord job = job_of({ended(143, 3, true), ended(0, 1)});
  job.starter_code = 1;
  EXPECT_EQ(early_leaver(job), std::nullopt);
  job.improper_rank = 1;
  EXPECT_EQ(early_leaver(job), 1);
  EXPECT_EQ(exit_code(job), 1);
  EXPECT_TRUE(is_explained(job));
  EXPECT_THAT(final_message(job), HasSubstr("rank 1 ended with code 0 but without MPI_Finalize"));
  EXPECT_THAT(final_message(job), HasSubstr("call MPI_Finalize() on every rank"));
  job.improper_rank = 0;
  EXPECT_EQ(early_leaver(job), std::nullopt) << "mpirun names a rank that hvdrun has stopped";
  job.improper_rank = 99;
  EXPECT_EQ(early_leaver(job), std::nullopt);
}

TEST(EarlyLeaver, APeerThatFailsBecauseOfItIsNotBlamed) {
  JobRecord job = job_of({ended(1, 1.1), ended(0, 1)});
  job.improper_rank = 1;
  EXPECT_EQ(early_leaver(job), 1);
  job.ranks[0].ended->time_ns = kSecond / 2;
  EXPECT_EQ(early_leaver(job), std::nullopt) << "the failure came first";
}

TEST(EarlyLeaver, IsReportedByHvdIfItLeftWithoutShutdown) {
  const RankRecord lost_peer = with_notice(ended(134, 1.2), "loss", 1.1, 5, "rank 1 has left");
  JobRecord job = job_of({lost_peer, with_notice(ended(0, 1.5), "exit", 1.0, 0)});
  EXPECT_EQ(early_leaver(job), 1);
  EXPECT_EQ(exit_code(job), 1);
  EXPECT_THAT(final_message(job),
              HasSubstr("rank 1 ended with code 0 but without hvd::shutdown()"));
  Notice later;
  later.kind = "loss";
  later.time_ns = static_cast<long long>(1.2 * kSecond);
  apply_notice(job.ranks[1], later);
  EXPECT_EQ(early_leaver(job), 1) << "while it leaves, other ranks end because of it";
  job.ranks[0].loss.reset();
  EXPECT_EQ(early_leaver(job), std::nullopt) << "rank 0 failed on its own";
}

TEST(EarlyLeaver, IsTheRankThatTheFailedOneLost) {
  JobRecord job = job_of({without(ended(134, 1.2), 1.1, 1), in_job(ended(0, 1))});
  EXPECT_EQ(early_leaver(job), 1) << "it left by _Exit()";
  job.starter_code = 3;
  EXPECT_EQ(exit_code(job), 1);
  EXPECT_THAT(final_message(job),
              HasSubstr("rank 1 ended with code 0 but without hvd::shutdown()"));
  RankRecord before_init = ended(134, 1.2);
  apply_notice(before_init, {.kind = "loss", .time_ns = kSecond, .code = 4, .about = 1});
  job.ranks = {before_init, ended(0, 0.9)};
  EXPECT_EQ(early_leaver(job), 1);
  EXPECT_THAT(final_message(job), HasSubstr("rank 1 ended with code 0 before hvd::init()"));
  job.ranks = {ended(75, 9), ended(0, 0.9), ended(0, 0.5)};
  EXPECT_EQ(early_leaver(job), 2) << "MPI_Init did not return";
  job.ranks = {in_job(ended(75, 9)), ended(0, 0.9)};
  EXPECT_EQ(early_leaver(job), std::nullopt);
}

TEST(EarlyLeaver, IsNoneWhenAllEndedWell) {
  JobRecord job = job_of({without(ended(0, 1.2), 1.1, 1), in_job(ended(0, 1))});
  job.improper_rank = 1;
  job.starter_code = 1;
  EXPECT_EQ(exit_code(job), 0);
  EXPECT_THAT(final_message(job), IsEmpty());
}

TEST(EarlyLeaver, IsNotARankThatCalledShutdown) {
  JobRecord job =
      job_of({with_notice(ended(3, 1.2), "loss", 1.1, 5, "rank 1 has called shutdown()"),
              with_notice(ended(0, 1), "left", 0.5)});
  job.improper_rank = 1;
  EXPECT_EQ(early_leaver(job), std::nullopt);
  EXPECT_EQ(exit_code(job), 3);
}

TEST(EarlyLeaver, ARankThatCalledShutdownIsNotAdvisedToCallIt) {
  JobRecord job = job_of({ended(143, 3, true), with_notice(ended(0, 1), "left", 0.5)});
  job.improper_rank = 1;
  EXPECT_THAT(final_message(job), HasSubstr("ended with code 0 after hvd::shutdown()"));
  EXPECT_THAT(final_message(job), HasSubstr("hvd::join()"));
}

TEST(FinalMessage, QuotesTheRanksNotice) {
  JobRecord job = job_of({with_notice(ended(134, 1.5), "throw", 1.0, 134, "uncaught: no\nmemory"),
                          with_notice(ended(134, 1.2), "loss", 1.1, 4), ended(143, 2, true)});
  EXPECT_THAT(final_message(job), HasSubstr("        uncaught: no\n        memory\n"));
  EXPECT_THAT(final_message(job),
              HasSubstr("hvdrun: 1 rank (1) ended after it; stopped the other 1 "
                        "rank (2), which ended "));
}

TEST(FinalMessage, DoesNotRepeatTheLastLines) {
  const std::string said = "it ended with an uncaught exception: no data\nin line 3";
  JobRecord job = job_of({with_notice(ended(134, 1.5), "throw", 1.0, 134, said)});
  job.stderr_tail = {"terminate called", "  what():  no data", "in line 3"};
  const std::string message = final_message(job);
  EXPECT_THAT(message, HasSubstr("|   what():  no data\n"));
  EXPECT_EQ(message.find("no data"), message.rfind("no data")) << message;
  job.tail_lines = 0;
  EXPECT_THAT(final_message(job), HasSubstr("        in line 3\n"));
}

TEST(FinalMessage, StatesThatAllRanksThrewTheSame) {
  const RankRecord one = with_notice(ended(134, 1.5), "throw", 1.0, 134, "it ended: no data");
  const std::string hint = "(all 2 ranks threw the same: which was the first is chance)\n";
  EXPECT_THAT(final_message(job_of({one, one})), HasSubstr(hint));
  EXPECT_THAT(
      final_message(job_of({one, with_notice(ended(134, 1.5), "throw", 1.0, 134, "other")})),
      ::testing::Not(HasSubstr("threw the same")));
  EXPECT_THAT(final_message(job_of({one})), ::testing::Not(HasSubstr("threw the same")));
}

TEST(FinalMessage, OfAnUnevenNumberOfBatches) {
  const JobRecord job =
      job_of({with_notice(ended(134, 1), "loss", 0.9, 5, "'w': rank 1 (h) has called shutdown()"),
              with_notice(ended(0, 2), "left", 0.8)});
  EXPECT_THAT(final_message(job), HasSubstr("'w': rank 1 (h) has called shutdown()"));
  EXPECT_THAT(final_message(job), HasSubstr("hvd::join()"));
}

TEST(FinalMessage, OfAKilledMpirun) {
  JobRecord job = job_of({ended(1, 1), ended(143, 2, true)});
  job.cause = StopCause::kStarterEnded;
  job.starter_code = 137;
  job.starter_signal = SIGKILL;
  EXPECT_EQ(
      final_message(job),
      "hvdrun: mpirun was killed by SIGKILL (9), not by hvdrun; stopped 1 rank (1); exit code "
      "70\n")
      << "the way a rank ends after mpirun is not its failure";
  EXPECT_EQ(exit_code(job), 70);
}

TEST(FinalMessage, NamesTheHostsThatWereNotReached) {
  RankRecord absent;
  absent.host = "far";
  JobRecord job = job_of({RankRecord{}, absent, absent});
  job.cause = StopCause::kStarterEnded;
  job.starter_code = 1;
  job.lost_host = true;
  job.suspect_hosts = {"far"};
  EXPECT_THAT(final_message(job),
              HasSubstr("hvdrun: host far (ranks 1 and 2) could not be reached or was lost"));
}

// mpirun and hvdrun both check silent connections. If mpirun is first, it ends the job, and hvdrun
// gets no answer to its order to stop.
TEST(FinalMessage, NamesTheRankThatMpirunMissedFirst) {
  JobRecord job = job_of({ended(143, 4, true), running("far", 0, 200), running("far", 1, 201)});
  job.cause = StopCause::kStarterEnded;
  job.starter_code = 1;
  job.lost_host = true;
  job.stop_ns = 3 * kSecond;
  for (RankRecord& rank : job.ranks) rank.ordered_to_stop = true;
  job.ranks[2].lost_ns = 6 * kSecond;
  JobRecord killed = job, reached = job;
  mark_ranks_lost_by_mpirun(job);
  EXPECT_THAT(final_message(job), HasSubstr("hvdrun: rank 1 failed first: lost"));
  EXPECT_THAT(final_message(job), HasSubstr("host far  local rank 0"));
  EXPECT_EQ(exit_code(job), 69);

  killed.starter_signal = SIGKILL;
  mark_ranks_lost_by_mpirun(killed);
  EXPECT_EQ(first_failure(killed.ranks), std::nullopt) << "the host is not to blame";
  reached.lost_host = false;
  mark_ranks_lost_by_mpirun(reached);
  EXPECT_EQ(first_failure(reached.ranks), std::nullopt);
}

TEST(FinalMessage, OfAKilledRank) {
  JobRecord job = job_of({ended(143, 193, true), ended(143, 193, true), running("gpu-b", 0, 28642),
                          ended(143, 193, true)});
  job.ranks[2].ended = Ended{.time_ns = 192 * kSecond, .pid = 28642, .code = 137, .signal = 9};
  job.stop_ns = 192 * kSecond;
  job.ended_ns = 192 * kSecond + 90'000'000;
  job.stderr_tail = {"terminate called", "  what():  CUDA out of memory"};
  EXPECT_EQ(
      final_message(job),
      "hvdrun: rank 2 failed first: killed by SIGKILL (9)  host gpu-b  local rank 0  pid 28642  "
      "after 00:03:12\n"
      "        (SIGKILL without a message is often the out-of-memory killer: see dmesg on gpu-b)\n"
      "        last stderr lines of rank 2:\n"
      "        | terminate called\n"
      "        |   what():  CUDA out of memory\n"
      "hvdrun: stopped the other 3 ranks (0, 1 and 3), which ended 0.09 s later; exit code 137\n");
}

TEST(FinalMessage, OfASingleRank) {
  EXPECT_EQ(final_message(job_of({ended(3, 1.5)})),
            "hvdrun: rank 0 failed first: exited with code 3  host h  local rank 0  pid 100  after "
            "1.50 s\n"
            "        rank 0 wrote nothing to stderr\n"
            "hvdrun: exit code 3\n");
}

TEST(FinalMessage, OfAnAbort) {
  JobRecord job = job_of({ended(5, 1)});
  job.abort_rank = 0;
  EXPECT_THAT(final_message(job), HasSubstr("exited with code 5 (it called MPI_Abort)"));
}

TEST(FinalMessage, OfAProgramThatCouldNotBeStarted) {
  JobRecord job = job_of({running("h", 0, 0)});
  job.ranks[0].ended = Ended{.time_ns = kSecond, .code = 127, .start_error = ENOENT};
  EXPECT_THAT(final_message(job), HasSubstr("its program could not be started: No such file or "
                                            "directory  host h  local rank 0  after"));
  EXPECT_EQ(exit_code(job), 127);
}

TEST(FinalMessage, OfALostHost) {
  const JobRecord job = job_of({ended(143, 2, true), lost(1), lost(1.5)});
  EXPECT_THAT(final_message(job), HasSubstr("rank 1 failed first: lost"));
  EXPECT_THAT(final_message(job), HasSubstr("also lost without a report: 1 rank (2)"));
  EXPECT_THAT(final_message(job), HasSubstr("stopped the other 1 rank (0)"));
}

TEST(FinalMessage, OfALinkThatWasCut) {
  RankRecord silent = running("far", 0, 7);
  silent.ordered_to_stop = true;
  const JobRecord job =
      job_of({with_notice(ended(134, 30), "loss", 29, 4, "lost rank 1 (host far)"), silent});
  EXPECT_EQ(exit_code(job), 69);
  EXPECT_THAT(final_message(job), HasSubstr("lost rank 1 (host far)"));
  EXPECT_THAT(
      final_message(job),
      ::testing::EndsWith(
          "hvdrun: lost host far (rank 1): no sign of life; it died, or the network to it is "
          "cut; exit code 69\n"));
}

TEST(FinalMessage, ARankThatHadNotStartedIsNotCountedAsStopped) {
  const JobRecord job = job_of({ended(3, 1), ended(143, 2, true), RankRecord{}});
  EXPECT_THAT(final_message(job), HasSubstr("stopped the other 1 rank (1), which ended "));
  EXPECT_THAT(final_message(job), HasSubstr("later; 1 rank (2) had not started; exit code 3\n"));
}

TEST(FinalMessage, OfTheUsersSignal) {
  JobRecord job = job_of({ended(0, 1, true), ended(137, 6, true)});
  job.cause = StopCause::kUserSignal;
  job.user_signal = SIGTERM;
  EXPECT_EQ(
      final_message(job),
      "hvdrun: got SIGTERM; stopped 2 ranks (0 and 1); 1 rank (1) did not end within 5.00 s and "
      "was killed; exit code 143\n");
}

TEST(FinalMessage, OfAStartThatTookTooLong) {
  JobRecord job = job_of({ended(143, 1, true), RankRecord{}});
  job.cause = StopCause::kStartTimeout;
  job.timeout_s = 30;
  EXPECT_THAT(final_message(job), HasSubstr("1 rank (1) did not start within 30.00 s"));
  EXPECT_EQ(exit_code(job), 69);
}

TEST(FinalMessage, TailCanBeLeftOut) {
  JobRecord job = job_of({ended(3, 1.5)});
  job.tail_lines = 0;
  EXPECT_THAT(final_message(job), ::testing::Not(HasSubstr("stderr")));
}

}  // namespace
}  // namespace hvd::launcher
