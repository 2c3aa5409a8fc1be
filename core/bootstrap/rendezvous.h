#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/text.h"
#include "bootstrap/messages.h"
#include "bootstrap/store.h"

/// Lets the ranks of a job find each other without MPI. The ranks use it only to exchange the
/// addresses that messages need.
namespace hvd::rendezvous {

/// The parts of all ranks in one exchange, in rank order.
class Parts {
 public:
  Parts() = default;
  Parts(Parts&&) = default;
  Parts& operator=(Parts&&) = default;
  /// Empty if the bytes from `begin` on are not `count` fields (join_fields).
  static std::optional<Parts> decode(Bytes, std::size_t begin, std::size_t count);
  std::size_t size() const noexcept { return parts_.size(); }
  std::span<const std::byte> operator[](std::size_t rank) const { return parts_[rank]; }

 private:
  Bytes bytes_;
  std::vector<std::span<const std::byte>> parts_;  ///< by rank; a move keeps the bytes in place
};

/// One rank's part in the start of a job. The ranks join a run that rank 0 has begun, exchange
/// values, and leave. See Note [The protocol] in rendezvous.cpp.
///
/// Not thread-safe. Calls meet their deadlines as precisely as those of the Store, and throw
/// hvd::Error when the store fails.
class Rendezvous {
 public:
  /// Joins the other ranks. The first exchange is part of it: parts() then has all payloads.
  /// @param payload this rank's part in the first exchange
  /// @param limit the whole time until the deadline, for error texts; 0: from now on
  /// @param joined called when all have joined. If it throws, the others receive the reason. May be
  /// empty.
  /// @throws UsageError when ranks contradict each other, or this one is refused
  /// @throws PeerLostError when ranks have not joined by the deadline, or have ended; the text
  /// names them
  static std::unique_ptr<Rendezvous> join(std::unique_ptr<Store>, const RankInfo&,
                                          std::span<const std::byte> payload, Deadline,
                                          Deadline::duration limit = {},
                                          const std::function<void()>& joined = {});
  /// Begins to join. Call step() until it returns true.
  static std::unique_ptr<Rendezvous> begin(std::unique_ptr<Store>, const RankInfo&,
                                           std::span<const std::byte> payload, Deadline,
                                           Deadline::duration limit = {});
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  virtual ~Rendezvous();

  int rank() const noexcept { return own_.rank; }
  int size() const noexcept { return own_.size; }
  /// For error texts: "file:///shared/job".
  const std::string& url() const noexcept { return url_; }
  /// The id that rank 0 has drawn for this start of the job, equal on every rank that has joined.
  const std::string& run() const noexcept { return run_; }

  /// Whether a further exchange follows. The last one either succeeds on all ranks or fails on all
  /// of them with the same reason, unless rank 0 or the store is lost.
  enum class Turn : bool { kInner, kLast };

  /// Begins the next exchange, in which each rank contributes a part. Collective.
  /// @param what names it in error texts
  virtual void contribute(const std::string& what, std::span<const std::byte> mine, Deadline,
                          Turn = Turn::kInner) = 0;
  /// Continues to join or to exchange until the deadline. Returns true once all ranks have
  /// contributed. Throws as join() and exchange() do.
  virtual bool step(Deadline until) = 0;
  /// The parts of the last complete exchange.
  const Parts& parts() const noexcept { return parts_; }
  /// Contributes, and waits for the parts of all ranks. Collective.
  /// @throws PeerLostError when a rank has ended or has not contributed by the deadline; hvd::Error
  /// with the reason when a rank has failed
  const Parts& exchange(const std::string& what, std::span<const std::byte> mine, Deadline,
                        Turn = Turn::kInner);

  /// Ends all current and later exchanges of all ranks with this reason. Only the first call has an
  /// effect.
  void fail(const Refusal&) noexcept;
  /// Ends this rank's part. Rank 0 waits for the other ranks and then cleans up.
  virtual void leave(Deadline) noexcept = 0;
  /// Whether this object has to exist after leave(), for as long as the rank is in the job, so that
  /// another process that joins as the same rank in the meantime is refused.
  bool stays_open() const noexcept { return store_->stays_open(); }

 protected:
  Rendezvous(std::unique_ptr<Store>, const RankInfo&, Deadline, Deadline::duration limit);

  /// Time between two checks for the end of a process or for a newer run.
  static constexpr auto kCheckInterval = std::chrono::milliseconds(100);

  void finish();  ///< steps until the exchange is complete
  /// How long a step may last before the rank checks for the end of a process or a newer run.
  virtual Deadline::duration check_interval() const noexcept;
  /// Reports to the other ranks why this one has not joined.
  virtual void abandon(const std::exception&) noexcept;
  /// A key of the run.
  template <class... Part>
  std::string key(const Part&... parts) const {
    return text(jobs_keys_, run_, "/", parts...);
  }
  /// The deadline of a call of the store that waits for no other rank.
  Deadline call_deadline() const;
  std::string run_key() const { return jobs_keys_ + "run"; }
  /// The key of the parts of all ranks in the current exchange.
  std::string parts_key() const { return last_ ? key("outcome") : key("all.", exchange_); }
  /// Precedes the parts if they are the outcome of the run.
  static std::span<const std::byte> success_mark();
  static bool is_success(std::span<const std::byte> outcome);

  const std::unique_ptr<Store> store_;
  const RankInfo own_;
  const std::string url_;
  const std::string jobs_keys_;  ///< begins the keys of all runs of the job
  const ProcessInfo process_ = this_process();
  std::string run_;                 ///< this rank's run; empty: none yet
  Deadline deadline_;               ///< of the current exchange
  const Deadline::duration limit_;  ///< from the call to the deadline of the join
  int exchange_ = 1;                ///< number of the current exchange
  bool last_ = false;               ///< it is the last one
  std::string what_ = "address";    ///< its name
  Parts parts_;
  bool failure_known_ = false;  ///< the reason of the failure is stored for all ranks
};

}  // namespace hvd::rendezvous
