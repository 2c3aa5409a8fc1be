#include "bootstrap/messages.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include "base/sha256.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::rendezvous {

void check(const RankInfo& own) {
  if (own.size > kMaxRanks) {
    throw UsageError(text("hvd::init: expected a world size of at most ", kMaxRanks, ", got ",
                          own.size, " on rank ", own.rank));
  }
  for (const auto& [name, value] : {std::pair("HVD_JOB_NAME", std::string_view(own.job)),
                                    std::pair("HVD_JOB_TOKEN", std::string_view(own.token))}) {
    if (value.size() <= kMaxNameBytes) continue;
    throw UsageError(text("hvd::init: ", name, ": expected at most ", kMaxNameBytes, " bytes, got ",
                          value.size(), " on rank ", own.rank));
  }
  if (own.size >= 1 && own.rank >= 0 && own.rank < own.size) return;
  throw UsageError(text("hvd::init: expected a rank from 0 to ", own.size - 1,
                        " (the world size is ", own.size, "), got ", own.rank));
}

std::string short_name(const std::string& job) {
  constexpr std::size_t kLongest = 64;
  return job.size() > kLongest ? hmac_hex("", job).substr(0, 32) : job;
}

namespace {

/// The words for Refusal::Kind.
constexpr const char* kKinds[] = {"failed", "usage", "lost"};

/// Whether /proc shows the processes of this pid namespace, and their start times are therefore
/// valid.
bool sees_own_processes() {
  char link[32] = {};
  return ::readlink("/proc/self", link, sizeof link - 1) > 0 && link == text(::getpid());
}

}  // namespace

ProcessInfo this_process() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  const ProcessIdentity process = current_process();
  return {.host = host,
          .boot = boot_id(),
          .pid = process.pid,
          .start_time = sees_own_processes() ? process.start_time : 0,
          .pid_namespace = process.pid_namespace};
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 256;
  std::string shown(text.substr(0, kMaxShown));
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  return shown;
}

std::string to_string(const ProcessInfo& process) {
  return text("host ", printable(process.host), ", process ", process.pid);
}

std::string encode(const ProcessInfo& process) {
  return text_of(join_fields({process.host, process.boot, text(process.pid),
                              text(process.start_time), text(process.pid_namespace)}));
}

std::optional<ProcessInfo> decode_process(std::string_view bytes) {
  auto fields = split_fields(std::as_bytes(std::span(bytes)), 5);
  if (!fields) return std::nullopt;
  const auto pid = parse_number<std::int64_t>((*fields)[2]);
  const auto start_time = parse_number<std::uint64_t>((*fields)[3]);
  const auto pid_namespace = parse_number<std::uint64_t>((*fields)[4]);
  if (!pid || !start_time || !pid_namespace) return std::nullopt;
  return ProcessInfo{.host = std::move((*fields)[0]),
                     .boot = std::move((*fields)[1]),
                     .pid = *pid,
                     .start_time = *start_time,
                     .pid_namespace = *pid_namespace};
}

ProcessWatch watch(const ProcessInfo& process) {
  if (process.boot.empty() || process.boot != boot_id()) return {};
  return ProcessWatch({.pid = process.pid,
                       .start_time = sees_own_processes() ? process.start_time : 0,
                       .pid_namespace = process.pid_namespace});
}

Refusal Refusal::of(const std::exception& cause) {
  const auto* const loss = dynamic_cast<const PeerLostError*>(&cause);
  if (loss != nullptr && loss->rank() >= 0) return lost(loss->rank(), cause.what());
  return {.text = cause.what()};
}

void Refusal::raise() const {
  if (kind == Kind::kUsage) throw UsageError(text);
  if (kind == Kind::kLost) throw PeerLostError(text, rank);
  throw Error(text);
}

Bytes encode(const Refusal& refusal) {
  return join_fields(
      {kKinds[static_cast<std::size_t>(refusal.kind)], hvd::text(refusal.rank), refusal.text});
}

std::optional<Refusal> decode_refusal(std::span<const std::byte> bytes) {
  auto fields = split_fields(bytes, 3);
  const auto rank = fields ? parse_number<int>((*fields)[1]) : std::nullopt;
  if (!rank) return std::nullopt;
  const auto kind = std::find(std::begin(kKinds), std::end(kKinds), fields->front());
  if (kind == std::end(kKinds)) return std::nullopt;
  return Refusal{static_cast<Refusal::Kind>(kind - std::begin(kKinds)), *rank,
                 std::move((*fields)[2])};
}

Refusal decode_failure(std::span<const std::byte> bytes) {
  return decode_refusal(bytes).value_or(Refusal{.text = printable(text_of(bytes))});
}

Bytes join_fields(std::span<const std::string> fields) {
  std::size_t total = 0;
  for (const std::string& field : fields) total += sizeof(std::uint32_t) + field.size();
  Bytes bytes;
  bytes.reserve(total);
  for (const std::string& field : fields) {
    const auto size = static_cast<std::uint32_t>(field.size());
    const auto head = std::as_bytes(std::span(&size, 1));
    const auto body = bytes_of(field);
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.insert(bytes.end(), body.begin(), body.end());
  }
  return bytes;
}

std::optional<std::span<const std::byte>> read_field(std::span<const std::byte>& bytes) {
  std::uint32_t size = 0;
  if (bytes.size() < sizeof size) return std::nullopt;
  std::memcpy(&size, bytes.data(), sizeof size);
  if (bytes.size() - sizeof size < size) return std::nullopt;
  const auto field = bytes.subspan(sizeof size, size);
  bytes = bytes.subspan(sizeof size + size);
  return field;
}

std::optional<std::vector<std::string>> split_fields(std::span<const std::byte> bytes,
                                                     std::size_t count) {
  std::vector<std::string> fields;
  while (fields.size() < count) {
    const auto field = read_field(bytes);
    if (!field) return std::nullopt;
    fields.push_back(text_of(*field));
  }
  if (!bytes.empty()) return std::nullopt;
  return fields;
}

std::string proof(const std::string& token, std::initializer_list<std::string> fields) {
  return hmac_hex(token, text_of(join_fields(fields)));
}

std::string random_id() {
  std::random_device random;
  std::string id;
  for (int word = 0; word < 4; ++word) {
    char hex[9];
    std::snprintf(hex, sizeof hex, "%08x", random());
    id += hex;
  }
  return id;
}

}  // namespace hvd::rendezvous
