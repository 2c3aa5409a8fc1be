#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rendezvous/rendezvous.h"

namespace hvd::rendezvous {

/// Why ranks may not begin, in a form that travels.
struct Refusal {
  bool usage = false;  ///< the ranks contradict each other: UsageError; else PeerLostError
  int rank = -1;       ///< the lost one
  std::string text = {};

  [[noreturn]] void raise() const;
};

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Texts, one after the other, as bytes.
Bytes join_fields(const std::vector<std::string>& fields);
/// Nothing when the bytes are not `count` fields.
std::optional<std::vector<std::string>> split_fields(std::span<const std::byte>, std::size_t count);

Bytes encode(const Refusal&);
std::optional<Refusal> decode_refusal(std::span<const std::byte>);

/// A rank that has come: what it says of itself, and who it is.
struct Arrival {
  Introduction introduction = {};
  std::string identity = {};  ///< one process, and no other: "host 1234 5f0c..."
  /// "host host, process 1234"
  std::string who() const;
};
Bytes encode(const Arrival&);
std::optional<Arrival> decode_arrival(std::span<const std::byte>);
/// Of this process, new with each call.
std::string make_identity();

/// As it travels, and as whoever waits gets it.
Bytes encode(const Failure&);
[[noreturn]] void raise_failure(std::span<const std::byte>);
/// One look of whoever waits: the value, or nothing yet; else raises the failure that has come.
std::optional<Bytes> look_for(const std::function<std::optional<Bytes>()>& value,
                              const std::function<std::optional<Bytes>()>& failure);

/// What rank 0 has against one that has come; nothing: it is welcome.
std::optional<Refusal> object_to(const Arrival&, const Introduction& of_rank_0,
                                 const std::string& place);
/// When rank 0 has to give up, so that the others hear why before their own deadline, which is
/// likely to be the same.
Deadline time_to_refuse(Deadline deadline);
/// Of ranks that have not come in time.
Refusal missing(const std::vector<int>& ranks, const std::string& place);

}  // namespace hvd::rendezvous
