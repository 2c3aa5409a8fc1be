// A process that was cut off from an elastic job does not replace the checkpoints of later
// generations.
#include "checkpoint/job_generation.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <future>
#include <optional>
#include <thread>

#include "checkpoint/checkpoint_folder.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing::generations {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kRanks = 2;
const JobGeneration kFirst{.job = "hvdrun-1", .generation = 1};
const JobGeneration kLater{.job = "hvdrun-1", .generation = 2};

std::vector<std::string> parts_of(const JobGeneration& writer, int rank) {
  return {"generation " + std::to_string(writer.generation), " rank " + std::to_string(rank)};
}

CheckpointFile write_rank(CheckpointFolder& folder, std::uint64_t step, const JobGeneration& writer,
                          int rank) {
  return folder.write(step, CheckpointFolder::rank_name(rank, writer.generation),
                      source_of(parts_of(writer, rank)));
}

/// Saves one checkpoint, which replaces those after `loaded`.
void save(CheckpointFolder& folder, std::uint64_t step, const JobGeneration& writer,
          std::optional<std::uint64_t> loaded = std::nullopt) {
  folder.begin(step, loaded, writer);
  Manifest manifest{.step = step,
                    .files = {folder.write(step, CheckpointFolder::common_name(writer.generation),
                                           source_of(parts_of(writer, -1)))}};
  for (int rank = 0; rank < kRanks; ++rank)
    manifest.files.push_back(write_rank(folder, step, writer, rank));
  folder.commit(manifest, loaded);
}

/// Expects a complete checkpoint of this writer.
void check(const std::filesystem::path& path, std::uint64_t step, const JobGeneration& writer) {
  const CheckpointFolder folder(path);
  const Manifest manifest = folder.manifest(step);
  ASSERT_EQ(manifest.ranks(), std::size_t{kRanks});
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto parts = parts_of(writer, rank);
    EXPECT_EQ(folder.read(step, manifest.of_rank(static_cast<std::size_t>(rank))),
              parts[0] + parts[1]);
  }
}

TEST(JobGeneration, AnEarlierOneIsRefusedAndChangesNothing) {
  const TemporaryFolder temporary;
  CheckpointFolder cut_off(temporary.path()), present(temporary.path());
  save(cut_off, 10, kFirst);
  save(present, 20, kLater);
  for (const std::uint64_t step : {11U, 20U, 30U}) {
    EXPECT_THAT(error_of([&] { cut_off.begin(step, 10, kFirst); }),
                HasSubstr("generation 2 of the job has written there, and this process belongs to "
                          "generation 1"));
  }
  EXPECT_THAT(present.steps(), ElementsAre(10U, 20U));
  check(temporary.path(), 20, kLater);
  EXPECT_FALSE(std::filesystem::exists(temporary.path() / FolderLock::kName));
  save(present, 30, kLater);
}

TEST(JobGeneration, ThatOfAnotherJobDoesNotCount) {
  const TemporaryFolder temporary;
  CheckpointFolder folder(temporary.path());
  save(folder, 10, {.job = "hvdrun-1", .generation = 57});
  save(folder, 20, {.job = "hvdrun-2", .generation = 1});
  EXPECT_EQ(GenerationRecord(temporary.path()).read(),
            (JobGeneration{.job = "hvdrun-2", .generation = 1}));
  save(folder, 30, {});
}

TEST(JobGeneration, ADamagedRecordIsNone) {
  const TemporaryFolder temporary;
  for (const char* const text : {"", "hvdrun-1", "hvdrun-1 2", "hvdrun-1 x\n", " 2\n"}) {
    std::ofstream(temporary.path() / GenerationRecord::kName) << text;
    EXPECT_EQ(GenerationRecord(temporary.path()).read(), std::nullopt) << text;
  }
}

// Rank 0 of an earlier generation is stopped before each call of the system, and goes on when a
// later generation saves, or has saved.
TEST(JobGeneration, AWriterThatWasStoppedAnywhereReplacesNothing) {
  int refused = 0, completed = 0;
  for (int stop = 0;; ++stop) {
    SCOPED_TRACE(stop);
    const TemporaryFolder temporary;
    const std::filesystem::path path = temporary.path() / "run";
    WatchedCalls calls;
    calls.skip_fsync = true;
    CheckpointFolder cut_off(path, calls), present(path);
    int count = 0;
    std::future<void> later;
    calls.before = [&](const std::string&, const std::string&) {
      if (count++ != stop) return 0;
      later = std::async(std::launch::async, [&] { save(present, 20, kLater, 5); });
      later.wait_for(std::chrono::milliseconds(30));
      return 0;
    };
    try {
      save(cut_off, 10, kFirst, 5);
      ++completed;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("generation 2 of the job has written there"));
      ++refused;
    }
    if (!later.valid()) break;  // the save makes fewer calls
    later.get();
    EXPECT_EQ(present.newest(), 20U);
    check(path, 20, kLater);
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(completed, 10);
}

// The same, but the process is killed there.
TEST(JobGeneration, AWriterThatIsKilledAnywhereReleasesTheFolder) {
  for (int stop = 0; stop < 30; ++stop) {
    SCOPED_TRACE(stop);
    const TemporaryFolder temporary;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      WatchedCalls calls;
      int count = 0;
      calls.before = [&](const std::string&, const std::string&) {
        if (count++ == stop) ::raise(SIGKILL);
        return 0;
      };
      CheckpointFolder folder(temporary.path(), calls);
      save(folder, 10, kFirst);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    CheckpointFolder present(temporary.path());
    save(present, 20, kLater, 5);
    EXPECT_EQ(present.newest(), 20U);
    check(temporary.path(), 20, kLater);
  }
}

// A rank that was cut off writes its file when a later generation has saved the same step.
TEST(JobGeneration, ARankThatWasStoppedDoesNotDamageALaterCheckpoint) {
  for (const std::string last : {"open", "write", "rename"}) {
    SCOPED_TRACE(last);
    const TemporaryFolder temporary;
    CheckpointFolder cut_off(temporary.path()), present(temporary.path());
    cut_off.begin(10, std::nullopt, kFirst);
    WatchedCalls calls;
    bool stopped = false;
    calls.before = [&](const std::string& call, const std::string& path) {
      if (stopped || call != last || path.find("rank-1") == std::string::npos) return 0;
      stopped = true;
      cut_off.abandon(10);  // rank 0 has ended
      save(present, 10, kLater);
      return 0;
    };
    CheckpointFolder rank(temporary.path(), calls);
    try {
      write_rank(rank, 10, kFirst, 1);
    } catch (const CheckpointError&) {
      // Its file was removed.
    }
    EXPECT_TRUE(stopped);
    check(temporary.path(), 10, kLater);
    EXPECT_THAT(present.steps(), ElementsAre(10U));
  }
}

TEST(JobGeneration, AnElasticJobWaitsForAHolderOfTheLockThatIsKilled) {
  const TemporaryFolder temporary;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(temporary.path());
    if (::write(ends[1], "x", 1) == 1) ::pause();
    ::_exit(1);
  }
  char ready = 0;
  ASSERT_EQ(::read(ends[0], &ready, 1), 1);
  const auto killed = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  });
  CheckpointFolder present(temporary.path());
  EXPECT_THAT(error_of([&] { present.begin(10); }), HasSubstr("is in use"));
  save(present, 10, kLater);
  check(temporary.path(), 10, kLater);
  for (const int end : ends) ::close(end);
}

}  // namespace
}  // namespace hvd::libtorch::testing::generations
