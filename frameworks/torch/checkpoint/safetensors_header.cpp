#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {
namespace {

using nlohmann::json;

struct TypeTraits {
  std::string_view name;
  unsigned bits;
};
constexpr std::array<TypeTraits, 20> kTypes{
    {{"BOOL", 8},    {"F4", 4},      {"U8", 8},          {"I8", 8},          {"F8_E5M2", 8},
     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
     {"U16", 16},    {"F16", 16},    {"BF16", 16},       {"I32", 32},        {"U32", 32},
     {"F32", 32},    {"C64", 64},    {"F64", 64},        {"I64", 64},        {"U64", 64}}};
static_assert(kTypes.size() == static_cast<std::size_t>(SafetensorsType::kU64) + 1);

constexpr std::size_t kLengthBytes = 8;
constexpr std::string_view kMetadataName = "__metadata__";

/// The bytes of a tensor; empty if they are not a whole number or do not fit in 63 bits.
std::optional<std::uint64_t> bytes_of(const SafetensorsEntry& entry) {
  constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 62;
  std::uint64_t elements = 1;
  bool empty = false;
  for (const std::uint64_t dim : entry.shape) {
    empty = empty || dim == 0;
    if (dim == 0) continue;
    if (dim > kMaxSize / elements) return std::nullopt;  // also refused if the tensor is empty
    elements *= dim;
  }
  if (empty) return 0;
  const unsigned bits = kTypes[static_cast<std::size_t>(entry.type)].bits;
  if (bits < 8)
    return elements % (8 / bits) == 0 ? std::optional(elements * bits / 8) : std::nullopt;
  if (elements > kMaxSize / (bits / 8)) return std::nullopt;
  return elements * (bits / 8);
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  return text('[', join_text(shape, ","), ']');
}

/// Receives the parts of a header from nlohmann's parser, which reports them in order and keeps no
/// tree. Stops at the first part that the format does not allow, so the nesting depth is bounded.
class HeaderEvents {
 public:
  explicit HeaderEvents(SafetensorsHeader& header) : header_(header) {}

  /// Why the header is refused; empty unless it is.
  const std::string& complaint() const { return complaint_; }

  bool null() {
    // The Python package reads this as no metadata.
    return (level_ == Level::kHeader && key_ == kMetadataName) || scalar("null");
  }
  bool boolean(bool /*value*/) { return scalar("a truth value"); }
  bool number_integer(std::int64_t value) { return scalar(text("the number ", value)); }
  bool number_float(double /*value*/, const std::string& digits) {
    return scalar(text("the number ", digits.substr(0, kMaxDigits)));
  }
  bool binary(json::binary_t& /*value*/) { return scalar("bytes"); }

  bool number_unsigned(std::uint64_t value) {
    if (level_ == Level::kShape) {
      if (entry_.shape.size() == SafetensorsHeader::kMaxDims) {
        return refuse(text("tensor ", printable(entry_.name), " has more than ",
                           SafetensorsHeader::kMaxDims, " dimensions"));
      }
      entry_.shape.push_back(value);
      return true;
    }
    if (level_ == Level::kOffsets) {
      if (offsets_ == 2) return refuse_offsets();
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return scalar(text("the number ", value));
  }

  bool string(std::string& value) {
    if (level_ == Level::kMetadata) {
      header_.metadata.emplace(key_, std::move(value));
      return true;
    }
    if (level_ != Level::kTensor || key_ != "dtype")
      return scalar("the string " + printable(value));
    const auto found = std::find_if(kTypes.begin(), kTypes.end(),
                                    [&](const TypeTraits& type) { return type.name == value; });
    if (found == kTypes.end()) {
      return refuse(text("tensor ", printable(entry_.name), " has the dtype ", printable(value),
                         ", which LibTorch does not have"));
    }
    entry_.type = static_cast<SafetensorsType>(found - kTypes.begin());
    return true;
  }

  bool start_object(std::size_t /*size*/) {
    if (level_ == Level::kFile) return enter(Level::kHeader);
    if (level_ != Level::kHeader) return mismatch("an object");
    members_.clear();
    if (key_ == kMetadataName) return enter(Level::kMetadata);
    entry_ = {};
    entry_.name = key_;
    offsets_ = 0;
    return enter(Level::kTensor);
  }
  bool end_object() {
    if (level_ == Level::kTensor && !end_tensor()) return false;
    return enter(level_ == Level::kHeader ? Level::kFile : Level::kHeader);
  }

  bool start_array(std::size_t /*size*/) {
    if (level_ == Level::kTensor && key_ == "shape") return enter(Level::kShape);
    if (level_ == Level::kTensor && key_ == "data_offsets") return enter(Level::kOffsets);
    return mismatch("an array");
  }
  bool end_array() {
    if (level_ == Level::kOffsets && offsets_ != 2) return refuse_offsets();
    return enter(Level::kTensor);
  }

  bool key(std::string& value) {
    auto& known = level_ == Level::kHeader ? names_ : members_;
    if (!known.insert(value).second) {
      return refuse(text("the name ", printable(value), " occurs twice",
                         level_ == Level::kTensor ? " in tensor " + printable(entry_.name) : ""));
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const json::exception& /*error*/) {
    return refuse(text("the header is not JSON in UTF-8 at byte ", kLengthBytes + position));
  }

 private:
  static constexpr std::size_t kMaxDigits = 40;
  enum class Level { kFile, kHeader, kMetadata, kTensor, kShape, kOffsets };

  bool enter(Level level) {
    level_ = level;
    return true;
  }
  bool refuse(std::string complaint) {
    complaint_ = std::move(complaint);
    return false;
  }
  bool refuse_offsets() {
    return refuse(text("tensor ", printable(entry_.name),
                       ": data_offsets: expected two numbers, got another count of them"));
  }

  /// Handles a value without parts. Ignores members of a tensor that the format does not define,
  /// like the Python package.
  bool scalar(const std::string& found) {
    const bool unknown =
        level_ == Level::kTensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets";
    return unknown || mismatch(found);
  }
  /// Refuses a value whose type the format does not allow here.
  bool mismatch(const std::string& found) {
    switch (level_) {
      case Level::kFile:
        return refuse(text("the header is ", found, ", expected an object"));
      case Level::kHeader:
        return refuse(text(printable(key_), ": expected an object, got ", found));
      case Level::kMetadata:
        return refuse(text("__metadata__: ", printable(key_), ": expected a string, got ", found));
      default:
        return refuse(text("tensor ", printable(entry_.name), ": ", printable(key_),
                           key_ == "dtype" ? ": expected a string" : ": expected whole numbers",
                           ", got ", found));
    }
  }

  bool end_tensor() {
    for (const char* const member : {"dtype", "shape", "data_offsets"}) {
      if (!members_.contains(member))
        return refuse(text("tensor ", printable(entry_.name), " has no ", member));
    }
    const auto bytes = bytes_of(entry_);
    if (!bytes || entry_.end < entry_.begin || entry_.end - entry_.begin != *bytes) {
      return refuse(text("tensor ", printable(entry_.name), " has the data_offsets ", entry_.begin,
                         " and ", entry_.end, ", but dtype ", to_string(entry_.type), " and shape ",
                         shape_text(entry_.shape), " need ",
                         bytes ? text(*bytes, " bytes") : "another number of bytes"));
    }
    header_.tensors.push_back(std::move(entry_));
    return true;
  }

  SafetensorsHeader& header_;
  std::string complaint_;
  Level level_ = Level::kFile;
  std::string key_;
  std::unordered_set<std::string> names_, members_;
  SafetensorsEntry entry_;
  int offsets_ = 0;
};

/// Sorts the tensors. Returns an error if they overlap or leave bytes out; otherwise empty.
std::string check_coverage(std::vector<SafetensorsEntry>& tensors, std::uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
    return std::tie(one.begin, one.end) < std::tie(other.begin, other.end);
  });
  std::uint64_t covered = 0;
  for (const SafetensorsEntry& entry : tensors) {
    if (entry.begin != covered) {
      return text("tensor ", printable(entry.name), " begins at byte ", entry.begin,
                  " of the data, expected ", covered,
                  entry.begin < covered ? ", so that it overlaps the tensor before it"
                                        : ", so that bytes before it belong to no tensor");
    }
    covered = entry.end;
  }
  if (covered == data_bytes) return {};
  return text("the tensors have ", covered, " bytes, but the file has ", data_bytes,
              " behind its header",
              covered > data_bytes ? "; the file is truncated" : ", which belong to no tensor");
}

}  // namespace

std::string_view to_string(SafetensorsType type) noexcept {
  return kTypes[static_cast<std::size_t>(type)].name;
}

std::string printable(std::string_view name) {
  constexpr std::size_t kMaxShown = 120;
  std::size_t shown = std::min(name.size(), kMaxShown);
  const auto continues = [&](std::size_t at) {
    return at < name.size() && (static_cast<unsigned char>(name[at]) & 0xC0U) == 0x80;
  };
  while (shown > 0 && continues(shown)) --shown;  // never cuts a character of several bytes
  std::string made(1, '\'');
  for (const char c : name.substr(0, shown))
    made += static_cast<unsigned char>(c) < ' ' || c == '\x7f' ? '?' : c;
  return made + (shown < name.size() ? "...'" : "'");
}

std::string SafetensorsHeader::encode() {
  std::sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
    return std::tie(other.type, one.name) < std::tie(one.type, other.name);
  });
  std::unordered_set<std::string_view> names;
  std::string header;
  const auto string = [](const std::string& value) {
    try {
      return json(value).dump();
    } catch (const json::exception&) {
      throw UsageError(
          text("save_safetensors: expected names and metadata in UTF-8, got ", printable(value)));
    }
  };
  const auto member = [&](const std::string& value) {
    header += text(header.empty() ? '{' : ',', value);
  };
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) pairs.push_back(string(key) + ":" + string(value));
    member(text('"', kMetadataName, "\":{", join_text(pairs, ","), '}'));
  }
  std::uint64_t next = 0;
  for (SafetensorsEntry& entry : tensors) {
    if (entry.name == kMetadataName || !names.insert(entry.name).second) {
      throw UsageError(text("save_safetensors: the name ", printable(entry.name),
                            entry.name == kMetadataName ? " is the format's own" : " occurs twice",
                            "; expected another name for each tensor"));
    }
    entry.begin = next;
    entry.end = next += bytes_of(entry).value();
    member(text(string(entry.name), ":{\"dtype\":\"", to_string(entry.type), "\",\"shape\":[",
                join_text(entry.shape, ","), "],\"data_offsets\":[", entry.begin, ',', entry.end,
                "]}"));
  }
  header += header.empty() ? "{}" : "}";
  header.resize((header.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  if (header.size() > kMaxBytes) {
    throw UsageError(text("save_safetensors: the header has ", header.size(),
                          " bytes; the format allows ", kMaxBytes,
                          ": save fewer tensors per file"));
  }
  bytes = kLengthBytes + header.size();
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return length + header;
}

SafetensorsHeader SafetensorsHeader::decode(std::string_view file, const std::string& where) {
  const auto refuse = [&](const std::string& complaint) {
    throw SafetensorsError(text(where, " is not a valid safetensors file: ", complaint));
  };
  if (file.size() < kLengthBytes)
    refuse(text("it has ", file.size(), " bytes, expected at least ", kLengthBytes));
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= std::uint64_t{static_cast<unsigned char>(file[i])} << (8 * i);
  if (length > kMaxBytes || length > file.size() - kLengthBytes) {
    refuse(text("its header has ", length, " bytes, but the file has ", file.size() - kLengthBytes,
                " behind the length, and the format allows ", kMaxBytes));
  }
  const std::string_view body = file.substr(kLengthBytes, length);
  if (!body.starts_with('{')) refuse("the header does not begin with '{'");
  SafetensorsHeader header;
  header.bytes = kLengthBytes + length;
  HeaderEvents events(header);
  // The parser takes a zero byte for the end of its input, and would accept any bytes behind it.
  const std::size_t zero = body.find('\0');
  if (zero != std::string_view::npos)
    refuse(text("the header is not JSON in UTF-8 at byte ", kLengthBytes + zero));
  if (!json::sax_parse(body.begin(), body.end(), &events)) refuse(events.complaint());
  const std::string complaint = check_coverage(header.tensors, file.size() - header.bytes);
  if (!complaint.empty()) refuse(complaint);
  return header;
}

}  // namespace hvd::libtorch
