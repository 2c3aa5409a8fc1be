#include "checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

constexpr std::string_view kTitle = "hvd-checkpoint";
constexpr int kNewestVersion = 2;

std::string hexadecimal(std::uint32_t value) {
  std::ostringstream text;
  text << std::hex << value;
  return std::move(text).str();
}

/// The values of a line "KEY VALUE ..." that has `values` of them; empty for any other line.
std::vector<std::string_view> values_of(std::string_view line, std::string_view key,
                                        std::size_t values) {
  std::vector<std::string_view> words = split_text(line, ' ');
  if (words.size() != values + 1 || words.front() != key) return {};
  words.erase(words.begin());
  return words;
}

std::optional<CheckpointFile> file_of(std::string_view line) {
  auto words = values_of(line, "file", 3);
  if (words.empty()) words = values_of(line, "file", 4);
  if (words.empty()) return std::nullopt;
  const auto bytes = parse_number<std::uint64_t>(words[1]);
  const auto checksum = parse_number<std::uint32_t>(words[2], 16);
  const auto share = words.size() == 4 ? parse_number<std::uint64_t>(words[3]) : 0;
  // A name with a slash would be outside the checkpoint's folder.
  if (!bytes || !checksum || !share || words[0].find('/') != std::string_view::npos)
    return std::nullopt;
  if (*share > *bytes) return std::nullopt;
  return CheckpointFile{std::string(words[0]), {*bytes, *checksum}, *share};
}

/// Checked first, because other versions may differ in everything that follows.
void check_version(const std::vector<std::string_view>& lines, const std::string& where) {
  const auto words = lines.empty() ? lines : values_of(lines.front(), kTitle, 1);
  const auto version = words.empty() ? std::nullopt : parse_number<int>(words.front());
  if (!version)
    throw CheckpointError(where + " is not the manifest of a checkpoint, or is damaged");
  if (*version < 1 || *version > kNewestVersion) {
    throw CheckpointError(text(where, ": expected a checkpoint of version 1 to ", kNewestVersion,
                               ", got version ", *version, "; load it with the hvd that wrote it"));
  }
}

}  // namespace

std::uint64_t Manifest::shared_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const CheckpointFile& file : files) sum += file.share;
  return sum;
}

std::string Manifest::encode() const {
  std::ostringstream text;
  text << kTitle << ' ' << (shared_bytes() > 0 ? 2 : 1) << "\nstep " << step << '\n';
  for (const CheckpointFile& file : files) {
    text << "file " << file.name << ' ' << file.contents.bytes << ' '
         << hexadecimal(file.contents.checksum);
    if (file.share > 0) text << ' ' << file.share;
    text << '\n';
  }
  const std::string body = std::move(text).str();
  return body + "checksum " + hexadecimal(crc32(body)) + '\n';
}

Manifest Manifest::decode(std::string_view text, const std::string& where) {
  std::vector<std::string_view> lines = split_text(text, '\n');
  if (lines.back().empty()) lines.pop_back();
  check_version(lines, where);
  const CheckpointError damaged(where + " is damaged; load an older checkpoint");
  constexpr std::size_t kMinLines = 5;  // version, step, common, one rank, checksum
  if (lines.size() < kMinLines || text.back() != '\n') throw damaged;
  const auto last = values_of(lines.back(), "checksum", 1);
  const auto checksum = last.empty() ? std::nullopt : parse_number<std::uint32_t>(last.front(), 16);
  const auto body = text.substr(0, static_cast<std::size_t>(lines.back().data() - text.data()));
  if (!checksum || *checksum != crc32(body)) throw damaged;

  Manifest manifest;
  const auto step = values_of(lines[1], "step", 1);
  const auto step_number = step.empty() ? std::nullopt : parse_number<std::uint64_t>(step.front());
  if (!step_number) throw damaged;
  manifest.step = *step_number;
  for (std::size_t i = 2; i + 1 < lines.size(); ++i) {
    auto file = file_of(lines[i]);
    if (!file) throw damaged;
    manifest.files.push_back(std::move(*file));
  }
  // A text that decodes but is not canonical has an error that the checksum does not detect.
  if (manifest.encode() != text) throw damaged;
  return manifest;
}

namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown host";
}

/// The job's name from the launcher; empty if there is none.
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

FolderLock::FolderLock(const std::filesystem::path& folder, std::chrono::milliseconds timeout)
    : path_(folder / kName) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    const Attempt attempt = try_lock();
    if (attempt == Attempt::kLocked) break;
    if (attempt == Attempt::kRemoved) continue;
    if (std::chrono::steady_clock::now() >= end) refuse(holder_);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string text = this_process();
  // The text is only used in error texts, so a failure here is ignored.
  if (::ftruncate(file_, 0) == 0 && ::pwrite(file_, text.data(), text.size(), 0) < 0) return;
}

/// @return kRemoved when the last holder has removed the file in the meantime
FolderLock::Attempt FolderLock::try_lock() {
  constexpr mode_t kMode = 0666;
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kMode);
  if (file_ < 0) {
    throw CheckpointError("cannot open " + path_.string() + ": " +
                          std::generic_category().message(errno));
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    holder_ = holder();
    ::close(file_);
    return Attempt::kHeld;
  }
  if (is_same_file(file_, path_)) return Attempt::kLocked;
  ::close(file_);
  return Attempt::kRemoved;
}

void FolderLock::refuse(const std::string& other) const {
  throw CheckpointError(
      path_.parent_path().string() + " is in use: " +
      (other == this_process() ? "another Checkpointer or save_checkpoint() of this process"
                               : other) +
      " is writing a checkpoint there; expected one at a time: wait for it, or save in another "
      "folder");
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

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr const char* kManifest = "manifest";
constexpr const char* kCommon = "common";
constexpr const char* kRank = "rank-";
constexpr const char* kModel = ".safetensors";
constexpr std::string_view kGeneration = ".g";

std::string with_generation(const std::string& name, std::uint64_t generation) {
  return generation == 0 ? name : text(name, kGeneration, generation);
}

/// The longest wait for the lock in an elastic job, in seconds. A process that was cut off is
/// killed before this time ends, unless HVD_PEER_TIMEOUT is long.
constexpr int kLockTimeout = 60;

/// Whether hvd creates files with this name. Other files are never removed.
bool is_ours(std::string name) {
  const std::string_view partial = kPartial;
  if (name.ends_with(partial)) name.resize(name.size() - partial.size());
  if (const std::size_t mark = name.rfind(kGeneration); mark != std::string::npos) {
    if (parse_number<std::uint64_t>(std::string_view(name).substr(mark + kGeneration.size())))
      name.resize(mark);
  }
  return name == kManifest || name == kCommon || name.ends_with(kModel) ||
         (name.starts_with(kRank) && parse_number<std::uint64_t>(std::string_view(name).substr(5)));
}

bool is_there(const fs::path& path) {
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (error) {
    throw CheckpointError("cannot look for " + path.string() + ": " + error.message());
  }
  return there;
}

}  // namespace

fs::path CheckpointFolder::folder_of(std::uint64_t step) const {
  std::string number = std::to_string(step);
  constexpr std::size_t kDigits = 12;  // listings by name are then in order
  if (number.size() < kDigits) number.insert(0, kDigits - number.size(), '0');
  return path_ / (std::string(kStep) + number);
}

std::string CheckpointFolder::common_name(std::uint64_t generation) {
  return with_generation(kCommon, generation);
}
std::string CheckpointFolder::rank_name(int rank, std::uint64_t generation) {
  return with_generation(kRank + std::to_string(rank), generation);
}
std::string CheckpointFolder::model_name(const std::string& item) { return item + kModel; }

/// All steps that have a folder, complete or not, ascending.
std::vector<std::uint64_t> CheckpointFolder::all_steps() const {
  std::vector<std::uint64_t> found;
  std::error_code error;
  fs::directory_iterator entries(path_, error);
  if (error == std::errc::no_such_file_or_directory) return found;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (!name.starts_with(kStep)) continue;
    const auto step = parse_number<std::uint64_t>(std::string_view(name).substr(kStep.size()));
    if (step && folder_of(*step) == entries->path()) found.push_back(*step);
  }
  if (error) throw CheckpointError("cannot list " + path_.string() + ": " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::uint64_t> CheckpointFolder::steps() const {
  std::vector<std::uint64_t> found = all_steps();
  std::erase_if(found,
                [this](std::uint64_t step) { return !is_there(folder_of(step) / kManifest); });
  return found;
}

std::optional<std::uint64_t> CheckpointFolder::newest() const {
  const auto all = steps();
  if (all.empty()) return std::nullopt;
  return all.back();
}

void CheckpointFolder::require_newest(std::uint64_t step,
                                      std::optional<std::uint64_t> loaded) const {
  const auto last = newest();
  if (!last || *last < step || (loaded && *loaded < step)) return;
  throw CheckpointError(text("cannot save step ", step, " in ", path_.string(),
                             ", which has a checkpoint of step ", *last,
                             ", and that would stay the newest; load it first, save in another "
                             "folder, or load an older one and allow the newer ones to be replaced "
                             "(replace_newer)"));
}

void CheckpointFolder::begin(std::uint64_t step, std::optional<std::uint64_t> loaded,
                             const JobGeneration& writer) {
  make_folder_durably(path_, calls_);
  writer_ = writer;
  // A rank that was cut off may hold the lock until it is killed.
  const std::chrono::seconds timeout(writer.elastic() ? kLockTimeout : 0);
  if (!lock_) lock_ = std::make_shared<FolderLock>(path_, timeout);
  try {
    GenerationRecord(path_, calls_).claim(writer);
    require_newest(step, loaded);
    // Leftover files are harmless: no manifest names them, or a later save overwrites them.
    if (is_there(folder_of(step))) remove(step);
    make_folder(folder_of(step), calls_);
  } catch (...) {
    lock_.reset();
    throw;
  }
}

CheckpointFile CheckpointFolder::write(std::uint64_t step, const std::string& name,
                                       const ByteSource& source) {
  return {name, write_durably(folder_of(step) / name, source, calls_)};
}

/// Compares the sizes only. Reading a file compares its checksum.
void CheckpointFolder::check_sizes(const Manifest& manifest) const {
  for (const CheckpointFile& file : manifest.files) {
    const fs::path path = folder_of(manifest.step) / file.name;
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error) {
      throw CheckpointError(text(
          "checkpoint of step ", manifest.step, ": ", path.string(), " is missing (",
          error.message(), "); all ranks must see one folder, on a file system that they share"));
    }
    if (bytes != file.contents.bytes) {
      throw CheckpointError(text(path.string(), " is damaged: expected ", file.contents.bytes,
                                 " bytes, got ", bytes, "; load an older checkpoint"));
    }
  }
}

std::string CheckpointFolder::commit(const Manifest& manifest,
                                     std::optional<std::uint64_t> loaded) {
  check_sizes(manifest);
  GenerationRecord(path_, calls_).check(writer_);
  sync_folder(path_, calls_);  // makes the entry of the step's folder durable
  write_durably(folder_of(manifest.step) / kManifest, manifest.encode(), calls_);
  std::string complaint;
  if (loaded) {
    for (const std::uint64_t step : steps()) {
      if (step <= *loaded || step == manifest.step) continue;
      if (std::string left = remove(step); !left.empty()) complaint = std::move(left);
    }
  }
  lock_.reset();
  return complaint;
}

void CheckpointFolder::abandon(std::uint64_t step) noexcept {
  try {
    remove(step);
  } catch (const std::exception&) {
    // Files without a manifest are ignored, and the next save removes them.
  }
  lock_.reset();
}

/// Removes the manifest first, durably, so that a checkpoint that lacks a file never looks
/// complete.
std::string CheckpointFolder::remove(std::uint64_t step) {
  const fs::path folder = folder_of(step);
  if (is_there(folder / kManifest)) {
    if (calls_.unlink((folder / kManifest).string()) != 0)
      return "cannot remove " + (folder / kManifest).string() + ": " +
             std::generic_category().message(errno);
    sync_folder(folder, calls_);
  }
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entries(folder, error); !error && entries != fs::directory_iterator();
       entries.increment(error))
    names.push_back(entries->path().filename().string());
  for (const std::string& name : names) {
    if (is_ours(name)) calls_.unlink((folder / name).string());
  }
  if (calls_.rmdir(folder.string()) != 0) {
    return "cannot remove " + folder.string() + ": " + std::generic_category().message(errno);
  }
  return {};
}

std::string CheckpointFolder::remove_all_but(std::size_t keep) noexcept {
  std::string complaint;
  try {
    const auto complete = steps();
    if (complete.empty()) return {};
    for (const std::uint64_t step : all_steps()) {
      const auto place = std::lower_bound(complete.begin(), complete.end(), step);
      const bool is_complete = place != complete.end() && *place == step;
      const bool recent = static_cast<std::size_t>(complete.end() - place) <= keep;
      // A later step without a manifest may be one that another process is writing.
      if (is_complete ? recent : place == complete.end()) continue;
      if (std::string left = remove(step); !left.empty()) complaint = std::move(left);
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return complaint;
}

Manifest CheckpointFolder::manifest(std::uint64_t step) const {
  const fs::path path = folder_of(step) / kManifest;
  if (!is_there(path)) {
    std::string there;
    for (const std::uint64_t other : steps()) there += text(' ', other);
    throw CheckpointError(text("there is no complete checkpoint of step ", step, " in ",
                               path_.string(), ", which has those of steps:", there));
  }
  Manifest manifest = Manifest::decode(read_file(path, calls_), path.string());
  if (manifest.step != step) {
    throw CheckpointError(text(path.string(), ": expected step ", step, ", got step ",
                               manifest.step, "; was the folder renamed?"));
  }
  check_sizes(manifest);
  return manifest;
}

std::string CheckpointFolder::read(std::uint64_t step, const CheckpointFile& file) const {
  return read_file(folder_of(step) / file.name, file.contents, calls_);
}

}  // namespace hvd::libtorch
