#include "checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <exception>
#include <system_error>

#include "checkpoint/durable_file.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr const char* kManifest = "manifest";
constexpr const char* kCommon = "common";
constexpr const char* kRank = "rank-";

/// The number, if the whole text is its digits.
std::optional<std::uint64_t> digits(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Whether hvd gives files this name. Other files are never removed.
bool is_ours(std::string name) {
  const std::string_view partial = kPartial;
  if (name.ends_with(partial)) name.resize(name.size() - partial.size());
  return name == kManifest || name == kCommon ||
         (name.starts_with(kRank) && digits(std::string_view(name).substr(5)));
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

std::string CheckpointFolder::common_name() { return kCommon; }
std::string CheckpointFolder::rank_name(int rank) { return kRank + std::to_string(rank); }

/// All steps that have a folder, complete or not, ascending.
std::vector<std::uint64_t> CheckpointFolder::all_steps() const {
  std::vector<std::uint64_t> found;
  std::error_code error;
  fs::directory_iterator entries(path_, error);
  if (error == std::errc::no_such_file_or_directory) return found;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (!name.starts_with(kStep)) continue;
    const auto step = digits(std::string_view(name).substr(kStep.size()));
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
  throw CheckpointError("cannot save step " + std::to_string(step) + " in " + path_.string() +
                        ", which has a checkpoint of step " + std::to_string(*last) +
                        ", and that would stay the newest; load it first, save in another folder, "
                        "or load an older one and allow the newer ones to be replaced "
                        "(replace_newer)");
}

void CheckpointFolder::begin(std::uint64_t step, std::optional<std::uint64_t> loaded) {
  make_folder_durably(path_, calls_);
  if (!lock_) lock_ = std::make_shared<FolderLock>(path_);
  try {
    require_newest(step, loaded);
    // Leftover files are harmless: no manifest names them, or a later save overwrites them.
    if (is_there(folder_of(step))) remove(step);
    make_folder(folder_of(step), calls_);
  } catch (...) {
    lock_.reset();
    throw;
  }
}

Manifest::File CheckpointFolder::write(std::uint64_t step, const std::string& name,
                                       const ByteSource& source) {
  return {name, write_durably(folder_of(step) / name, source, calls_)};
}

/// Compares the sizes only. Reading a file compares its checksum.
void CheckpointFolder::check_sizes(const Manifest& manifest) const {
  for (const Manifest::File& file : manifest.files) {
    const fs::path path = folder_of(manifest.step) / file.name;
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error) {
      throw CheckpointError("checkpoint of step " + std::to_string(manifest.step) + ": " +
                            path.string() + " is missing (" + error.message() +
                            "); all ranks must see one folder, on a file system that they share");
    }
    if (bytes != file.contents.bytes) {
      throw CheckpointError(path.string() + " is damaged: expected " +
                            std::to_string(file.contents.bytes) + " bytes, got " +
                            std::to_string(bytes) + "; load an older checkpoint");
    }
  }
}

std::string CheckpointFolder::commit(const Manifest& manifest,
                                     std::optional<std::uint64_t> loaded) {
  check_sizes(manifest);
  sync_folder(path_, calls_);  // for the name of the step's folder
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

/// Removes the manifest first, durably, so that a checkpoint without some file is never complete.
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
    for (const std::uint64_t other : steps()) there += ' ' + std::to_string(other);
    throw CheckpointError("there is no complete checkpoint of step " + std::to_string(step) +
                          " in " + path_.string() + ", which has those of steps:" + there);
  }
  Manifest manifest = Manifest::decode(read_file(path, calls_), path.string());
  if (manifest.step != step) {
    throw CheckpointError(path.string() + ": expected step " + std::to_string(step) +
                          ", got step " + std::to_string(manifest.step) +
                          "; was the folder renamed?");
  }
  check_sizes(manifest);
  return manifest;
}

std::string CheckpointFolder::read(std::uint64_t step, const Manifest::File& file) const {
  return read_file(folder_of(step) / file.name, file.contents, calls_);
}

}  // namespace hvd::libtorch
