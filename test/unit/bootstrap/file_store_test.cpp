#include "bootstrap/file_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
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

OpenStore in_new_folder() {
  return [folder = std::make_shared<Folder>()](const RankInfo& own, Deadline) {
    return open_file_store(folder->path / "job", own.job);
  };
}
INSTANTIATE_TEST_SUITE_P(File, AnyStore, ::testing::Values(&in_new_folder));

class FileStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<Store> open() const { return open_file_store(path, ""); }
  std::unique_ptr<Rendezvous> join_as(const RankInfo& own, Deadline deadline = soon()) const {
    return Rendezvous::join(open_file_store(path, own.job), own, {}, deadline);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join_as(info(rank, size), deadline);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      names.push_back(entry.path().filename());
    return names;
  }

  const Folder made;
  const fs::path folder = made.path;
  const std::string path = folder / "job";
};

TEST_F(FileStoreTest, KeepsValuesAndNumbers) {
  const auto store = open();
  const auto other = open();
  EXPECT_EQ(store->url(), "file://" + path);
  EXPECT_EQ(shown(store->get("a/b", soon())), "nothing");
  store->set("a/b", copy_of("1"), soon());
  other->set("a/b", copy_of("2"), soon());
  EXPECT_EQ(shown(store->get("a/b", soon())), "2");
  EXPECT_TRUE(store->create("c", copy_of("first"), soon()));
  EXPECT_FALSE(other->create("c", copy_of("second"), soon()));
  EXPECT_EQ(shown(other->get("c", soon())), "first");
  EXPECT_EQ(store->add("n", 2, soon()), 2);
  EXPECT_EQ(other->add("n", 40, soon()), 42);
  EXPECT_EQ(other->add("n", 0, soon()), 42);
  const std::string controls("\0\n/", 3);
  for (const std::string& key :
       {std::string(".."), std::string("."), std::string(), std::string("%2e"), controls}) {
    store->set(key, copy_of("of " + key), soon());
    EXPECT_EQ(shown(other->get(key, soon())), "of " + key);
  }
  EXPECT_THAT(files(), ::testing::Contains("job.hvd"));
}

TEST_F(FileStoreTest, AddsAndCreatesAtomically) {
  constexpr int kRounds = 200;
  std::atomic<int> created = 0;
  const auto adds = [&] {
    const auto store = open();
    for (int i = 0; i < kRounds; ++i) {
      store->add("n", 1, soon());
      if (store->create("c" + std::to_string(i), {}, soon())) ++created;
    }
  };
  EXPECT_THAT(all_of({adds, adds, adds}), Each("fine"));
  EXPECT_EQ(open()->add("n", 0, soon()), 3 * kRounds);
  EXPECT_EQ(created, kRounds);
}

TEST_F(FileStoreTest, OnlyThisUserHasAccess) {
  open()->set("key", copy_of("x"), soon());
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    struct stat info = {};
    ASSERT_EQ(::lstat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0077, 0U) << entry.path();
  }
}

TEST_F(FileStoreTest, RemovesAllValuesOfItsOwnRun) {
  const auto store = open();
  store->set("run", copy_of("mine"), soon());
  store->set("x", {}, soon());
  store->remove_all_if("run", copy_of("another"), soon());
  EXPECT_EQ(shown(store->get("run", soon())), "mine");
  EXPECT_EQ(shown(store->get("x", soon())), "");
  store->remove_all_if("run", copy_of("mine"), soon());
  EXPECT_THAT(files(), IsEmpty());
  store->remove_all_if("run", copy_of("mine"), soon());
  EXPECT_TRUE(store->create("run", copy_of("again"), soon())) << "it makes the folder anew";
  EXPECT_EQ(store->add("n", 1, soon()), 1);
}

// Another run's rank 0 removes files while this one stores its own.
TEST_F(FileStoreTest, StoresValuesWhileOthersAreRemoved) {
  std::atomic<bool> stop = false;
  const auto removes = [&] {
    const auto store = open();
    while (!stop) {
      store->set("other", copy_of("x"), soon());
      store->remove_all_if("other", copy_of("x"), soon());
    }
  };
  const auto stores = [&] {
    const auto store = open();
    for (int i = 0; i < 300; ++i) {
      store->set("a", copy_of("x"), soon());
      store->create("b" + std::to_string(i), copy_of("x"), soon());
      store->add("n", 1, soon());
    }
    stop = true;
  };
  EXPECT_THAT(all_of({removes, stores}), Each("fine"));
}

// The lock belongs to a rank that is stopped.
TEST_F(FileStoreTest, ALockThatIsNotReleasedEndsWithTheDeadline) {
  const auto store = open();
  store->add("n", 1, soon());
  const int held = ::open((folder / "job.hvd" / "n").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);
  EXPECT_THAT(outcome_of([&] { store->add("n", 1, short_time()); }),
              AllOf(StartsWith("error: "), HasSubstr("holds the lock of")));
  ::close(held);
  EXPECT_EQ(store->add("n", 1, soon()), 2);
}

/// Something at a path, and its description in the error.
struct Thing {
  const char* kind;
  std::function<bool(const std::string& path)> make;
};
const std::vector<Thing>& things() {
  static const std::vector<Thing> all = {
      {"a FIFO", [](const std::string& at) { return ::mkfifo(at.c_str(), 0600) == 0; }},
      {"a symbolic link",
       [](const std::string& at) { return ::symlink("/dev/zero", at.c_str()) == 0; }},
      {"a folder", [](const std::string& at) { return ::mkdir(at.c_str(), 0700) == 0; }},
      {"a socket",
       [](const std::string& at) {
         sockaddr_un address{};
         address.sun_family = AF_UNIX;
         at.copy(address.sun_path, sizeof address.sun_path - 1);
         const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
         const bool bound =
             ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
         ::close(socket);
         return bound;
       }},
  };
  return all;
}

TEST_F(FileStoreTest, APathThatIsNoFileIsAnErrorAtOnce) {
  for (const Thing& thing : things()) {
    ASSERT_TRUE(thing.make(path)) << thing.kind;
    for (const int rank : {0, 1}) {
      EXPECT_THAT(outcome_of([&] { join_as(rank, 2); }),
                  AllOf(StartsWith("usage: "), HasSubstr(path), HasSubstr(thing.kind)));
    }
    fs::remove_all(path);
  }
}

TEST_F(FileStoreTest, ADeviceOrAFileOfAnotherUserIsAnErrorAtOnce) {
  for (const auto& [other, kind] :
       {std::pair("/dev/full", "a device"), std::pair("/dev/null", "a device")}) {
    EXPECT_THAT(outcome_of([&, &at = other] { open_file_store(at, ""); }),
                AllOf(StartsWith("usage: "), HasSubstr(kind)));
  }
  // A file of another user: only the superuser can make one; any other user has some in /etc.
  std::string foreign = "/etc/passwd";
  if (::geteuid() == 0) {
    std::ofstream(foreign = path) << "x";
    ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  }
  EXPECT_THAT(outcome_of([&] { open_file_store(foreign, ""); }),
              AllOf(StartsWith("usage: "), HasSubstr("a file of user ")));
}

// The same inside the folder, which another process of this user may have changed.
TEST_F(FileStoreTest, AThingInPlaceOfAValueIsAnErrorAtOnce) {
  for (const Thing& thing : things()) {
    open()->set("other", {}, soon());
    ASSERT_TRUE(thing.make((folder / "job.hvd" / "hvd%2ftrain%2frun").string()));
    EXPECT_THAT(outcome_of([&] { Rendezvous::join(open(), info(1, 2), {}, soon()); }),
                ::testing::AnyOf(StartsWith("usage: "), StartsWith("error: ")))
        << thing.kind;
    fs::remove_all(folder / "job.hvd");
  }
}

TEST_F(FileStoreTest, AFolderThatOthersCanWriteToIsAnError) {
  const std::string of_store = folder / "job.hvd";
  ASSERT_EQ(::mkdir(of_store.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(of_store.c_str(), 0777), 0);
  EXPECT_THAT(outcome_of([&] { open(); }),
              AllOf(StartsWith("usage: "), HasSubstr("a folder that only this user can write to")));
  fs::remove_all(of_store);
  ASSERT_EQ(::symlink("/tmp", of_store.c_str()), 0);
  EXPECT_THAT(outcome_of([&] { open(); }), HasSubstr("got a symbolic link"));
}

// It exists before the first value, so that no other user can put one there in the meantime.
TEST_F(FileStoreTest, TheFolderExistsFromTheBeginning) {
  const auto store = open();
  EXPECT_EQ(fs::status(folder / "job.hvd").permissions(), fs::perms::owner_all);
  store->set("k", copy_of("v"), soon());
  open()->close(soon());
  EXPECT_EQ(shown(store->get("k", soon())), "v");
  store->remove_all_if("k", copy_of("v"), soon());
  EXPECT_THAT(files(), IsEmpty());
  open()->close(soon());
  EXPECT_THAT(files(), IsEmpty());
}

TEST_F(FileStoreTest, AMissingFolderIsAnErrorWithAdviceAtOnce) {
  for (const int rank : {0, 1}) {
    EXPECT_THAT(
        outcome_of([&] {
          Rendezvous::join(open_file_store("/nowhere/at/all/job", ""), info(rank, 2), {}, soon());
        }),
        AllOf(HasSubstr("error: "), HasSubstr("/nowhere/at/all/job"),
              HasSubstr("No such file or directory"), HasSubstr("that every rank can write to")));
  }
}

TEST_F(FileStoreTest, AFileOfTheUserAtThePathIsLeftAlone) {
  std::ofstream(path) << "notes";
  EXPECT_THAT(
      all_of({[&] { join_as(0, 2)->leave(soon()); }, [&] { join_as(1, 2)->leave(soon()); }}),
      Each("fine"));
  EXPECT_THAT(files(), ::testing::ElementsAre("job"));
  std::string text;
  std::ifstream(path) >> text;
  EXPECT_EQ(text, "notes");
}

TEST_F(FileStoreTest, NothingRemainsAfterTheStart) {
  EXPECT_THAT(
      all_of({[&] { join_as(0, 2)->leave(soon()); }, [&] { join_as(1, 2)->leave(soon()); }}),
      Each("fine"));
  EXPECT_THAT(files(), IsEmpty());
}

TEST_F(FileStoreTest, ANewRunRemovesWhatKilledRunsHaveLeft) {
  for (int run = 0; run < 2; ++run) {  // both end without leaving
    EXPECT_THAT(all_of({[&] { join_as(0, 2)->exchange("x", copy_of("old 0"), soon()); },
                        [&] { join_as(1, 2)->exchange("x", copy_of("old 1"), soon()); }}),
                Each("fine"));
  }
  EXPECT_GT(files().size(), 10U);
  std::vector<std::string> seen(2);
  const auto rank = [&](int own) {
    return [&, own] {
      if (own == 0) std::this_thread::sleep_for(50ms);  // rank 1 finds the old files
      const auto joined = join_as(own, 2);
      const auto& all = joined->exchange("x", copy_of("new " + std::to_string(own)), soon());
      seen[static_cast<std::size_t>(own)] = text_of(all[0]) + ", " + text_of(all[1]);
      joined->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1)}), Each("fine"));
  EXPECT_THAT(seen, Each("new 0, new 1"));
  EXPECT_THAT(files(), IsEmpty());
}

TEST_F(FileStoreTest, JobsWithDifferentNamesShareAPath) {
  auto other = [](int rank) {
    auto own = info(rank, 2);
    own.job = "a long name/" + std::string(200, 'x');
    return own;
  };
  EXPECT_THAT(all_of({[&] { join_as(0, 2)->leave(soon()); }, [&] { join_as(1, 2)->leave(soon()); },
                      [&] { join_as(other(0))->leave(soon()); },
                      [&] { join_as(other(1))->leave(soon()); }}),
              Each("fine"));
  EXPECT_THAT(files(), IsEmpty());
}

// A rank of another job that still waits must not disturb this one.
TEST_F(FileStoreTest, ARankOfAnotherJobWaitsForItsOwn) {
  auto old = info(1, 2);
  old.job = "old";
  const auto outcomes =
      all_of({[&] { join_as(old, in(1s)); }, [&] { join_as(0, 2)->leave(soon()); },
              [&] { join_as(1, 2)->leave(soon()); }});
  EXPECT_THAT(outcomes[0], StartsWith("lost 0: "));
  EXPECT_EQ(outcomes[1], "fine");
  EXPECT_EQ(outcomes[2], "fine");
}

TEST_F(FileStoreTest, RefusesARankStartedTwiceAndKeepsTheFirst) {
  std::vector<std::unique_ptr<Rendezvous>> first(2);
  EXPECT_THAT(all_of({[&] { first[0] = join_as(0, 2); }, [&] { first[1] = join_as(1, 2); }}),
              Each("fine"));
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, short_time()); }),
              AllOf(HasSubstr("usage: "), HasSubstr("rank 1 has joined at"), HasSubstr("twice"),
                    HasSubstr("process " + std::to_string(::getpid()))));
}

TEST_F(FileStoreTest, TheFirstOfTwoRanks0IsRefused) {
  const auto outcomes = all_of({[&] { join_as(0, 2); },
                                [&] {
                                  std::this_thread::sleep_for(50ms);
                                  join_as(0, 2)->leave(soon());
                                },
                                [&] {
                                  std::this_thread::sleep_for(250ms);
                                  join_as(1, 2)->leave(soon());
                                }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("usage: "), HasSubstr("another process has started")));
  EXPECT_EQ(outcomes[1], "fine");
  EXPECT_EQ(outcomes[2], "fine");
}

}  // namespace
}  // namespace hvd::rendezvous
