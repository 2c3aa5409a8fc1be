#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/admission.h"
#include "bootstrap/rendezvous.h"
#include "hvd/error.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

class FileRendezvousTest : public ::testing::Test {
 protected:
  FileRendezvousTest() {
    std::string made = (fs::temp_directory_path() / "hvd-test-XXXXXX").string();
    folder = ::mkdtemp(made.data());
  }
  ~FileRendezvousTest() override { fs::remove_all(folder); }

  std::string method() const { return "file://" + (folder / "job").string(); }
  RankInfo info(int rank, int size) const {
    return {.job = "train", .token = "secret", .build = "0.1.0", .rank = rank, .size = size};
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join(method(), info(rank, size), deadline);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
      names.push_back(entry.path().filename());
    return names;
  }

  fs::path folder;
};

TEST_F(FileRendezvousTest, RanksJoinExchangeAndLeaveNoFiles) {
  const auto rank = [this](int own) {
    return [this, own] {
      std::this_thread::sleep_for(own == 0 ? 20ms : 0ms);  // in either order
      const auto place = join_as(own, 3);
      EXPECT_EQ(place->rank(), own);
      EXPECT_EQ(place->size(), 3);
      EXPECT_EQ(place->place(), method());
      for (const char* const what : {"address", "a/b c"}) {
        const auto all = place->exchange(what, copy_of(what + std::to_string(own)), soon());
        ASSERT_EQ(all.size(), 3U);
        for (int other = 0; other < 3; ++other)
          EXPECT_EQ(shown(all[static_cast<std::size_t>(other)]), what + std::to_string(other));
      }
      place->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1), rank(2)}), ::testing::Each("fine"));
  EXPECT_THAT(files(), ::testing::IsEmpty());
}

TEST_F(FileRendezvousTest, AJobOfOneRank) {
  const auto place = join_as(0, 1);
  EXPECT_EQ(shown(place->exchange("x", copy_of("y"), soon()).front()), "y");
  place->leave(soon());
  EXPECT_THAT(files(), ::testing::IsEmpty());
}

TEST_F(FileRendezvousTest, AValueIsPutOnce) {
  const auto place = join_as(0, 1);
  EXPECT_EQ(shown(place->get("key")), "nothing");
  EXPECT_EQ(shown(place->wait("key", 0, in(1ms))), "nothing");
  place->put("key", copy_of("value"));
  EXPECT_EQ(shown(place->get("key")), "value");
  EXPECT_EQ(shown(place->wait("key", 0, soon())), "value");
  EXPECT_THAT(outcome_of([&] { place->put("key", {}); }), HasSubstr("'key' was put into"));
  EXPECT_EQ(shown(place->get("key")), "value");
}

TEST_F(FileRendezvousTest, IgnoresFilesOfAnEarlierJob) {
  // It leaves all its files: of ranks that joined, were accepted, and have stored their addresses.
  EXPECT_THAT(all_of({[&] { join_as(0, 2)->exchange("address", copy_of("old 0"), soon()); },
                      [&] { join_as(1, 2)->exchange("address", copy_of("old 1"), soon()); }}),
              ::testing::Each("fine"));
  EXPECT_EQ(files().size(), 2U);
  std::vector<std::string> seen(2);
  const auto rank = [&](int own) {
    return [&, own] {
      if (own == 0) std::this_thread::sleep_for(50ms);  // rank 1 finds the old files
      const auto place = join_as(own, 2);
      const auto all = place->exchange("address", copy_of("new " + std::to_string(own)), soon());
      seen[static_cast<std::size_t>(own)] = shown(all[0]) + ", " + shown(all[1]);
      place->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1)}), ::testing::Each("fine"));
  EXPECT_THAT(seen, ::testing::Each("new 0, new 1"));
}

TEST_F(FileRendezvousTest, IgnoresAnEarlierRefusal) {
  EXPECT_THAT(all_of({[&] { join_as(0, 3, short_time()); }, [&] { join_as(1, 3); }}),
              ::testing::Each(HasSubstr("lost 2")));
  const auto rank = [&](int own) {
    return [&, own] {
      if (own == 0) std::this_thread::sleep_for(50ms);
      join_as(own, 3);
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1), rank(2)}), ::testing::Each("fine"));
}

TEST_F(FileRendezvousTest, ReplacesAFileOfAnotherKind) {
  std::ofstream(folder / "job") << "/nowhere/at/all";
  EXPECT_THAT(all_of({[&] {
                        std::this_thread::sleep_for(50ms);
                        join_as(0, 2);
                      },
                      [&] { join_as(1, 2); }}),
              ::testing::Each("fine"));
}

TEST_F(FileRendezvousTest, NamesTheMissingRanksOnAllThatHaveJoined) {
  const auto outcomes = all_of({[&] { join_as(0, 4, in(300ms)); }, [&] { join_as(2, 4, soon()); }});
  EXPECT_THAT(outcomes,
              ::testing::Each(AllOf(HasSubstr("lost -1: "),
                                    HasSubstr("ranks 1 and 3 have not joined at " + method()),
                                    HasSubstr("start as many ranks as"))));
}

TEST_F(FileRendezvousTest, NamesThemWhenRank0HasMoreTime) {
  EXPECT_THAT(all_of({[&] { join_as(0, 3); }, [&] { join_as(1, 3, in(2s)); }}),
              ::testing::Each(AllOf(HasSubstr("lost 2: "), HasSubstr("has not joined at"))));
}

TEST_F(FileRendezvousTest, NamesRank0IfItIsMissing) {
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, short_time()); }),
              AllOf(HasSubstr("lost 0: "), HasSubstr("rank 0 has not joined at " + method())));
}

TEST_F(FileRendezvousTest, RefusesARankStartedTwiceAndKeepsTheFirst) {
  std::unique_ptr<Rendezvous> first;
  std::string second;
  const auto outcomes = all_of({[&] { join_as(0, 2); }, [&] { first = join_as(1, 2); }});
  EXPECT_THAT(outcomes, ::testing::Each("fine"));
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, short_time()); }),
              AllOf(HasSubstr("usage: "), HasSubstr("rank 1 has joined at"), HasSubstr("twice"),
                    HasSubstr("process " + std::to_string(::getpid()))));
}

TEST_F(FileRendezvousTest, TheFirstOfTwoRanks0IsRefused) {
  const auto outcomes = all_of({[&] { join_as(0, 2); },
                                [&] {
                                  std::this_thread::sleep_for(50ms);
                                  join_as(0, 2);
                                },
                                [&] {
                                  std::this_thread::sleep_for(150ms);
                                  join_as(1, 2);
                                }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("usage: "), HasSubstr("another process has started")));
  EXPECT_EQ(outcomes[1], "fine");
  EXPECT_EQ(outcomes[2], "fine");
}

TEST_F(FileRendezvousTest, AContradictionOfRank0IsAnErrorOnAllRanks) {
  const auto with = [&](const std::function<void(RankInfo&)>& change) {
    const auto rank_1 = [&] {
      RankInfo own = info(1, 3);
      change(own);
      join(method(), own, soon());
    };
    return all_of({[&] { join_as(0, 3); }, rank_1});
  };
  EXPECT_THAT(with([](RankInfo& own) { own.size = 5; }),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("expects 5 ranks"))));
  EXPECT_THAT(with([](RankInfo& own) {
                own.size = 5;
                own.rank = 4;
              }),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("rank 4"))));
  EXPECT_THAT(with([](RankInfo& own) { own.build = "0.2.0"; }),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("has hvd 0.2.0"))));
  EXPECT_THAT(with([](RankInfo& own) { own.token = "guess"; }),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("another token"))));
  EXPECT_THAT(with([](RankInfo& own) { own.job = "test"; }),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("job 'test'"))));
}

// Rank 0 has refused the others by then, and stays for late ranks.
TEST_F(FileRendezvousTest, ALateRankReceivesTheReason) {
  RankInfo own = info(1, 3);
  own.build = "0.2.0";
  EXPECT_THAT(all_of({[&] { join_as(0, 3); }, [&] { join(method(), own, soon()); },
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        join_as(2, 3);
                      }}),
              ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr("has hvd 0.2.0"))));
}

TEST_F(FileRendezvousTest, NamesAnotherVersionOfTheFiles) {
  EXPECT_THAT(outcome_of([&] {
                std::jthread other([&] {
                  while (!fs::exists(folder / "job")) std::this_thread::yield();
                  std::string there;
                  std::ifstream(folder / "job") >> there;
                  std::ofstream(fs::path(there) / "join.1") << "hello";
                });
                join_as(0, 2);
              }),
              AllOf(HasSubstr("usage: "), HasSubstr("rank 1"), HasSubstr("another version")));
}

TEST_F(FileRendezvousTest, AWaitEndsWithTheFailureOfARank) {
  std::vector<std::string> outcomes = all_of({[&] { join_as(0, 2)->wait("never", 0, soon()); },
                                              [&] { join_as(1, 2)->fail({"rank 1 has no GPU"}); }});
  EXPECT_EQ(outcomes[0], "error: rank 1 has no GPU");
}

TEST_F(FileRendezvousTest, AWaitEndsWithTheLossOfARank) {
  const auto outcomes = all_of({[&] { join_as(0, 2)->wait("never", 0, soon()); },
                                [&] { join_as(1, 2)->fail({"rank 7 has ended", 7}); }});
  EXPECT_EQ(outcomes[0], "lost 7: rank 7 has ended");
}

TEST_F(FileRendezvousTest, NamesARankThatDoesNotContribute) {
  const auto outcomes =
      all_of({[&] { join_as(0, 2)->exchange("address", {}, in(300ms)); }, [&] { join_as(1, 2); }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("lost 1: "), HasSubstr("not sent its address")));
}

TEST_F(FileRendezvousTest, AMissingFolderIsAnErrorWithAdvice) {
  EXPECT_THAT(
      outcome_of([&] { join("file:///nowhere/at/all/job", info(0, 2), short_time()); }),
      AllOf(HasSubstr("error: "), HasSubstr("/nowhere/at/all/job"),
            HasSubstr("No such file or directory"), HasSubstr("that every rank can write to")));
}

TEST(Join, RefusesSizesAndTextsThatAreTooLarge) {
  const auto outcome = [](RankInfo own) {
    return outcome_of([&] { join("tcp://localhost:1", own, soon()); });
  };
  EXPECT_THAT(outcome({.rank = 0, .size = 100'000'000}),
              AllOf(HasSubstr("usage: "), HasSubstr("at most 1000000, got 100000000 on rank 0")));
  EXPECT_THAT(outcome({.token = std::string(70'000, 'x'), .rank = 1, .size = 2}),
              HasSubstr("HVD_JOB_TOKEN: expected at most 4096 bytes, got 70000 on rank 1"));
  EXPECT_THAT(outcome({.job = std::string(5'000, 'x'), .rank = 1, .size = 2}),
              HasSubstr("HVD_JOB_NAME: expected at most 4096 bytes"));
}

TEST(Join, RefusesUnknownMethods) {
  for (const char* const method :
       {"", "file", "file://", "file:///", "file://relative/job", "file:///folder/", "smoke://x",
        "tcp://[::1", "tcp://[::1:29400", "tcp://::1]:29400", "tcp://[]:29400", "tcp://h"}) {
    try {
      join(method, {}, short_time());
      ADD_FAILURE() << method;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(std::string("'") + method + "'"),
                                      HasSubstr("expected"), HasSubstr("file:///")));
    }
  }
  EXPECT_THROW(join("file:///x", {.rank = 2, .size = 2}, short_time()), UsageError);
  EXPECT_THROW(join("file:///x", {.rank = -1, .size = 2}, short_time()), UsageError);
}

}  // namespace
}  // namespace hvd::rendezvous
