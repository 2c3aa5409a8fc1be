#include "reports/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <asio/executor_work_guard.hpp>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "base/thread.h"
#include "system/error.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

/// The most bytes of one system call, after which the progress is recorded.
constexpr std::size_t kWrittenAtOnce = 64 * 1024;

}  // namespace

struct FileWriter::State {
  struct OutputFile {
    std::string path;
    UniqueFd fd;
    // Guarded by the mutex. `over`: the file accepts no more bytes.
    std::string queued = {};
    bool closes = false, scheduled = false, over = false, failed = false;
  };

  Mutex mutex;
  asio::io_context work{1};      ///< of the thread
  std::deque<OutputFile> files;  ///< grows only before the thread starts
  /// Bytes that are queued or being written; the closing of a file counts as one.
  std::size_t pending HVD_GUARDED_BY(mutex) = 0;
  Clock::time_point last_progress HVD_GUARDED_BY(mutex){};
  std::vector<std::string> failures HVD_GUARDED_BY(mutex);
  bool over HVD_GUARDED_BY(mutex) = false;
  bool given_up HVD_GUARDED_BY(mutex) = false;
  asio::io_context& io;  ///< exists until `over`

  explicit State(asio::io_context& context) : io(context) {}
  bool add(std::size_t file, std::string_view bytes, bool last);
  int perform(OutputFile& file, std::string_view bytes, bool last);
  void process(OutputFile& file);
};

FileWriter::FileWriter(asio::io_context& io) : state_(std::make_shared<State>(io)) {}

FileWriter::~FileWriter() {
  const MutexLock lock(state_->mutex);
  state_->over = true;
  state_->work.stop();
}

std::size_t FileWriter::create(const std::filesystem::path& path, const std::string& option) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) {
    throw LaunchError(ExitCode::kUsage,
                      option + ": cannot create " + path.string() + ": " + std::strerror(errno));
  }
  state_->files.push_back({.path = path, .fd = std::move(fd)});
  return state_->files.size() - 1;
}

void FileWriter::write(std::size_t file, std::string_view bytes) {
  if (bytes.empty() || !state_->add(file, bytes, false) || std::exchange(started_, true)) return;
  start_thread("hvdrun-files", [state = state_] {
    const auto guard = asio::make_work_guard(state->work);
    state->work.run();
  }).detach();
}

void FileWriter::close(std::size_t file) {
  if (started_) state_->add(file, {}, true);
}

std::size_t FileWriter::pending() const {
  const MutexLock lock(state_->mutex);
  return state_->pending;
}

std::optional<FileWriter::Clock::time_point> FileWriter::next_deadline() const {
  const MutexLock lock(state_->mutex);
  if (state_->pending == 0) return std::nullopt;
  return state_->last_progress + kTimeout;
}

std::vector<std::string> FileWriter::collect_failures(std::chrono::milliseconds timeout) {
  const MutexLock lock(state_->mutex);
  if (state_->pending > 0 && Clock::now() - state_->last_progress >= timeout) {
    const auto folder = std::filesystem::path(state_->files[0].path).parent_path().parent_path();
    state_->failures.push_back(text("cannot write the files in ", folder,
                                    ": no data was accepted for ", timeout.count() / 1000,
                                    " s; the ranks' output is not kept there any more"));
    for (State::OutputFile& file : state_->files) {
      file.over = true;
      file.queued.clear();
    }
    state_->pending = 0;
    state_->given_up = true;
  }
  return std::exchange(state_->failures, {});
}

/// Queues bytes, or the closing of a file. Returns false if the file accepts no more.
bool FileWriter::State::add(std::size_t file, std::string_view bytes, bool last) {
  const MutexLock lock(mutex);
  OutputFile& output = files[file];
  if (output.over) return false;
  output.over = output.closes = last;
  if (pending == 0) last_progress = Clock::now();
  pending += bytes.size() + (last ? 1 : 0);
  output.queued += bytes;
  if (!std::exchange(output.scheduled, true))
    asio::post(work, [this, &output] { process(output); });
  return true;
}

/// Writes the bytes. Returns errno on failure, else 0.
int FileWriter::State::perform(OutputFile& file, std::string_view bytes, bool last) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::write(file.fd.get(), bytes.data(), std::min(bytes.size(), kWrittenAtOnce));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    bytes.remove_prefix(static_cast<std::size_t>(count));
    const MutexLock lock(mutex);
    last_progress = Clock::now();
  }
  return last ? file.fd.close() : 0;
}

void FileWriter::State::process(OutputFile& file) {
  std::string bytes;
  bool last = false;
  {
    const MutexLock lock(mutex);
    bytes = std::exchange(file.queued, {});
    last = std::exchange(file.closes, false);
    file.scheduled = false;
  }
  const int error = perform(file, bytes, last);
  const MutexLock lock(mutex);
  if (!over) asio::post(io, [] {});
  if (given_up) return;
  pending -= bytes.size() + (last ? 1 : 0);
  last_progress = Clock::now();
  if (error == 0) return;
  // A full disk is reported, but it must not end the training.
  if (!std::exchange(file.failed, true)) {
    failures.push_back("cannot write " + file.path + ": " + std::strerror(error) +
                       "; further output is not written there");
  }
  file.over = true;
}

}  // namespace hvd::launcher
