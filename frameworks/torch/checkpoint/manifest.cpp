#include "checkpoint/manifest.h"

#include <charconv>
#include <optional>
#include <sstream>
#include <system_error>
#include <vector>

#include "checkpoint/durable_file.h"
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

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return parts;
}

template <class Number>
std::optional<Number> number(std::string_view text, int base = 10) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The values of a line "KEY VALUE ..." that has `values` of them; empty for any other line.
std::vector<std::string_view> values_of(std::string_view line, std::string_view key,
                                        std::size_t values) {
  std::vector<std::string_view> words = split(line, ' ');
  if (words.size() != values + 1 || words.front() != key) return {};
  words.erase(words.begin());
  return words;
}

std::optional<Manifest::File> file_of(std::string_view line) {
  auto words = values_of(line, "file", 3);
  if (words.empty()) words = values_of(line, "file", 4);
  if (words.empty()) return std::nullopt;
  const auto bytes = number<std::uint64_t>(words[1]);
  const auto checksum = number<std::uint32_t>(words[2], 16);
  const auto share = words.size() == 4 ? number<std::uint64_t>(words[3]) : 0;
  // A name with a slash would lead out of the checkpoint's folder.
  if (!bytes || !checksum || !share || words[0].find('/') != std::string_view::npos)
    return std::nullopt;
  if (*share > *bytes) return std::nullopt;
  return Manifest::File{std::string(words[0]), {*bytes, *checksum}, *share};
}

/// Checked before anything else, since other versions may differ in all that follows.
void check_version(const std::vector<std::string_view>& lines, const std::string& where) {
  const auto words = lines.empty() ? lines : values_of(lines.front(), kTitle, 1);
  const auto version = words.empty() ? std::nullopt : number<int>(words.front());
  if (!version)
    throw CheckpointError(where + " is not the manifest of a checkpoint, or is damaged");
  if (*version < 1 || *version > kNewestVersion) {
    throw CheckpointError(where + ": expected a checkpoint of version 1 to " +
                          std::to_string(kNewestVersion) + ", got version " +
                          std::to_string(*version) + "; load it with the hvd that wrote it");
  }
}

}  // namespace

std::uint64_t Manifest::shared_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const File& file : files) sum += file.share;
  return sum;
}

std::string Manifest::encode() const {
  std::ostringstream text;
  text << kTitle << ' ' << (shared_bytes() > 0 ? 2 : 1) << "\nstep " << step << '\n';
  for (const File& file : files) {
    text << "file " << file.name << ' ' << file.contents.bytes << ' '
         << hexadecimal(file.contents.checksum);
    if (file.share > 0) text << ' ' << file.share;
    text << '\n';
  }
  const std::string body = std::move(text).str();
  return body + "checksum " + hexadecimal(crc32(body)) + '\n';
}

Manifest Manifest::decode(std::string_view text, const std::string& where) {
  const auto lines = split(text, '\n');
  check_version(lines, where);
  const CheckpointError damaged(where + " is damaged; load an older checkpoint");
  constexpr std::size_t kFewest = 5;  // version, step, common, one rank, checksum
  if (lines.size() < kFewest || text.back() != '\n') throw damaged;
  const auto last = values_of(lines.back(), "checksum", 1);
  const auto checksum = last.empty() ? std::nullopt : number<std::uint32_t>(last.front(), 16);
  const auto body = text.substr(0, static_cast<std::size_t>(lines.back().data() - text.data()));
  if (!checksum || *checksum != crc32(body)) throw damaged;

  Manifest manifest;
  const auto step = values_of(lines[1], "step", 1);
  const auto step_number = step.empty() ? std::nullopt : number<std::uint64_t>(step.front());
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

}  // namespace hvd::libtorch
