#include "mpirun/job_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "system/error.h"

namespace hvd::launcher {
namespace {

/// A folder younger than this may not be locked yet.
constexpr int kLockGraceSeconds = 10;
/// Longer than any start takes: twice the default of HVD_START_TIMEOUT.
constexpr int kStartGraceSeconds = 600;

/// The file's status; nullopt if it does not exist or belongs to another user.
std::optional<struct stat> own_status(const std::filesystem::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0 || info.st_uid != ::geteuid()) return std::nullopt;
  return info;
}

std::time_t age_of(const struct stat& info) { return std::time(nullptr) - info.st_mtime; }

UniqueFd open_folder(const std::filesystem::path& path) {
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// Removes the folder if no process holds its lock.
void remove_if_free(const std::filesystem::path& path, const UniqueFd& fd) {
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& parent,
                                              std::string_view prefix) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(parent, error)) {
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  }
  return found;
}

/// How Open MPI and MPICH begin the names of their segments.
constexpr std::array<std::string_view, 2> kSegmentPrefixes = {"vader_segment.", "mpich_shm_"};

/// The mappings of such segments in all processes that this one may inspect.
std::string own_maps() {
  const auto has_segment = [](const std::string& line) {
    return std::any_of(kSegmentPrefixes.begin(), kSegmentPrefixes.end(),
                       [&](const auto& prefix) { return line.find(prefix) != std::string::npos; });
  };
  std::string maps;
  for (const auto& process : entries_of("/proc", "")) {
    if (process.filename().string().find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(process / "maps");
    for (std::string line; std::getline(file, line);) {
      if (has_segment(line)) maps += line + "\n";
    }
  }
  return maps;
}

}  // namespace

std::optional<JobFolder> JobFolder::join(const std::filesystem::path& path) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return std::nullopt;
    if (!own_status(path)) return std::nullopt;
    UniqueFd fd = open_folder(path);
    if (!fd || ::flock(fd.get(), LOCK_SH) != 0) continue;
    struct stat info {};
    // The last holder may have removed the folder before this process had the lock.
    if (::fstat(fd.get(), &info) == 0 && info.st_nlink > 0) return JobFolder(path, std::move(fd));
  }
  return std::nullopt;
}

JobFolder::~JobFolder() {
  if (lock_) remove_if_free(path_, lock_);
}

void remove_abandoned(const std::filesystem::path& parent, std::string_view prefix) {
  for (const auto& path : entries_of(parent, prefix)) {
    const auto info = own_status(path);
    if (!info || !S_ISDIR(info->st_mode) || age_of(*info) < kLockGraceSeconds) continue;
    const UniqueFd fd = open_folder(path);
    if (fd) remove_if_free(path, fd);
  }
}

void remove_stale_segments(const std::filesystem::path& shm) {
  const auto is_old = [](const std::filesystem::path& path) {
    const auto info = own_status(path);
    return info && !S_ISDIR(info->st_mode) && age_of(*info) >= kStartGraceSeconds;
  };
  std::optional<std::string> maps;
  for (const std::string_view prefix : kSegmentPrefixes) {
    for (const auto& path : entries_of(shm, prefix)) {
      if (!is_old(path)) continue;
      if (!maps) maps = own_maps();
      if (maps->find(path.filename().string()) == std::string::npos) ::unlink(path.c_str());
    }
  }
}

std::filesystem::path TemporaryFolder::parent() {
  const char* base = std::getenv("TMPDIR");
  return base != nullptr && *base != '\0' ? base : "/tmp";
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = parent() / (std::string(kPrefix) + "XXXXXX");
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw LaunchError(ExitCode::kInternal, "cannot make a folder " + pattern + ": " +
                                               std::strerror(errno) +
                                               "; expected a writable /tmp, or TMPDIR to name one");
  }
  path_ = pattern;
  // Not closed on exec: mpirun, which uses the folder, may outlive hvdrun.
  lock_ = UniqueFd(::open(pattern.c_str(), O_RDONLY | O_DIRECTORY));
  if (lock_) ::flock(lock_.get(), LOCK_SH);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace hvd::launcher
