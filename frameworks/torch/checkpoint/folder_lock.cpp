#include "checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown host";
}

/// The launcher's name of the job; empty without a launcher that names it.
std::string job_name() {
  for (const char* variable : {"HVD_JOB_NAME", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}) {
    const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
    if (value != nullptr && *value != '\0') return std::string(variable) + '=' + value;
  }
  return {};
}

std::string this_process() {
  const std::string job = job_name();
  return "process " + std::to_string(::getpid()) + " on " + host_name() +
         (job.empty() ? "" : " of the job with " + job);
}

/// Returns whether the path still names the open file, which its last holder may have removed.
bool is_same_file(int file, const std::filesystem::path& path) {
  struct stat open {};
  struct stat named {};
  return ::fstat(file, &open) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder) : path_(folder / kName) {
  while (!try_lock()) {
  }
  const std::string text = this_process();
  // The text is only used in error texts, so a failure here is ignored.
  if (::ftruncate(file_, 0) == 0 && ::pwrite(file_, text.data(), text.size(), 0) < 0) return;
}

/// @return false when the last holder has removed the file in the meantime
bool FolderLock::try_lock() {
  constexpr mode_t kMode = 0666;
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kMode);
  if (file_ < 0) {
    throw CheckpointError("cannot open " + path_.string() + ": " +
                          std::generic_category().message(errno));
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    const std::string other = holder();
    ::close(file_);
    throw CheckpointError(
        path_.parent_path().string() + " is in use: " +
        (other == this_process() ? "another Checkpointer or save_checkpoint() of this process"
                                 : other) +
        " is writing a checkpoint there; expected one at a time: wait for it, or save in another "
        "folder");
  }
  if (is_same_file(file_, path_)) return true;
  ::close(file_);
  return false;
}

std::string FolderLock::holder() const {
  std::array<char, 512> text{};
  const ssize_t got = ::pread(file_, text.data(), text.size(), 0);
  return got > 0 ? std::string(text.data(), static_cast<std::size_t>(got)) : "another process";
}

FolderLock::~FolderLock() {
  ::unlink(path_.c_str());
  // Unlocks explicitly, since a forked process may have the descriptor too.
  ::flock(file_, LOCK_UN);
  ::close(file_);
}

}  // namespace hvd::libtorch
