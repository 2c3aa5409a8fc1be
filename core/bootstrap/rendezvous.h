#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

/// How the ranks of a job find each other where nothing else has done so. It carries no messages:
/// what it exchanges is what messages need.
namespace hvd::rendezvous {

using Bytes = std::vector<std::byte>;

/// Who comes. A rank whose job, token, size or build differ from those of rank 0 is refused.
struct Introduction {
  std::string job = {};    ///< its name
  std::string token = {};  ///< what only its ranks know; empty: nothing. In no message
  std::string build = {};  ///< version and build of hvd
  int rank = 0;
  int size = 1;
};

/// @throws UsageError for a rank that is not below the size, a size above 1,000,000, and a name or
/// token of the job above 4 KiB
void check(const Introduction&);

/// Why a job does not begin.
struct Failure {
  std::string reason = {};
  std::optional<int> lost = {};  ///< the rank: the others get a PeerLostError; else an Error
};

/// A place where each rank of a job puts what the others need, and finds what they have put. All
/// ranks are there once the object has been made.
///
/// Not thread-safe. Everything waits until a deadline at most, and throws hvd::Error when the place
/// itself fails.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// For messages: "file:///shared/job".
  virtual const std::string& place() const noexcept = 0;

  /// Other ranks find it from then on. @throws hvd::Error when there is something under that key
  virtual void put(std::string_view key, std::span<const std::byte> value) = 0;
  /// Nothing where nothing has been put yet.
  virtual std::optional<Bytes> get(std::string_view key) = 0;
  /// Waits for what is put under that key; nothing when the deadline has passed. @throws hvd::Error
  /// with the reason when a rank has failed
  /// @param from the rank that puts it. @throws PeerLostError where its end is seen first
  virtual std::optional<Bytes> wait(std::string_view key, int from, Deadline) = 0;

  /// Every rank contributes `mine`, and gets what all have, in rank order. Collective.
  /// @param what names the exchange: another one each time
  /// @throws PeerLostError when a rank's part has not come by the deadline; as wait()
  virtual std::vector<Bytes> exchange(std::string_view what, std::span<const std::byte> mine,
                                      Deadline);

  /// Whoever waits, or will, gets this reason. Only the first is kept.
  virtual void fail(const Failure&) noexcept = 0;
  /// This rank has found all it needs. Rank 0 waits for the others and tidies up.
  virtual void leave(Deadline) noexcept = 0;
  /// After leave(): whether this object has to stay for as long as the rank is in the job. Where it
  /// does, another process that begins as the same rank meanwhile is refused.
  virtual bool stays() const noexcept { return false; }

 protected:
  /// Of a rank that has come, and has not said its part of an exchange.
  [[noreturn]] void throw_absent(std::string_view what, int rank) const;
};

/// Meets the other ranks.
/// @param init_method "tcp://HOST:PORT", which rank 0 serves, "file:///path": a file that all ranks
/// can write to, or "hvdrun://NAME", which hvdrun sets
/// @throws UsageError when it is none of these, and when ranks contradict each other
/// @throws PeerLostError which names ranks that have not come by the deadline
std::unique_ptr<Rendezvous> meet(const std::string& init_method, const Introduction&, Deadline);

}  // namespace hvd::rendezvous
