#include "checkpoint/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>
#include <sstream>

#include "checkpoint/durable_file.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kRanks = 2;

std::vector<std::string> parts_of(std::uint64_t step, int rank) {
  const std::string text = "step " + std::to_string(step) + " rank " + std::to_string(rank);
  return {text, std::string(100, 'x') + text};
}

CheckpointFile write_common(CheckpointFolder& folder, std::uint64_t step) {
  return folder.write(step, CheckpointFolder::common_name(), source_of(parts_of(step, -1)));
}

CheckpointFile write_rank(CheckpointFolder& folder, std::uint64_t step, int rank) {
  return folder.write(step, CheckpointFolder::rank_name(rank), source_of(parts_of(step, rank)));
}

/// Saves one checkpoint, with the calls of all ranks in a possible order.
void save(CheckpointFolder& folder, std::uint64_t step, std::size_t keep = 100) {
  folder.begin(step);
  Manifest manifest{.step = step, .files = {write_common(folder, step)}};
  for (int rank = 0; rank < kRanks; ++rank)
    manifest.files.push_back(write_rank(folder, step, rank));
  folder.commit(manifest);
  EXPECT_EQ(folder.remove_all_but(keep), "");
}

void check(const CheckpointFolder& folder, std::uint64_t step) {
  const auto joined = [](const std::vector<std::string>& parts) { return parts[0] + parts[1]; };
  const Manifest manifest = folder.manifest(step);
  ASSERT_EQ(manifest.ranks(), std::size_t{kRanks});
  EXPECT_EQ(folder.read(step, manifest.common()), joined(parts_of(step, -1)));
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(folder.read(step, manifest.of_rank(static_cast<std::size_t>(rank))),
              joined(parts_of(step, rank)));
  }
}

std::size_t entries_of(const std::filesystem::path& path) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
}

TEST(CheckpointFolder, KeepsTheLastOnes) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path() / "a" / "b");
  EXPECT_THAT(folder.steps(), IsEmpty());
  EXPECT_EQ(folder.newest(), std::nullopt);
  for (const std::uint64_t step : {0U, 9U, 10U, 1234567U}) save(folder, step, 3);
  EXPECT_THAT(folder.steps(), ElementsAre(9U, 10U, 1234567U));
  EXPECT_EQ(folder.newest(), 1234567U);
  for (const std::uint64_t step : folder.steps()) check(folder, step);
  EXPECT_EQ(entries_of(temporary.path() / "a" / "b"), 3U) << "other files are left";
  EXPECT_THAT(error_of([&] { folder.manifest(0); }),
              HasSubstr("no complete checkpoint of step 0 in"));
}

TEST(CheckpointFolder, ALargeStepSortsByItsNumber) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 999999999999U);
  save(folder, 1000000000000U);
  EXPECT_EQ(folder.newest(), 1000000000000U);
}

TEST(CheckpointFolder, RefusesAStepThatWouldNotBeTheNewest) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 5);
  for (const std::uint64_t step : {4U, 5U}) {
    EXPECT_THAT(error_of([&] { folder.begin(step); }),
                HasSubstr("which has a checkpoint of step 5"));
  }
  check(folder, 5);
}

TEST(CheckpointFolder, NewerCheckpointsAreReplacedOnRequest) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  for (const std::uint64_t step : {5U, 10U, 20U, 30U}) save(folder, step);
  EXPECT_THAT(error_of([&] { folder.begin(5, 5); }), HasSubstr("would stay the newest"));
  EXPECT_THAT(error_of([&] { folder.begin(4, 5); }), HasSubstr("would stay the newest"));
  folder.begin(10, 5);
  EXPECT_THAT(folder.steps(), ElementsAre(5U, 20U, 30U)) << "before the new one is complete";
  Manifest manifest{.step = 10, .files = {write_common(folder, 10)}};
  for (int rank = 0; rank < kRanks; ++rank) manifest.files.push_back(write_rank(folder, 10, rank));
  EXPECT_EQ(folder.commit(manifest, 5), "");
  EXPECT_THAT(folder.steps(), ElementsAre(5U, 10U));
  check(folder, 10);
}

// A step that another writer is writing must not be removed like the rest of an interrupted write.
TEST(CheckpointFolder, TwoWritersDoNotMeet) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path()), other(temporary.path());
  folder.begin(1);
  write_common(folder, 1);
  EXPECT_THAT(error_of([&] { other.begin(1); }),
              HasSubstr("is in use: another Checkpointer or save_checkpoint() of this process"));
  EXPECT_THAT(error_of([&] { other.begin(2); }), HasSubstr("is in use"));
  EXPECT_EQ(entries_of(folder.folder_of(1)), 1U);
  folder.abandon(1);
  save(other, 1);
  save(folder, 2);
  EXPECT_THAT(error_of([&] { other.begin(2); }), HasSubstr("would stay the newest"));
  save(folder, 3);
}

// The program waits for begin(), so it must not wait for the disk.
TEST(CheckpointFolder, BeginDoesNotWaitForTheDisk) {
  const TemporaryFolder temporary;
  WatchedCalls calls;
  CheckpointFolder folder(temporary.path(), calls);
  save(folder, 1);
  std::vector<std::string> synced;
  calls.before = [&](const std::string& call, const std::string& path) {
    if (call == "fsync") synced.push_back(path);
    return 0;
  };
  folder.begin(2);
  EXPECT_THAT(synced, IsEmpty());
  Manifest manifest{.step = 2, .files = {write_common(folder, 2)}};
  for (int rank = 0; rank < kRanks; ++rank) manifest.files.push_back(write_rank(folder, 2, rank));
  synced.clear();
  folder.commit(manifest);
  ASSERT_FALSE(synced.empty());
  EXPECT_EQ(synced.front(), temporary.path().string()) << "before the manifest";
}

TEST(CheckpointFolder, AnInterruptedWriteDoesNotCountAndIsRemoved) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 1);
  folder.begin(2);
  write_common(folder, 2);
  write_rank(folder, 2, 7);
  std::ofstream(folder.folder_of(2) / "rank-3.partial") << "half";
  EXPECT_EQ(folder.newest(), 1U);
  folder.begin(2);
  EXPECT_EQ(entries_of(folder.folder_of(2)), 0U);
  save(folder, 3);
  EXPECT_FALSE(std::filesystem::exists(folder.folder_of(2)));
  EXPECT_THAT(folder.steps(), ElementsAre(1U, 3U));
}

TEST(CheckpointFolder, ForeignFilesStay) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 1);
  std::ofstream(folder.folder_of(1) / "notes.txt") << "mine";
  std::filesystem::create_directory(temporary.path() / "step-7");  // not a name of hvd
  std::ofstream(temporary.path() / "step-x") << "mine";
  save(folder, 2, 1000);
  folder.begin(3);
  folder.abandon(3);
  EXPECT_THAT(folder.remove_all_but(1), HasSubstr("cannot remove"));
  EXPECT_TRUE(std::filesystem::exists(folder.folder_of(1) / "notes.txt"));
  EXPECT_TRUE(std::filesystem::exists(temporary.path() / "step-7"));
  EXPECT_THAT(folder.steps(), ElementsAre(2U));
}

TEST(CheckpointFolder, CommitsOnlyCompleteFiles) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  folder.begin(1);
  Manifest manifest{.step = 1, .files = {write_common(folder, 1)}};
  manifest.files.push_back({"rank-0", {3, 4}, 0});
  EXPECT_THAT(error_of([&] { folder.commit(manifest); }), HasSubstr("rank-0 is missing"));
  EXPECT_EQ(folder.newest(), std::nullopt);
}

TEST(CheckpointFolder, NamesWhatIsDamagedOrMissing) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 1);
  const auto path = folder.folder_of(1);
  std::filesystem::resize_file(path / "rank-1", 50);
  EXPECT_THAT(error_of([&] { folder.manifest(1); }),
              HasSubstr("rank-1 is damaged: expected 126 bytes, got 50"));
  std::filesystem::remove(path / "rank-1");
  EXPECT_THAT(error_of([&] { folder.manifest(1); }), HasSubstr("rank-1 is missing"));
  std::filesystem::rename(path, folder.folder_of(2));
  EXPECT_THAT(error_of([&] { folder.manifest(2); }), HasSubstr("expected step 2, got step 1"));
}

// Whichever call fails, complete checkpoints remain complete and the next save succeeds.
TEST(CheckpointFolder, AFullDiskLosesNothing) {
  for (int fatal = 0;; ++fatal) {
    SCOPED_TRACE(fatal);
    const TemporaryFolder temporary;
    WatchedCalls calls;
    calls.skip_fsync = true;
    CheckpointFolder folder(temporary.path(), calls);
    save(folder, 1);
    int made = 0;
    calls.before = [&](const std::string& call, const std::string&) {
      // Calls that free space succeed.
      const bool removes = call == "unlink" || call == "rmdir";
      return !removes && made++ >= fatal ? ENOSPC : 0;
    };
    bool failed = false;
    try {
      folder.begin(2);
      Manifest manifest{.step = 2, .files = {write_common(folder, 2)}};
      for (int rank = 0; rank < kRanks; ++rank)
        manifest.files.push_back(write_rank(folder, 2, rank));
      folder.commit(manifest);
    } catch (const CheckpointError& error) {
      failed = true;
      EXPECT_THAT(error.what(), HasSubstr("No space left"));
      folder.abandon(2);
    }
    calls.before = [](const std::string&, const std::string&) { return 0; };
    check(folder, 1);
    EXPECT_EQ(folder.newest(), failed ? 1U : 2U);
    save(folder, 3);
    check(folder, 3);
    if (!failed) {
      EXPECT_GT(fatal, 20) << "not every call has failed once";
      break;
    }
  }
}

/// Saves `step`, `step` + 1, ..., keeping two, and is killed before the call with number `fatal`,
/// which may be in the middle of a file.
void save_until_killed(const std::filesystem::path& path, std::uint64_t step, int fatal) {
  WatchedCalls calls;
  calls.skip_fsync = true;  // written data outlives the process without fsync()
  int made = 0;
  calls.at_most = 37;
  calls.before = [&](const std::string&, const std::string&) {
    if (made++ == fatal) ::kill(::getpid(), SIGKILL);
    return 0;
  };
  CheckpointFolder folder(path, calls);
  for (;; ++step) save(folder, step, 2);
}

TEST(CheckpointFolder, AKillAtAnyMomentLeavesTheOneBeforeReadable) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 0);
  std::uint64_t before = 0;
  std::vector<std::uint64_t> gained;
  for (int fatal = 0; fatal < 200; ++fatal) {
    SCOPED_TRACE(fatal);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      save_until_killed(temporary.path(), before + 1, fatal);
      ::_exit(1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    const auto steps = folder.steps();
    ASSERT_FALSE(steps.empty());
    ASSERT_GE(steps.back(), before);
    // The older of the two kept checkpoints may be partly removed.
    check(folder, steps.back());
    const std::size_t lock = std::filesystem::exists(temporary.path() / FolderLock::kName) ? 1 : 0;
    EXPECT_LE(entries_of(temporary.path()), 4U + lock) << "files of killed processes are left";
    gained.push_back(steps.back() - before);
    before = steps.back();
  }
  // Some processes were killed before their first checkpoint, some after their third.
  EXPECT_EQ(gained.front(), 0U);
  EXPECT_GE(gained.back(), 3U);
}

Manifest example_manifest() {
  return {
      .step = 18446744073709551615U,
      .files = {
          {"common", {5000000000U, 0xDEADBEEF}, 0}, {"rank-0", {0, 0}, 0}, {"rank-1", {7, 1}, 0}}};
}

/// The same with replicated tensors that the ranks have written together.
Manifest with_shares() {
  Manifest manifest = example_manifest();
  manifest.files[1] = {"rank-0", {9, 3}, 9};
  manifest.files[2].share = 4;
  return manifest;
}

TEST(Manifest, ComesBackAsItWas) {
  EXPECT_EQ(Manifest::decode(example_manifest().encode(), "m"), example_manifest());
  EXPECT_EQ(Manifest::decode(with_shares().encode(), "m"), with_shares());
  EXPECT_EQ(example_manifest().shared_bytes(), 0U);
  EXPECT_EQ(with_shares().shared_bytes(), 13U);
  EXPECT_EQ(example_manifest().ranks(), 2U);
  EXPECT_EQ(example_manifest().of_rank(1).name, "rank-1");
}

TEST(Manifest, NoticesEveryFlippedBitAndEveryCut) {
  for (const Manifest& manifest : {example_manifest(), with_shares()}) {
    const std::string text = manifest.encode();
    for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
      std::string flipped = text;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      EXPECT_THROW(Manifest::decode(flipped, "m"), CheckpointError) << bit;
    }
    for (std::size_t length = 0; length < text.size(); ++length)
      EXPECT_THROW(Manifest::decode(text.substr(0, length), "m"), CheckpointError) << length;
    EXPECT_THROW(Manifest::decode(text + "\n", "m"), CheckpointError);
  }
}

std::string with_checksum(const std::string& text) {
  std::ostringstream checksum;
  checksum << "checksum " << std::hex << crc32(text) << '\n';
  return text + checksum.str();
}

// The text of the first version, as hvd wrote it before ranks shared the writing.
TEST(Manifest, ReadsTheFirstVersion) {
  const std::string text = "hvd-checkpoint 1\nstep 7\nfile common 5 a\nfile rank-0 6 b\n";
  const Manifest manifest = Manifest::decode(with_checksum(text), "m");
  EXPECT_EQ(manifest.step, 7U);
  EXPECT_EQ(manifest.of_rank(0), (CheckpointFile{"rank-0", {6, 11}, 0}));
  EXPECT_EQ(manifest.encode(), with_checksum(text));
}

TEST(Manifest, RefusesAShareInTheFirstVersionAndOneThatIsLargerThanItsFile) {
  for (const std::string& text :
       {std::string("hvd-checkpoint 1\nstep 7\nfile common 5 a\nfile rank-0 6 b 2\n"),
        std::string("hvd-checkpoint 2\nstep 7\nfile common 5 a\nfile rank-0 6 b 7\n")}) {
    EXPECT_THROW(Manifest::decode(with_checksum(text), "m"), CheckpointError) << text;
  }
}

TEST(Manifest, NamesAnotherVersion) {
  EXPECT_THAT(error_of([] { Manifest::decode("hvd-checkpoint 3\nanything\n", "the/file"); }),
              HasSubstr("the/file: expected a checkpoint of version 1 to 2, got version 3"));
}

TEST(Manifest, LeadsNowhereElse) {
  const std::string text = "hvd-checkpoint 1\nstep 1\nfile ../common 1 1\nfile rank-0 1 1\n";
  EXPECT_THAT(error_of([&] { Manifest::decode(with_checksum(text), "m"); }), HasSubstr("damaged"));
}

std::string error_of_locking(const std::filesystem::path& path) {
  return error_of([&] { const FolderLock lock(path); });
}

/// A process that locks the folder and waits until it is killed.
class OtherProcess {
 public:
  explicit OtherProcess(const std::filesystem::path& path) {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) ADD_FAILURE() << "no pipe";
    process_ = ::fork();
    if (process_ == 0) {
      const FolderLock lock(path);
      if (::write(ends[1], "x", 1) == 1) ::pause();
      ::_exit(1);
    }
    char ready = 0;
    EXPECT_EQ(::read(ends[0], &ready, 1), 1);
    for (const int end : ends) ::close(end);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;
  ~OtherProcess() { kill(); }
  pid_t id() const { return process_; }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_ = 0;
};

TEST(FolderLock, RefusesAndNamesTheHolderUntilItEnds) {
  const TemporaryFolder folder;
  ::setenv("HVD_JOB_NAME", "train-7", 1);
  OtherProcess other(folder.path());
  ::unsetenv("HVD_JOB_NAME");
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  EXPECT_THAT(error_of_locking(folder.path()),
              HasSubstr("is in use: process " + std::to_string(other.id()) + " on " + host.data() +
                        " of the job with HVD_JOB_NAME=train-7"));
  other.kill();
  EXPECT_TRUE(std::filesystem::exists(folder.path() / FolderLock::kName))
      << "a killed process leaves the file";
  { const FolderLock lock(folder.path()); }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / FolderLock::kName));
}

TEST(FolderLock, OneObjectOfAProcessHasIt) {
  const TemporaryFolder folder;
  auto lock = std::make_unique<FolderLock>(folder.path());
  EXPECT_THAT(error_of_locking(folder.path()), HasSubstr("of this process"));
  lock.reset();
  const FolderLock again(folder.path());
}

// A child that was forked in the meantime has the descriptor too.
TEST(FolderLock, AForkedChildDoesNotKeepIt) {
  const TemporaryFolder folder;
  auto lock = std::make_unique<FolderLock>(folder.path());
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  lock.reset();
  { const FolderLock again(folder.path()); }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace hvd::libtorch::testing
