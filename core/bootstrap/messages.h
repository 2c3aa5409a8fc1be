#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process_watch.h"

/// The values that ranks, servers and hvdrun send each other while the ranks find each other.
namespace hvd::rendezvous {

using Bytes = std::vector<std::byte>;

/// Describes a rank and the job that it expects to join. A rank whose job, token, size or build
/// differ from those of rank 0 is refused.
struct RankInfo {
  std::string job = {};    ///< HVD_JOB_NAME
  std::string token = {};  ///< HVD_JOB_TOKEN, a secret of the job: never sent, stored or printed
  std::string build = {};  ///< version and build of hvd
  int rank = 0;
  int size = 1;
};

inline constexpr int kMaxRanks = 1'000'000;
/// Limit of a job's name, and of its token.
inline constexpr std::size_t kMaxNameBytes = 4096;
/// Limit of a time in a message. It is longer than any timeout, and short enough that adding it to
/// the time does not overflow.
inline constexpr std::int64_t kMaxMilliseconds = std::int64_t{1} << 40;

/// @throws UsageError for a rank that is not below the size, and above the limits
void check(const RankInfo&);

/// The name of a job for keys and files, which must be short: a long name is replaced by its hash.
std::string short_name(const std::string& job);

/// The beginning of a text from an untrusted process, made printable for an error text.
std::string printable(std::string_view text);

/// A process of a rank, as other hosts see it.
struct ProcessInfo {
  std::string host = {};
  std::string boot = {};  ///< boot id of its host; empty: unknown
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< distinguishes processes with the same pid; 0: unknown
  std::uint64_t pid_namespace = 0;
};
ProcessInfo this_process();
/// Text for users: "host node7, process 1234".
std::string to_string(const ProcessInfo&);
std::string encode(const ProcessInfo&);
std::optional<ProcessInfo> decode_process(std::string_view);
/// Watches the process if it is on this host and in this pid namespace. The end of any other
/// process is not detected.
ProcessWatch watch(const ProcessInfo&);

/// The reason why a rank or a whole job does not begin, in a form that can be sent.
struct Refusal {
  enum class Kind : std::uint8_t {
    kOther,  ///< Error
    kUsage,  ///< UsageError: the ranks contradict each other
    kLost,   ///< PeerLostError
  };
  Kind kind = Kind::kOther;
  int rank = -1;  ///< the lost rank; -1: several ranks or no rank
  std::string text = {};

  static Refusal usage(std::string text) { return {Kind::kUsage, -1, std::move(text)}; }
  static Refusal lost(int rank, std::string text) { return {Kind::kLost, rank, std::move(text)}; }
  /// The reason that the other ranks receive when this rank fails: the loss of a rank, or otherwise
  /// an Error, because a UsageError concerns this rank only.
  static Refusal of(const std::exception&);

  [[noreturn]] void raise() const;
};
Bytes encode(const Refusal&);
std::optional<Refusal> decode_refusal(std::span<const std::byte>);
/// Decodes the value of R/outcome of a run that has failed, which any process may have stored:
/// invalid bytes become the text of an Error.
Refusal decode_failure(std::span<const std::byte>);

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Encodes texts one after the other, each preceded by its length.
Bytes join_fields(std::span<const std::string>);
inline Bytes join_fields(std::initializer_list<std::string> fields) {
  return join_fields(std::span(fields.begin(), fields.size()));
}
/// Removes the first field from the bytes and returns it. Empty if they do not begin with a whole
/// field.
std::optional<std::span<const std::byte>> read_field(std::span<const std::byte>& bytes);
/// Empty if the bytes are not exactly `count` fields.
std::optional<std::vector<std::string>> split_fields(std::span<const std::byte>, std::size_t count);

/// Proves that the sender has the token without revealing it: an HMAC-SHA-256 of the fields.
/// @param fields the first is a label, so that a proof for one purpose does not serve another
std::string proof(const std::string& token, std::initializer_list<std::string> fields);
/// 128 random bits as 32 hexadecimal digits.
std::string random_id();

}  // namespace hvd::rendezvous
