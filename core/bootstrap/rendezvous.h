#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "hvd/store.h"

/// Lets the ranks of a job find each other without MPI. It carries no messages; the ranks use it to
/// exchange the addresses that messages need.
namespace hvd::rendezvous {

using Bytes = std::vector<std::byte>;

/// Describes a rank and the job that it expects to join. A rank whose job, token, size or build
/// differ from those of rank 0 is refused.
struct RankInfo {
  std::string job = {};    ///< HVD_JOB_NAME
  std::string token = {};  ///< HVD_JOB_TOKEN, a secret of the job: never in an error text
  std::string build = {};  ///< version and build of hvd
  int rank = 0;
  int size = 1;
};

/// @throws UsageError for a rank that is not below the size, a size above 1,000,000, and a name or
/// token of the job above 4 KiB
void check(const RankInfo&);

/// The reason why a job does not begin.
struct Failure {
  std::string reason = {};
  std::optional<int> lost = {};  ///< a lost rank: the others throw PeerLostError; else Error
};

/// A place where each rank of a job stores values for the others. All ranks have joined once the
/// object exists.
///
/// Not thread-safe. Every call waits until a deadline at most, and throws hvd::Error when the place
/// itself fails.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// For error texts: "file:///shared/job".
  virtual const std::string& place() const noexcept = 0;

  /// Stores a value for all ranks. @throws hvd::Error when the key has a value already
  virtual void put(std::string_view key, std::span<const std::byte> value) = 0;
  /// Empty if no value has been stored yet.
  virtual std::optional<Bytes> get(std::string_view key) = 0;
  /// Waits for a value; empty once the deadline has passed.
  /// @param from the rank that stores it
  /// @throws PeerLostError if that rank's process ends before it stores the value
  /// @throws hvd::Error with the reason when a rank has failed
  virtual std::optional<Bytes> wait(std::string_view key, int from, Deadline) = 0;

  /// Every rank contributes `mine`, and receives the parts of all in rank order. Collective.
  /// @param what names the exchange; must differ from that of earlier ones
  /// @throws PeerLostError when a rank has not contributed by the deadline; else as wait()
  virtual std::vector<Bytes> exchange(std::string_view what, std::span<const std::byte> mine,
                                      Deadline);

  /// Ends all current and later waits of all ranks with this reason. Only the first call counts.
  virtual void fail(const Failure&) noexcept = 0;
  /// Ends this rank's use of the values. Rank 0 waits for the other ranks and then cleans up.
  virtual void leave(Deadline) noexcept = 0;
  /// Whether this object has to exist after leave(), for as long as the rank is in the job. Another
  /// process that joins as the same rank in the meantime is then refused.
  virtual bool stays_connected() const noexcept { return false; }

 protected:
  /// Throws the error for a rank that has joined but has not contributed to an exchange.
  [[noreturn]] void throw_absent(std::string_view what, int rank) const;
};

/// Joins the other ranks.
/// @param init_method "tcp://HOST:PORT", which rank 0 serves; "file:///path", a file that all ranks
/// can write to; or "hvdrun://NAME", which hvdrun sets
/// @throws UsageError for any other method, and when ranks contradict each other
/// @throws PeerLostError when ranks have not joined by the deadline; the text names them
std::unique_ptr<Rendezvous> join(const std::string& init_method, const RankInfo&, Deadline);

/// Joins in a store that all ranks reach. It may hold values of earlier jobs.
std::unique_ptr<Rendezvous> join_in_store(KeyValueStore, const RankInfo&, Deadline);
/// Joins in a file of a folder that all ranks share. It relies only on what POSIX guarantees of
/// link() and rename(), so NFS works.
/// @param path absolute. Files beside it whose names begin with it belong to hvd, too
std::unique_ptr<Rendezvous> join_in_file(const std::string& path, const RankInfo&, Deadline);
/// Joins at a port that rank 0 serves, in a thread, until its Rendezvous is destroyed. The other
/// ranks retry until they reach it.
/// @throws UsageError also when this build has no Asio, and when rank 0 cannot bind the port
std::unique_ptr<Rendezvous> join_at_port(const std::string& host, std::uint16_t port,
                                         const RankInfo&, Deadline);
/// Joins through hvdrun: this process's supervisor forwards its requests to hvdrun, which serves
/// them.
/// @param socket the supervisor's, in the abstract namespace of this host
/// @throws UsageError also when no supervisor listens there
std::unique_ptr<Rendezvous> join_through_hvdrun(const std::string& socket, const RankInfo&,
                                                Deadline);

}  // namespace hvd::rendezvous
