#pragma once

/// The protocol between an agent and hvdrun, over one TCP connection. An agent runs the programs of
/// one host's ranks; under mpirun each rank has an agent of its own. These functions only convert
/// bytes; they do no input or output.
///
/// A frame is a 4-byte little-endian length n, one byte of type, the 4-byte rank that it is about
/// (0 in the handshake), and n bytes of payload. Frames of output, of the rendezvous and of
/// membership carry raw bytes, the others a JSON object. Unknown members are ignored, so that
/// fields may be added.
///
///   agent                                        hvdrun
///   greeting {nonce}                      ->
///                                         <-     challenge {nonce, proof}       launcher_proof()
///   hello {proof, host, seats, ...}       ->                                    agent_proof()
///                                         <-     welcome {columns, rows, time, credit}
///   for each rank:
///                                         <-     start {address, ...}    once all are connected
///   started {pid}                         ->
///   stdout, stderr <bytes>                ->     at most as many bytes as there is credit for
///                                         <-     credit {bytes}
///                                         <-     signal {signal, stop, kill_after_ms}
///   notice {kind, time, code, text, ...}  ->     a notice of the program:
///                                                core/observe/supervisor_notice.h
///   rendezvous <session, last, bytes>     <->    between a process of the rank and hvdrun
///   ended {time, code, signal, ...}       ->
///   drained {}                            ->     no output follows
///                                         <-     release {}    the agent ends with the last one
///
/// In an elastic job the numbers of ranks are those of slots. Each slot runs one worker after the
/// other, and the frames from start to release are repeated for each worker. There are also:
///
///   member <bytes>                        <->    between the worker and hvdrun: a part of the
///                                                stream of its member socket
///   gone {}                               ->     after SIGKILL: no thread of the worker runs the
///                                                program any more, so its end is certain
///   leaving {}                            ->     for each connection: the host is to leave the job
///                                         <-     slots {ranks}    the host has got more slots
///   slots reply {ranks}                   ->     all that it takes, or an empty list
///                                         <-     finished {code}  the job has ended
///   lease {number}                        <->    for each connection: an agent whose request is
///                                                not answered in time ends its workers
///
/// A node that joins by itself sends the count of its slots in its hello. The welcome contains
/// their numbers.
///
/// Output waits for credit, so that hvdrun can read all other frames at once, even if the reader of
/// its own output is slow. All times are in hvdrun's clock: an agent computes the offset of its own
/// clock from the welcome.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

enum class FrameType : std::uint8_t {
  kHello = 1,
  kStarted = 2,
  kStdout = 3,
  kStderr = 4,
  kEnded = 5,
  kNotice = 6,
  kDrained = 7,
  kGreeting = 8,
  kRendezvous = 9,
  kMember = 10,
  kGone = 11,
  kLease = 12,
  kLeaving = 13,
  kSlotsReply = 14,
  kWelcome = 16,
  kSignal = 17,
  kRelease = 18,
  kChallenge = 19,
  kCredit = 20,
  kStart = 21,
  kRendezvousReply = 22,
  kMemberReply = 23,
  kLeaseReply = 24,
  kSlots = 25,
  kFinished = 26,
};

struct Frame {
  FrameType type{};
  int rank = 0;
  std::string payload;
};

/// The peer violated this protocol.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kFrameHeaderSize = 9;
inline constexpr std::size_t kMaxPayload = std::size_t{1} << 20;

void append_frame(std::string& out, FrameType type, int rank, std::string_view payload);

/// Bytes between a process of a rank and its rendezvous. The agent forwards them unread.
struct RendezvousBytes {
  std::uint32_t session = 0;  ///< the index of the process's connection to the agent
  bool last = false;          ///< the connection has ended, or must be closed after these bytes
  std::string_view bytes = {};
};
inline constexpr std::size_t kRendezvousHeadSize = 5;
inline constexpr std::size_t kMaxRendezvousBytes = kMaxPayload - kRendezvousHeadSize;
/// The payload that decode_rendezvous() reads.
std::string encode(const RendezvousBytes&);
/// Appends the frame without its bytes, which the caller sends after it.
void append_head(std::string& out, FrameType type, int rank, const RendezvousBytes&);
/// @throws ProtocolError
RendezvousBytes decode_rendezvous(std::string_view payload);

/// Cuts a byte stream into frames. Not thread-safe.
class FrameDecoder {
 public:
  void feed(std::string_view bytes);
  /// Returns the next whole frame. @throws ProtocolError for an unknown type or a payload above
  /// kMaxPayload.
  std::optional<Frame> next();

 private:
  std::string buffer_;
  std::size_t consumed_ = 0;
};

// The records: the payloads that are JSON objects.

struct Greeting {
  std::string nonce = {};
};

struct Challenge {
  std::string nonce = {};
  std::string proof = {};
};

/// A rank of an agent.
struct Seat {
  int rank = 0, local_rank = 0;
  int omp_threads = 0;  ///< OMP_NUM_THREADS as the agent sets it; 0: it keeps the user's value
  int bound_cpus = 0;   ///< hardware threads that it binds the program to; 0: it does not bind it
};

struct Hello {
  std::string proof = {};
  std::string host = {};
  int master_port = 0;  ///< a port that the agent of rank 0 reserves; 0 for others
  std::vector<Seat> seats = {};
  // The next two are for a node that joins by itself, which has no seats:
  int slots = 0;
  std::string node = {};  ///< a random id, which all its connections have in common
};

struct Welcome {
  int columns = 0, rows = 0;  ///< of hvdrun's terminal; 0: it has no terminal
  long long time_ns = 0;      ///< hvdrun's clock
  int credit = 0;             ///< bytes of output that the agent may send for each rank at first
  // For a node that has joined by itself, as in HostOrder:
  std::vector<int> ranks = {};
  long long renewal = 0, heartbeat = 0, kill = 0;
};

/// How the job has ended.
struct Finished {
  int code = 0;  ///< hvdrun's exit code
};

/// Orders the agent to start the rank's program, once all agents are connected. Contains the values
/// that depend on all of them.
struct StartOrder {
  std::string address = {};  ///< of rank 0; empty: the address at which hvdrun was reached
  int master_port = 0;
  int node = 0, nodes = 1;             ///< this host's index, in the order of ranks, and the count
  int cross_rank = 0, cross_size = 1;  ///< position among the ranks with the same local rank
  std::string peer = {};               ///< an address of another host of the job; empty: unknown
  // In an elastic job:
  std::string job = {};  ///< a random id of this start of the job
  long long worker = 0;  ///< the worker's id; 0: an ordinary job
  int restarts = 0;      ///< how many workers of the job have been replaced
};

struct Credit {
  int bytes = 0;
};

/// An agent's request to renew its lease, and hvdrun's answer.
struct LeaseRequest {
  long long number = 0;
};

/// Additional slots for an agent.
struct MoreSlots {
  std::vector<int> ranks = {};
};

struct ProgramStarted {
  int pid = 0;
};

/// How a rank's program ended.
struct Ended {
  long long time_ns = 0;
  int pid = 0;
  int code = 0;    ///< the exit code, or 128 + signal
  int signal = 0;  ///< the signal that ended it; 0: it exited
  bool dumped_core = false;
  bool stopped = false;  ///< its agent had stopped it, so its end is not the first failure
  int start_error = 0;   ///< errno when the program could not be started; then pid is 0
};

/// A notice that the program sent; core/observe/supervisor_notice.h lists the kinds.
struct Notice {
  std::string kind = {};
  long long time_ns = 0;
  int code = 0;
  std::string text = {};
  bool stopped = false;  ///< its agent had stopped it before
  int about = -1;        ///< the rank that is lost or has left; -1: unknown, or no rank
};

struct SignalOrder {
  int signal = 0;
  int after_ms = 0;        ///< send it after this time, unless the program has ended by then
  bool stop = false;       ///< the job is being stopped: the rank's end is not a failure of its own
  int kill_after_ms = -1;  ///< SIGKILL after this time, unless it has ended; negative: never
};

/// Convert a record to JSON, and back. Instantiated for the records above. Invalid UTF-8 in a
/// string becomes U+FFFD.
template <class Record>
std::string encode(const Record&);
/// @throws ProtocolError when a member is missing or has another type.
template <class Record>
Record decode(std::string_view payload);

/// The job's name and token that its ranks receive. They are derived from hvdrun's own token, which
/// programs must not see, and which cannot be computed from these.
std::string job_name(std::string_view token);
std::string job_token(std::string_view token);
/// The token of hvdruns that join at an endpoint, derived from --rdzv-id and a secret of the user,
/// which may be empty.
std::string rendezvous_token(std::string_view run_id, std::string_view secret);

/// Each side of a connection proves with these that it has the job's token, without sending it.
/// A proof covers fresh random numbers of both sides, so a recorded proof is useless.
std::string launcher_proof(std::string_view token, std::string_view agent_nonce,
                           std::string_view launcher_nonce);
std::string agent_proof(std::string_view token, std::string_view agent_nonce,
                        std::string_view launcher_nonce, const std::vector<Seat>& seats);

}  // namespace hvd::launcher
