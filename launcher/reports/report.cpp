#include "reports/report.h"

#include <nlohmann/json.hpp>

#include "base/sha256.h"
#include "base/text.h"

namespace hvd::launcher {
namespace {

using Json = nlohmann::json;

bool is_known(std::uint8_t type) {
  return (type >= static_cast<std::uint8_t>(FrameType::kHello) &&
          type <= static_cast<std::uint8_t>(FrameType::kSlotsReply)) ||
         (type >= static_cast<std::uint8_t>(FrameType::kWelcome) &&
          type <= static_cast<std::uint8_t>(FrameType::kFinished));
}

void append_number(std::string& out, std::size_t number) {
  for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>((number >> shift) & 0xff);
}

void append_start(std::string& out, std::size_t size, FrameType type, int rank) {
  append_number(out, size);
  out += static_cast<char>(type);
  append_number(out, static_cast<std::uint32_t>(rank));
}

std::size_t number_at(std::string_view bytes) {
  std::size_t number = 0;
  for (std::size_t i = 0; i < 4; ++i)
    number |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return number;
}

}  // namespace

void append_frame(std::string& out, FrameType type, int rank, std::string_view payload) {
  append_start(out, payload.size(), type, rank);
  out += payload;
}

void append_head(std::string& out, FrameType type, int rank, const RendezvousBytes& rendezvous) {
  append_start(out, kRendezvousHeadSize + rendezvous.bytes.size(), type, rank);
  append_number(out, rendezvous.session);
  out += static_cast<char>(rendezvous.last ? 1 : 0);
}

std::string encode(const RendezvousBytes& rendezvous) {
  std::string payload;
  append_number(payload, rendezvous.session);
  payload += static_cast<char>(rendezvous.last ? 1 : 0);
  return payload.append(rendezvous.bytes);
}

RendezvousBytes decode_rendezvous(std::string_view payload) {
  if (payload.size() < kRendezvousHeadSize) {
    throw ProtocolError(text("expected at least ", kRendezvousHeadSize,
                             " bytes in a frame of the rendezvous, got ", payload.size()));
  }
  return {.session = static_cast<std::uint32_t>(number_at(payload)),
          .last = payload[kRendezvousHeadSize - 1] != 0,
          .bytes = payload.substr(kRendezvousHeadSize)};
}

void FrameDecoder::feed(std::string_view bytes) {
  if (consumed_ > 0) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_ += bytes;
}

std::optional<Frame> FrameDecoder::next() {
  const std::string_view rest = std::string_view(buffer_).substr(consumed_);
  if (rest.size() < kFrameHeaderSize) return std::nullopt;
  const std::size_t length = number_at(rest);
  const auto type = static_cast<std::uint8_t>(rest[4]);
  if (!is_known(type) || length > kMaxPayload) {
    throw ProtocolError(text("expected a frame of a known type and of at most ", kMaxPayload,
                             " bytes, got type ", type, " with ", length, " bytes"));
  }
  if (rest.size() < kFrameHeaderSize + length) return std::nullopt;
  consumed_ += kFrameHeaderSize + length;
  return Frame{static_cast<FrameType>(type), static_cast<int>(number_at(rest.substr(5))),
               std::string(rest.substr(kFrameHeaderSize, length))};
}

template <class Record>
std::string encode(const Record& record) {
  // A host name or a text with stray bytes must not make the report itself fail.
  return Json(record).dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Record>
Record decode(std::string_view payload) {
  try {
    return Json::parse(payload).get<Record>();
  } catch (const Json::exception& error) {
    throw ProtocolError(text("expected the JSON of a '", record_name(Record{}), "' record, got ",
                             payload.size(), " bytes: ", error.what()));
  }
}

// The members are the fields of the JSON object.
#define HVD_RECORD(Record, name, ...)                            \
  NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Record, __VA_ARGS__)        \
  static const char* record_name(const Record&) { return name; } \
  template std::string encode(const Record&);                    \
  template Record decode(std::string_view);

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Seat, rank, local_rank, omp_threads, bound_cpus)
HVD_RECORD(Greeting, "greeting", nonce)
HVD_RECORD(Challenge, "challenge", nonce, proof)
HVD_RECORD(Hello, "hello", proof, host, master_port, seats, slots, node)
HVD_RECORD(Welcome, "welcome", columns, rows, time_ns, credit, ranks, renewal, heartbeat, kill)
HVD_RECORD(Finished, "finished", code)
HVD_RECORD(StartOrder, "start", address, master_port, node, nodes, cross_rank, cross_size, peer,
           job, worker, restarts)
HVD_RECORD(LeaseRequest, "lease", number)
HVD_RECORD(Credit, "credit", bytes)
HVD_RECORD(MoreSlots, "slots", ranks)
HVD_RECORD(ProgramStarted, "started", pid)
HVD_RECORD(Ended, "ended", time_ns, pid, code, signal, dumped_core, stopped, start_error)
HVD_RECORD(Notice, "notice", kind, time_ns, code, text, stopped, about)
HVD_RECORD(SignalOrder, "signal", signal, after_ms, stop, kill_after_ms)

#undef HVD_RECORD

std::string job_name(std::string_view token) {
  return text("hvdrun-", hmac_hex(token, "name").substr(0, 12));
}

std::string job_token(std::string_view token) { return hmac_hex(token, "job"); }

std::string rendezvous_token(std::string_view run_id, std::string_view secret) {
  return hmac_hex(secret, text("hvdrun rendezvous ", run_id));
}

std::string launcher_proof(std::string_view token, std::string_view agent_nonce,
                           std::string_view launcher_nonce) {
  return hmac_hex(token, text("hvdrun ", agent_nonce, " ", launcher_nonce));
}

std::string agent_proof(std::string_view token, std::string_view agent_nonce,
                        std::string_view launcher_nonce, const std::vector<Seat>& seats) {
  std::string message = text("agent ", agent_nonce, " ", launcher_nonce);
  for (const Seat& seat : seats) message += text(" ", seat.rank);
  return hmac_hex(token, message);
}

}  // namespace hvd::launcher
