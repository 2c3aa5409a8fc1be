#pragma once

/// What a rank's supervisor and hvdrun say to each other over one TCP connection per rank. Pure:
/// bytes in, bytes out.
///
/// A frame is a 4-byte little-endian length n, one byte of type, and n bytes of payload. Frames of
/// output and of a meeting carry raw bytes, the others a JSON object; unknown members are ignored,
/// so that fields may be added.
///
///   supervisor                                   hvdrun
///   greeting {rank, nonce}                ->
///                                         <-     challenge {nonce, proof}       proofs: proof.h
///   hello {proof, rank, host, ...}        ->
///                                         <-     welcome {columns, rows, time, credit}
///                                         <-     start {address, ...}    once all have come
///   started {pid}                         ->
///   stdout, stderr <bytes>                ->     no more bytes than there is credit for
///                                         <-     credit {bytes}
///                                         <-     signal {signal, stop, kill_after_ms}
///   notice {kind, time, code, text, ...}  ->     what the program says of itself:
///                                                observe/supervisor_notice.h
///   meeting <session, last, bytes>        <->    between a process of the rank and the meeting of
///                                                the ranks: rendezvous/meeting.h
///   ended {time, code, signal, ...}       ->
///   drained {}                            ->     no output follows
///                                         <-     release {}    only now the supervisor ends
///
/// Output waits for credit, so that hvdrun can read everything else at once however slow the reader
/// of its own output is. All times are hvdrun's clock: a supervisor learns the difference when it
/// is welcomed.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

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
  kMeeting = 9,
  kWelcome = 16,
  kSignal = 17,
  kRelease = 18,
  kChallenge = 19,
  kCredit = 20,
  kStart = 21,
  kMeetingAnswer = 22,
};

struct Frame {
  FrameType type{};
  std::string payload;
};

/// The peer sent something that is not this protocol.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr std::size_t kFrameHeaderSize = 5;
inline constexpr std::size_t kMaxPayload = std::size_t{1} << 20;

void append_frame(std::string& out, FrameType type, std::string_view payload);

/// Of a connection between a process of a rank and the meeting, which the supervisor passes on
/// without looking into it.
struct MeetingBytes {
  std::uint32_t session = 0;  ///< which of the supervisor's connections
  bool last = false;          ///< it has ended, or is to be closed after these
  std::string_view bytes = {};
};
inline constexpr std::size_t kMeetingHeadSize = 5;
inline constexpr std::size_t kMostMeetingBytes = kMaxPayload - kMeetingHeadSize;
void append_frame(std::string& out, FrameType type, const MeetingBytes&);
/// All of it but the bytes, which follow.
void append_head(std::string& out, FrameType type, const MeetingBytes&);
/// @throws ProtocolError
MeetingBytes decode_meeting(std::string_view payload);

/// Cuts a byte stream into frames. Not thread-safe.
class FrameDecoder {
 public:
  void feed(std::string_view bytes);
  /// The next whole frame. @throws ProtocolError for an unknown type or a payload above
  /// kMaxPayload.
  std::optional<Frame> next();

 private:
  std::string buffer_;
  std::size_t consumed_ = 0;
};

struct Greeting {
  int rank = 0;
  std::string nonce = {};
};

struct Challenge {
  std::string nonce = {};
  std::string proof = {};
};

struct Hello {
  std::string proof = {};
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::string host = {};
  int supervisor_pid = 0;
  int omp_threads = 0;  ///< what the supervisor set; 0: the user's own value stands
  int bound_cpus = 0;   ///< how many hardware threads it binds the program to; 0: it does not
  int master_port = 0;  ///< kept for rank 0, and told by its supervisor
  std::string peer_address = {};  ///< whence it has come; not told, but seen by hvdrun
};

struct Welcome {
  int columns = 0, rows = 0;  ///< of hvdrun's terminal; 0: it has none
  long long time_ns = 0;      ///< hvdrun's clock
  int credit = 0;             ///< bytes of output to begin with
};

/// All supervisors have come: the rank's program may begin. What no rank knows by itself.
struct StartOrder {
  std::string address = {};  ///< of rank 0; empty: that at which hvdrun was reached
  int master_port = 0;
  int node = 0, nodes = 1;             ///< which of the hosts, in the order of ranks
  int cross_rank = 0, cross_size = 1;  ///< among the ranks with the same local rank
};

struct Credit {
  int bytes = 0;
};

struct Started {
  int pid = 0;
};

/// How a rank's program ended. `stopped`: its supervisor had told it to stop, so its end is
/// nobody's first failure.
struct Ended {
  long long time_ns = 0;
  int pid = 0;
  int code = 0;    ///< the exit code, or 128 + signal
  int signal = 0;  ///< 0: it exited by itself
  bool dumped_core = false;
  bool stopped = false;
  int start_error = 0;  ///< errno when the program could not be started; then pid is 0
};

/// What the program has said of itself; the kinds are those of hvd's observe/supervisor_notice.h.
struct Notice {
  std::string kind = {};
  long long time_ns = 0;
  int code = 0;
  std::string text = {};
  bool stopped = false;  ///< its supervisor had told it to stop by then
  int about = -1;        ///< the rank that is lost or has left; -1: unknown, or none
};

struct SignalOrder {
  int signal = 0;
  int after_ms = 0;        ///< only if the program still runs then
  bool stop = false;       ///< the job is to end: the rank is not to blame for what follows
  int kill_after_ms = -1;  ///< SIGKILL when it still runs then; negative: never
};

std::string encode(const Greeting&);
std::string encode(const Challenge&);
std::string encode(const Credit&);
std::string encode(const StartOrder&);
std::string encode(const Hello&);
std::string encode(const Welcome&);
std::string encode(const Started&);
std::string encode(const Ended&);
std::string encode(const Notice&);
std::string encode(const SignalOrder&);
/// @throws ProtocolError when a member is missing or has another type.
Greeting decode_greeting(std::string_view payload);
Challenge decode_challenge(std::string_view payload);
Credit decode_credit(std::string_view payload);
StartOrder decode_start(std::string_view payload);
Hello decode_hello(std::string_view payload);
Welcome decode_welcome(std::string_view payload);
Started decode_started(std::string_view payload);
Ended decode_ended(std::string_view payload);
Notice decode_notice(std::string_view payload);
SignalOrder decode_signal(std::string_view payload);

}  // namespace hvd::launcher
