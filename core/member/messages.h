#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "negotiation/codec.h"

/// The messages of membership, between a worker and the coordinator in hvdrun.
/// docs/elastic_design.md has the grammar and their order.
namespace hvd::member {

/// Identifies a process that is, was or is to become a rank. Ids are not reused within a job.
using WorkerId = std::uint64_t;
/// Counts the generations of a job, from 1. A generation has fixed members.
using Generation = std::uint64_t;
/// Counts the commits of a job.
using Commit = std::uint64_t;

/// How much of the replicated state a worker has.
enum class StateKind : std::uint8_t {
  kNone,     ///< a new worker, or one that was interrupted while it received the state
  kTouched,  ///< the program has written parameters since the commit
  kWhole,    ///< as of the commit
};
inline constexpr std::uint8_t kStateKindCount = 3;

/// The state of a worker. Two workers with the whole state of one commit have equal hashes.
struct StateSummary {
  Commit commit = 0;
  StateKind kind = StateKind::kNone;
  std::uint64_t hash = 0;
  friend bool operator==(const StateSummary&, const StateSummary&) = default;
};

// Worker to coordinator.

/// The process has built its model and requests to become a rank.
struct Join {
  std::string program = {};  ///< equal on all workers of a job
  friend bool operator==(const Join&, const Join&) = default;
};
/// The worker has left all generations before this one.
struct Ready {
  Generation generation = 0;
  StateSummary state = {};
  bool can_load = false;     ///< its program can make a state if no worker has one
  bool divided = false;      ///< each rank has a part of the state that the others do not have
  std::string address = {};  ///< where the others reach it; opaque here
  friend bool operator==(const Ready&, const Ready&) = default;
};
/// The worker is connected to the others and has the state of the generation.
struct Synced {
  Generation generation = 0;
  StateSummary state = {};
  friend bool operator==(const Synced&, const Synced&) = default;
};
/// The generation has failed on this worker.
struct Failed {
  Generation generation = 0;
  std::optional<WorkerId> accused = {};  ///< the worker that it has lost
  std::string cause = {};
  friend bool operator==(const Failed&, const Failed&) = default;
};
/// The program's function has returned on this worker, which waits for the others.
struct AtEnd {
  Generation generation = 0;
  friend bool operator==(const AtEnd&, const AtEnd&) = default;
};
/// Answers Prepare. Later commits wait for Target.
struct Begun {
  std::uint64_t change = 0;
  Commit commit = 0;  ///< the last commit that the program has begun
  friend bool operator==(const Begun&, const Begun&) = default;
};
/// Answers Ping.
struct Pong {
  friend bool operator==(const Pong&, const Pong&) = default;
};

/// An exception has left the program's function on this worker, and its process ends.
struct ProgramFailed {
  Generation generation = 0;
  Commit commit = 0;  ///< the last one of the worker
  std::string cause = {};
  friend bool operator==(const ProgramFailed&, const ProgramFailed&) = default;
};

// Coordinator to worker.

/// Leave all generations before this one, and report Ready.
struct Reset {
  Generation generation = 0;
  std::string cause = {};
  friend bool operator==(const Reset&, const Reset&) = default;
};
/// The place of a worker in a generation.
struct Seat {
  WorkerId worker = 0;
  bool receives = false;  ///< takes the state of the root
  std::string address = {};
  friend bool operator==(const Seat&, const Seat&) = default;
};
/// Connect to these workers and make the state equal on all of them.
struct Assign {
  Generation generation = 0;
  std::uint32_t root = 0;  ///< the rank whose state all others have or receive
  bool load = false;       ///< no worker has a state: the root makes one
  StateSummary state = {};
  std::vector<Seat> seats = {};  ///< by rank
  friend bool operator==(const Assign&, const Assign&) = default;
};
/// All members have the state: run.
struct Go {
  Generation generation = 0;
  friend bool operator==(const Go&, const Go&) = default;
};
/// A change in order begins: report the last commit begun, and let later commits wait.
struct Prepare {
  std::uint64_t change = 0;
  Generation generation = 0;  ///< the one that runs
  friend bool operator==(const Prepare&, const Prepare&) = default;
};
/// Leave the generation at this commit, and report Ready for the next one.
struct Target {
  std::uint64_t change = 0;
  Commit commit = 0;
  Generation next = 0;
  std::vector<WorkerId> leaving = {};  ///< members that leave the job after this commit
  friend bool operator==(const Target&, const Target&) = default;
};
/// The program's function has returned on all members.
struct End {
  friend bool operator==(const End&, const End&) = default;
};
struct Ping {
  friend bool operator==(const Ping&, const Ping&) = default;
};
/// The worker cannot become a rank of this job.
struct Refused {
  std::string reason = {};
  friend bool operator==(const Refused&, const Refused&) = default;
};

// The alternatives' positions travel on the wire: append only.
using ToCoordinator = std::variant<Join, Ready, Synced, Failed, AtEnd, Begun, Pong, ProgramFailed>;
using ToWorker = std::variant<Reset, Assign, Go, Prepare, Target, End, Ping, Refused>;

inline constexpr std::size_t kMaxAddressBytes = 4096;

wire::Bytes encode(const ToCoordinator&);
wire::Bytes encode(const ToWorker&);
/// @throws wire::WireError. Never reads out of bounds, never allocates more than a small multiple
/// of the message's size.
ToCoordinator decode_to_coordinator(std::span<const std::byte>);
ToWorker decode_to_worker(std::span<const std::byte>);

}  // namespace hvd::member
