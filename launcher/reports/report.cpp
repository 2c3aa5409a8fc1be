#include "reports/report.h"

#include <nlohmann/json.hpp>

namespace hvd::launcher {
namespace {

using Json = nlohmann::json;

bool is_known(std::uint8_t type) {
  return (type >= static_cast<std::uint8_t>(FrameType::kHello) &&
          type <= static_cast<std::uint8_t>(FrameType::kMeeting)) ||
         (type >= static_cast<std::uint8_t>(FrameType::kWelcome) &&
          type <= static_cast<std::uint8_t>(FrameType::kMeetingAnswer));
}

/// A host name or token with stray bytes must not make the report itself fail.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Read>
auto decode(const char* what, std::string_view payload, Read read) {
  try {
    return read(Json::parse(payload));
  } catch (const Json::exception& error) {
    throw ProtocolError(std::string("expected a '") + what + "' record, got " +
                        std::to_string(payload.size()) + " bytes that are none: " + error.what());
  }
}

void append_number(std::string& out, std::size_t number) {
  for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>((number >> shift) & 0xff);
}

std::size_t number_at(std::string_view bytes) {
  std::size_t number = 0;
  for (std::size_t i = 0; i < 4; ++i)
    number |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return number;
}

}  // namespace

void append_frame(std::string& out, FrameType type, std::string_view payload) {
  append_number(out, payload.size());
  out += static_cast<char>(type);
  out += payload;
}

void append_head(std::string& out, FrameType type, const MeetingBytes& meeting) {
  append_number(out, kMeetingHeadSize + meeting.bytes.size());
  out += static_cast<char>(type);
  append_number(out, meeting.session);
  out += static_cast<char>(meeting.last ? 1 : 0);
}

void append_frame(std::string& out, FrameType type, const MeetingBytes& meeting) {
  append_head(out, type, meeting);
  out += meeting.bytes;
}

MeetingBytes decode_meeting(std::string_view payload) {
  if (payload.size() < kMeetingHeadSize) {
    throw ProtocolError("expected at least " + std::to_string(kMeetingHeadSize) +
                        " bytes of a meeting, got " + std::to_string(payload.size()));
  }
  return {.session = static_cast<std::uint32_t>(number_at(payload)),
          .last = payload[kMeetingHeadSize - 1] != 0,
          .bytes = payload.substr(kMeetingHeadSize)};
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
    throw ProtocolError("expected a frame of at most " + std::to_string(kMaxPayload) +
                        " bytes, got type " + std::to_string(type) + " with " +
                        std::to_string(length) + " bytes");
  }
  if (rest.size() < kFrameHeaderSize + length) return std::nullopt;
  consumed_ += kFrameHeaderSize + length;
  return Frame{static_cast<FrameType>(type), std::string(rest.substr(kFrameHeaderSize, length))};
}

std::string encode(const Greeting& greeting) {
  return dump({{"rank", greeting.rank}, {"nonce", greeting.nonce}});
}

Greeting decode_greeting(std::string_view payload) {
  return decode("greeting", payload, [](const Json& json) {
    return Greeting{.rank = json.at("rank").get<int>(),
                    .nonce = json.at("nonce").get<std::string>()};
  });
}

std::string encode(const Challenge& challenge) {
  return dump({{"nonce", challenge.nonce}, {"proof", challenge.proof}});
}

Challenge decode_challenge(std::string_view payload) {
  return decode("challenge", payload, [](const Json& json) {
    return Challenge{.nonce = json.at("nonce").get<std::string>(),
                     .proof = json.at("proof").get<std::string>()};
  });
}

std::string encode(const Credit& credit) { return dump({{"bytes", credit.bytes}}); }

Credit decode_credit(std::string_view payload) {
  return decode("credit", payload,
                [](const Json& json) { return Credit{.bytes = json.at("bytes").get<int>()}; });
}

std::string encode(const StartOrder& order) {
  return dump({{"address", order.address},
               {"master_port", order.master_port},
               {"node", order.node},
               {"nodes", order.nodes},
               {"cross_rank", order.cross_rank},
               {"cross_size", order.cross_size}});
}

StartOrder decode_start(std::string_view payload) {
  return decode("start", payload, [](const Json& json) {
    StartOrder order;
    json.at("address").get_to(order.address);
    json.at("master_port").get_to(order.master_port);
    json.at("node").get_to(order.node);
    json.at("nodes").get_to(order.nodes);
    json.at("cross_rank").get_to(order.cross_rank);
    json.at("cross_size").get_to(order.cross_size);
    return order;
  });
}

std::string encode(const Hello& hello) {
  return dump({{"proof", hello.proof},
               {"rank", hello.rank},
               {"size", hello.size},
               {"local_rank", hello.local_rank},
               {"local_size", hello.local_size},
               {"host", hello.host},
               {"supervisor_pid", hello.supervisor_pid},
               {"omp_threads", hello.omp_threads},
               {"bound_cpus", hello.bound_cpus},
               {"master_port", hello.master_port}});
}

Hello decode_hello(std::string_view payload) {
  return decode("hello", payload, [](const Json& json) {
    Hello hello;
    json.at("proof").get_to(hello.proof);
    json.at("rank").get_to(hello.rank);
    json.at("size").get_to(hello.size);
    json.at("local_rank").get_to(hello.local_rank);
    json.at("local_size").get_to(hello.local_size);
    json.at("host").get_to(hello.host);
    json.at("supervisor_pid").get_to(hello.supervisor_pid);
    json.at("omp_threads").get_to(hello.omp_threads);
    json.at("bound_cpus").get_to(hello.bound_cpus);
    json.at("master_port").get_to(hello.master_port);
    return hello;
  });
}

std::string encode(const Welcome& welcome) {
  return dump({{"columns", welcome.columns},
               {"rows", welcome.rows},
               {"time_ns", welcome.time_ns},
               {"credit", welcome.credit}});
}

Welcome decode_welcome(std::string_view payload) {
  return decode("welcome", payload, [](const Json& json) {
    return Welcome{.columns = json.at("columns").get<int>(),
                   .rows = json.at("rows").get<int>(),
                   .time_ns = json.at("time_ns").get<long long>(),
                   .credit = json.at("credit").get<int>()};
  });
}

std::string encode(const Started& started) { return dump({{"pid", started.pid}}); }

Started decode_started(std::string_view payload) {
  return decode("started", payload,
                [](const Json& json) { return Started{.pid = json.at("pid").get<int>()}; });
}

std::string encode(const Ended& ended) {
  return dump({{"time_ns", ended.time_ns},
               {"pid", ended.pid},
               {"code", ended.code},
               {"signal", ended.signal},
               {"dumped_core", ended.dumped_core},
               {"stopped", ended.stopped},
               {"start_error", ended.start_error}});
}

Ended decode_ended(std::string_view payload) {
  return decode("ended", payload, [](const Json& json) {
    Ended ended;
    json.at("time_ns").get_to(ended.time_ns);
    json.at("pid").get_to(ended.pid);
    json.at("code").get_to(ended.code);
    json.at("signal").get_to(ended.signal);
    json.at("dumped_core").get_to(ended.dumped_core);
    json.at("stopped").get_to(ended.stopped);
    json.at("start_error").get_to(ended.start_error);
    return ended;
  });
}

std::string encode(const Notice& notice) {
  return dump({{"kind", notice.kind},
               {"time_ns", notice.time_ns},
               {"code", notice.code},
               {"text", notice.text},
               {"stopped", notice.stopped},
               {"about", notice.about}});
}

Notice decode_notice(std::string_view payload) {
  return decode("notice", payload, [](const Json& json) {
    return Notice{.kind = json.at("kind").get<std::string>(),
                  .time_ns = json.at("time_ns").get<long long>(),
                  .code = json.at("code").get<int>(),
                  .text = json.at("text").get<std::string>(),
                  .stopped = json.at("stopped").get<bool>(),
                  .about = json.at("about").get<int>()};
  });
}

std::string encode(const SignalOrder& order) {
  return dump({{"signal", order.signal},
               {"after_ms", order.after_ms},
               {"stop", order.stop},
               {"kill_after_ms", order.kill_after_ms}});
}

SignalOrder decode_signal(std::string_view payload) {
  return decode("signal", payload, [](const Json& json) {
    return SignalOrder{.signal = json.at("signal").get<int>(),
                       .after_ms = json.at("after_ms").get<int>(),
                       .stop = json.at("stop").get<bool>(),
                       .kill_after_ms = json.at("kill_after_ms").get<int>()};
  });
}

}  // namespace hvd::launcher
