#include "trainer/training_log.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::libtorch {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* action) {
  const int error = errno;
  throw Error(text("the training log ", path.native(), " cannot be ", action,
                   error == 0 ? "" : ": ", error == 0 ? "" : std::strerror(error)));
}

/// CRC-32C (Castagnoli), which the TFRecord format requires; zlib uses another polynomial.
std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> entries{};
    for (std::uint32_t i = 0; i < entries.size(); ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0);
      entries[i] = crc;
    }
    return entries;
  }();
  std::uint32_t crc = ~0U;
  for (const char byte : bytes)
    crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

/// A number's bytes, lowest first.
template <class Number>
std::string little_endian(Number number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof number; ++i) {
    bytes += static_cast<char>((number >> (8 * i)) & 0xff);
  }
  return bytes;
}

/// The checksum of a part of a TFRecord, masked as the format requires: rotated, plus a constant.
std::string masked_checksum(std::string_view bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xa282ead8U);
}

// Protocol Buffers' encoding: https://protobuf.dev/programming-guides/encoding

std::string varint(std::uint64_t number) {
  std::string bytes;
  for (; number > 0x7f; number >>= 7) bytes += static_cast<char>((number & 0x7f) | 0x80);
  return bytes += static_cast<char>(number);
}
std::string tag(int field, int wire_type) {
  return varint(static_cast<std::uint64_t>(field << 3 | wire_type));
}
std::string varint_field(int field, std::int64_t number) {
  return tag(field, 0) + varint(static_cast<std::uint64_t>(number));
}
std::string double_field(int field, double number) {
  return tag(field, 1) + little_endian(std::bit_cast<std::uint64_t>(number));
}
std::string float_field(int field, float number) {
  return tag(field, 5) + little_endian(std::bit_cast<std::uint32_t>(number));
}
std::string bytes_field(int field, std::string_view bytes) {
  return tag(field, 2) + varint(bytes.size()) + std::string(bytes);
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Encodes Event.wall_time and Event.step.
std::string event_head(std::int64_t step) {
  return double_field(1, seconds_since_1970()) + varint_field(2, step);
}

/// The step of a line of log.csv and of log.jsonl; nullopt if the line has none.
std::optional<std::int64_t> csv_step(const std::string& line) {
  return parse_number<std::int64_t>(std::string_view(line).substr(0, line.find(',')));
}
std::optional<std::int64_t> json_step(const std::string& line) {
  const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
  if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) {
    return std::nullopt;
  }
  return object["step"].get<std::int64_t>();
}

/// Removes the lines of `first_step` and later steps from the log's end, and an incomplete line.
void cut_log(const std::filesystem::path& path, std::int64_t first_step,
             std::optional<std::int64_t> (*step_of)(const std::string&)) {
  if (!std::filesystem::is_regular_file(path)) return;
  std::ifstream in(path, std::ios::binary);
  std::uintmax_t keep = 0;
  for (std::string line; std::getline(in, line) && !in.eof();) {
    const std::optional<std::int64_t> step = step_of(line);
    if (step && *step >= first_step) break;
    keep += line.size() + 1;
  }
  std::error_code error;
  std::filesystem::resize_file(path, keep, error);
  if (error)
    throw Error(text("the training log ", path.native(), " cannot be cut: ", error.message()));
}

}  // namespace

TensorBoardFile::TensorBoardFile(const std::filesystem::path& folder, std::int64_t first_step) {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host.front() = 'x';
  const auto now = static_cast<std::int64_t>(seconds_since_1970());
  int number = 0;
  do {
    path_ =
        folder / text("events.out.tfevents.", now, ".", host.data(), ".", getpid(), ".", number++);
  } while (std::filesystem::exists(path_));
  file_.open(path_, std::ios::binary);
  append(double_field(1, seconds_since_1970()) + bytes_field(3, "brain.Event:2"));
  const std::string session_start = varint_field(1, 1);  // SessionLog.status = START
  if (first_step > 0) append(event_head(first_step) + bytes_field(7, session_start));
}

void TensorBoardFile::append(std::string_view event) {
  const std::string length = little_endian(static_cast<std::uint64_t>(event.size()));
  errno = 0;
  file_ << length << masked_checksum(length) << event << masked_checksum(event) << std::flush;
  if (!file_) fail(path_, "written");
}

void TensorBoardFile::write(std::int64_t step, const std::map<std::string, double>& values) {
  std::string summary;
  for (const auto& [name, value] : values) {
    summary += bytes_field(1, bytes_field(1, name) + float_field(2, static_cast<float>(value)));
  }
  append(event_head(step) + bytes_field(5, summary));
}

TrainingLog::TrainingLog(const std::filesystem::path& folder, const std::vector<std::string>& kinds,
                         std::int64_t first_step) {
  const auto open = [&](const char* name, auto step_of) {
    auto file = std::make_unique<LineFile>();
    file->path = folder / name;
    cut_log(file->path, first_step, step_of);
    errno = 0;
    file->stream.open(file->path, std::ios::binary | std::ios::app);
    if (!file->stream) fail(file->path, "opened");
    return file;
  };
  for (const std::string& kind : kinds) {
    if (kind == "csv") {
      csv_ = open("log.csv", csv_step);
      if (csv_->stream.tellp() == 0) csv_->stream << "step,epoch,name,value\n";
    } else if (kind == "json") {
      json_ = open("log.jsonl", json_step);
    } else if (kind == "tensorboard") {
      tensorboard_ = std::make_unique<TensorBoardFile>(folder, first_step);
    }
  }
}

void TrainingLog::write(std::int64_t step, double epoch,
                        const std::map<std::string, double>& values) {
  errno = 0;
  if (csv_) {
    for (const auto& [name, value] : values) {
      csv_->stream << text(step, ",", epoch, ",", name, ",", value, "\n");
    }
    if (!csv_->stream.flush()) fail(csv_->path, "written");
  }
  if (json_) {
    nlohmann::ordered_json object = {{"step", step}, {"epoch", epoch}};
    for (const auto& [name, value] : values) object[name] = value;
    json_->stream << object.dump() << '\n';
    if (!json_->stream.flush()) fail(json_->path, "written");
  }
  if (tensorboard_) tensorboard_->write(step, values);
}

}  // namespace hvd::libtorch
