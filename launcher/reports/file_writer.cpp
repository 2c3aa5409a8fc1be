#include "reports/file_writer.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "system/error.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

/// Small pieces for one file are written together, up to this size.
constexpr std::size_t kWrittenTogether = 64 * 1024;

}  // namespace

struct FileWriter::State {
  struct Piece {
    std::size_t file = 0;
    std::string bytes;
    bool last = false;  ///< the file is to be closed; counts as a byte, so that it is waited for

    std::size_t size() const { return bytes.size() + (last ? 1 : 0); }
  };

  struct File {
    std::string path;
    UniqueFd fd;
    bool over = false, failed = false;  ///< takes no more bytes; under the lock of the State
  };

  Mutex mutex;
  Condition changed;
  std::deque<File> files;  ///< grows only before the thread starts
  std::deque<Piece> queue HVD_GUARDED_BY(mutex);
  /// Bytes in `queue` and in the thread's hands.
  std::size_t pending HVD_GUARDED_BY(mutex) = 0;
  Clock::time_point last_progress HVD_GUARDED_BY(mutex){};
  std::vector<std::string> failures HVD_GUARDED_BY(mutex);
  bool over HVD_GUARDED_BY(mutex) = false;
  bool given_up HVD_GUARDED_BY(mutex) = false;
  UniqueFd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

  void notify() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
  }
  bool add(Piece piece);
  std::optional<Piece> next();
  int write(const Piece& piece);
  void process(const Piece& piece);
};

FileWriter::FileWriter() : state_(std::make_shared<State>()) {}

FileWriter::~FileWriter() {
  {
    const MutexLock lock(state_->mutex);
    state_->over = true;
  }
  state_->changed.notify_one();
}

std::size_t FileWriter::create(const std::filesystem::path& path) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) {
    throw LaunchError(ExitCode::kUsage, "--output-filename: cannot create " + path.string() + ": " +
                                            std::strerror(errno));
  }
  state_->files.push_back({.path = path, .fd = std::move(fd)});
  return state_->files.size() - 1;
}

void FileWriter::write(std::size_t file, std::string_view bytes) {
  if (bytes.empty() || !state_->add({file, std::string(bytes), false})) return;
  if (!std::exchange(started_, true)) std::thread(run, state_).detach();
}

void FileWriter::close(std::size_t file) {
  if (started_) state_->add({file, {}, true});
}

std::size_t FileWriter::pending() const {
  const MutexLock lock(state_->mutex);
  return state_->pending;
}

std::optional<FileWriter::Clock::time_point> FileWriter::next_deadline() const {
  const MutexLock lock(state_->mutex);
  if (state_->pending == 0) return std::nullopt;
  return state_->last_progress + kPatience;
}

void FileWriter::add_to(Poller& poller) {
  poller.add(state_->event.get(), POLLIN, [this](short) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(state_->event.get(), &count, sizeof count);
  });
}

std::vector<std::string> FileWriter::take_failures(std::chrono::milliseconds patience) {
  const MutexLock lock(state_->mutex);
  if (state_->pending > 0 && Clock::now() - state_->last_progress >= patience) {
    const auto folder = std::filesystem::path(state_->files[0].path).parent_path().parent_path();
    state_->failures.push_back(text("cannot write the files in ", folder,
                                    ": no data was accepted for ", patience.count() / 1000,
                                    " s; the ranks' output is not kept there any more"));
    for (State::File& file : state_->files) file.over = true;
    state_->queue.clear();
    state_->pending = 0;
    state_->given_up = true;
  }
  return std::exchange(state_->failures, {});
}

/// Whether the file takes it.
bool FileWriter::State::add(Piece piece) {
  {
    const MutexLock lock(mutex);
    if (files[piece.file].over) return false;
    files[piece.file].over = piece.last;
    if (pending == 0) last_progress = Clock::now();
    pending += piece.size();
    const bool fits = !queue.empty() && queue.back().file == piece.file &&
                      queue.back().bytes.size() < kWrittenTogether && !piece.last;
    if (fits) {
      queue.back().bytes += piece.bytes;
    } else {
      queue.push_back(std::move(piece));
    }
  }
  changed.notify_one();
  return true;
}

/// The next task; empty at the end.
std::optional<FileWriter::State::Piece> FileWriter::State::next() {
  const MutexLock lock(mutex);
  while (!over && queue.empty()) changed.wait(mutex);
  if (over) return std::nullopt;
  Piece piece = std::move(queue.front());
  queue.pop_front();
  return piece;
}

/// errno when it fails.
int FileWriter::State::write(const Piece& piece) {
  const int fd = files[piece.file].fd.get();
  for (std::string_view left = piece.bytes; !left.empty();) {
    const ssize_t count = ::write(fd, left.data(), std::min(left.size(), kWrittenTogether));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    left.remove_prefix(static_cast<std::size_t>(count));
    const MutexLock lock(mutex);
    last_progress = Clock::now();
  }
  return piece.last ? files[piece.file].fd.close() : 0;
}

void FileWriter::State::process(const Piece& piece) {
  const int error = write(piece);
  File& file = files[piece.file];
  const MutexLock lock(mutex);
  if (given_up) return;
  pending -= piece.size();
  last_progress = Clock::now();
  if (error == 0) return;
  // A full disk must not end the training that writes to it, but it is reported.
  if (!std::exchange(file.failed, true)) {
    failures.push_back("cannot write " + file.path + ": " + std::strerror(error) +
                       "; its output is not kept there any more");
  }
  file.over = true;
}

void FileWriter::run(std::shared_ptr<State> state) {
  while (const auto piece = state->next()) {
    state->process(*piece);
    state->notify();
  }
}

}  // namespace hvd::launcher
