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
#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

/// A folder that exists as long as this object.
struct Folder {
  Folder() {
    std::string made = (fs::temp_directory_path() / "hvd-test-XXXXXX").string();
    path = ::mkdtemp(made.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }
  fs::path path;
};

JoinPlace in_new_folder() {
  return [folder = std::make_shared<Folder>()](const RankInfo& own, Deadline deadline) {
    return join("file://" + (folder->path / "job").string(), own, deadline);
  };
}
INSTANTIATE_TEST_SUITE_P(File, AnyRendezvous, ::testing::Values(&in_new_folder));

class FileRendezvousTest : public ::testing::Test {
 protected:
  std::string method() const { return "file://" + (folder / "job").string(); }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join(method(), info(rank, size), deadline);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
      names.push_back(entry.path().filename());
    return names;
  }

  const Folder made;
  const fs::path folder = made.path;
};

TEST_F(FileRendezvousTest, AJobOfOneRank) {
  const auto place = join_as(0, 1);
  EXPECT_EQ(shown(place->exchange("x", copy_of("y"), soon()).front()), "y");
  place->leave(soon());
  EXPECT_THAT(files(), ::testing::IsEmpty());
}

TEST_F(FileRendezvousTest, IgnoresFilesOfAnEarlierJob) {
  // The earlier job leaves all its files: joins, acceptances and stored addresses.
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

TEST_F(FileRendezvousTest, AnotherTokenOrJobIsAnErrorOnAllRanks) {
  RankInfo other_token = info(1, 3);
  other_token.token = "guess";
  RankInfo other_job = info(1, 3);
  other_job.job = "test";
  for (const auto& [own, reason] :
       {std::pair(other_token, "another token"), std::pair(other_job, "job 'test'")}) {
    EXPECT_THAT(
        all_of({[&] { join_as(0, 3); }, [&, &other = own] { join(method(), other, soon()); }}),
        ::testing::Each(AllOf(HasSubstr("usage: "), HasSubstr(reason))));
  }
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
