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

struct FileWriter::WriteQueue {
  struct Write {
    std::size_t file = 0;
    std::string bytes;
    bool last = false;  ///< closes the file; counts as one pending byte

    std::size_t size() const { return bytes.size() + (last ? 1 : 0); }
  };

  struct OutputFile {
    std::string path;
    UniqueFd fd;
    bool over = false, failed = false;  ///< over: accepts no more bytes. Guarded by the mutex
  };

  Mutex mutex;
  Condition changed;
  std::deque<OutputFile> files;  ///< grows only before the thread starts
  std::deque<Write> writes HVD_GUARDED_BY(mutex);
  /// Bytes in `writes` and in the write that the thread performs.
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
  bool add(Write write);
  std::optional<Write> next();
  int perform(const Write& write);
  void process(const Write& write);
};

FileWriter::FileWriter() : queue_(std::make_shared<WriteQueue>()) {}

FileWriter::~FileWriter() {
  {
    const MutexLock lock(queue_->mutex);
    queue_->over = true;
  }
  queue_->changed.notify_one();
}

std::size_t FileWriter::create(const std::filesystem::path& path) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) {
    throw LaunchError(ExitCode::kUsage, "--output-filename: cannot create " + path.string() + ": " +
                                            std::strerror(errno));
  }
  queue_->files.push_back({.path = path, .fd = std::move(fd)});
  return queue_->files.size() - 1;
}

void FileWriter::write(std::size_t file, std::string_view bytes) {
  if (bytes.empty() || !queue_->add({file, std::string(bytes), false})) return;
  if (!std::exchange(started_, true)) std::thread(run, queue_).detach();
}

void FileWriter::close(std::size_t file) {
  if (started_) queue_->add({file, {}, true});
}

std::size_t FileWriter::pending() const {
  const MutexLock lock(queue_->mutex);
  return queue_->pending;
}

std::optional<FileWriter::Clock::time_point> FileWriter::next_deadline() const {
  const MutexLock lock(queue_->mutex);
  if (queue_->pending == 0) return std::nullopt;
  return queue_->last_progress + kPatience;
}

void FileWriter::add_to(Poller& poller) {
  poller.add(queue_->event.get(), POLLIN, [this](short) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(queue_->event.get(), &count, sizeof count);
  });
}

std::vector<std::string> FileWriter::collect_failures(std::chrono::milliseconds patience) {
  const MutexLock lock(queue_->mutex);
  if (queue_->pending > 0 && Clock::now() - queue_->last_progress >= patience) {
    const auto folder = std::filesystem::path(queue_->files[0].path).parent_path().parent_path();
    queue_->failures.push_back(text("cannot write the files in ", folder,
                                    ": no data was accepted for ", patience.count() / 1000,
                                    " s; the ranks' output is not kept there any more"));
    for (WriteQueue::OutputFile& file : queue_->files) file.over = true;
    queue_->writes.clear();
    queue_->pending = 0;
    queue_->given_up = true;
  }
  return std::exchange(queue_->failures, {});
}

/// Queues a write. Returns false if the file accepts no more bytes.
bool FileWriter::WriteQueue::add(Write write) {
  {
    const MutexLock lock(mutex);
    if (files[write.file].over) return false;
    files[write.file].over = write.last;
    if (pending == 0) last_progress = Clock::now();
    pending += write.size();
    const bool fits = !writes.empty() && writes.back().file == write.file &&
                      writes.back().bytes.size() < kWrittenTogether && !write.last;
    if (fits) {
      writes.back().bytes += write.bytes;
    } else {
      writes.push_back(std::move(write));
    }
  }
  changed.notify_one();
  return true;
}

/// Waits for the next write; empty at the end.
std::optional<FileWriter::WriteQueue::Write> FileWriter::WriteQueue::next() {
  const MutexLock lock(mutex);
  while (!over && writes.empty()) changed.wait(mutex);
  if (over) return std::nullopt;
  Write write = std::move(writes.front());
  writes.pop_front();
  return write;
}

/// Writes the bytes. Returns errno on failure, else 0.
int FileWriter::WriteQueue::perform(const Write& write) {
  const int fd = files[write.file].fd.get();
  for (std::string_view left = write.bytes; !left.empty();) {
    const ssize_t count = ::write(fd, left.data(), std::min(left.size(), kWrittenTogether));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    left.remove_prefix(static_cast<std::size_t>(count));
    const MutexLock lock(mutex);
    last_progress = Clock::now();
  }
  return write.last ? files[write.file].fd.close() : 0;
}

void FileWriter::WriteQueue::process(const Write& write) {
  const int error = perform(write);
  OutputFile& file = files[write.file];
  const MutexLock lock(mutex);
  if (given_up) return;
  pending -= write.size();
  last_progress = Clock::now();
  if (error == 0) return;
  // A full disk is reported, but it must not end the training.
  if (!std::exchange(file.failed, true)) {
    failures.push_back("cannot write " + file.path + ": " + std::strerror(error) +
                       "; further output is not written there");
  }
  file.over = true;
}

void FileWriter::run(std::shared_ptr<WriteQueue> queue) {
  while (const auto write = queue->next()) {
    queue->process(*write);
    queue->notify();
  }
}

}  // namespace hvd::launcher
