#include "reports/report.h"

#include <gtest/gtest.h>

#include <random>

namespace hvd::launcher {
namespace {

TEST(Frames, SurviveAnyCutting) {
  std::string stream;
  append_frame(stream, FrameType::kStdout, 0, "abc");
  append_frame(stream, FrameType::kRelease, 70'000, "");
  append_frame(stream, FrameType::kStderr, 2, std::string(70'000, '\0'));
  for (const std::size_t step :
       {std::size_t{1}, std::size_t{3}, std::size_t{4096}, stream.size()}) {
    FrameDecoder decoder;
    std::vector<Frame> frames;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      decoder.feed(std::string_view(stream).substr(at, step));
      while (auto frame = decoder.next()) frames.push_back(std::move(*frame));
    }
    ASSERT_EQ(frames.size(), 3U);
    EXPECT_EQ(frames[0].payload, "abc");
    EXPECT_EQ(frames[1].type, FrameType::kRelease);
    EXPECT_EQ(frames[1].rank, 70'000);
    EXPECT_EQ(frames[2].payload.size(), 70'000U);
  }
}

TEST(Frames, GoldenBytes) {
  std::string stream;
  append_frame(stream, FrameType::kStdout, 260, "hi");
  EXPECT_EQ(stream, std::string("\x02\x00\x00\x00\x03\x04\x01\x00\x00hi", 11));
}

TEST(Frames, RejectUnknownTypesAndGreatLengths) {
  FrameDecoder unknown;
  unknown.feed(std::string_view("\x00\x00\x00\x00\x63\x00\x00\x00\x00", 9));
  EXPECT_THROW(unknown.next(), ProtocolError);
  FrameDecoder great;
  great.feed(std::string_view("\xff\xff\xff\xff\x03\x00\x00\x00\x00", 9));
  EXPECT_THROW(great.next(), ProtocolError);
  FrameDecoder http;
  http.feed("GET / HTTP/1.1\r\n");
  EXPECT_THROW(http.next(), ProtocolError);
}

TEST(Frames, RandomBytesNeverCrash) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    FrameDecoder decoder;
    decoder.feed(bytes);
    try {
      while (decoder.next()) {
      }
    } catch (const ProtocolError&) {
    }
    for (const auto decode : {+[](std::string_view b) { decode<Hello>(b); },
                              +[](std::string_view b) { decode<Ended>(b); },
                              +[](std::string_view b) { decode<SignalOrder>(b); }}) {
      EXPECT_THROW(decode(bytes), ProtocolError);
    }
  }
}

/// Expects that the record encodes to this JSON, and that the decoded JSON does so too. All fields
/// of the record must differ from their defaults.
template <class Record>
void expect_json(const Record& record, const std::string& json) {
  EXPECT_EQ(encode(record), json);
  EXPECT_EQ(encode(decode<Record>(json)), json);
}

TEST(Records, HaveTheirFieldsInJson) {
  expect_json(Greeting{.nonce = "n"}, R"({"nonce":"n"})");
  expect_json(Challenge{.nonce = "n", .proof = "p"}, R"({"nonce":"n","proof":"p"})");
  expect_json(Hello{.proof = "t",
                    .host = "h",
                    .master_port = 8,
                    .seats = {{.rank = 3, .local_rank = 1, .omp_threads = 5, .bound_cpus = 2}},
                    .slots = 4,
                    .node = "n"},
              R"({"host":"h","master_port":8,"node":"n","proof":"t","seats":[{"bound_cpus":2,)"
              R"("local_rank":1,"omp_threads":5,"rank":3}],"slots":4})");
  expect_json(Welcome{.columns = 80,
                      .rows = 24,
                      .time_ns = 5,
                      .credit = 6,
                      .ranks = {1, 2},
                      .renewal = 7,
                      .heartbeat = 8,
                      .kill = 9},
              R"({"columns":80,"credit":6,"heartbeat":8,"kill":9,"ranks":[1,2],"renewal":7,)"
              R"("rows":24,"time_ns":5})");
  expect_json(Finished{.code = 76}, R"({"code":76})");
  expect_json(MoreSlots{.ranks = {4, 5}}, R"({"ranks":[4,5]})");
  expect_json(
      StartOrder{.address = "10.0.0.1",
                 .master_port = 2,
                 .node = 3,
                 .nodes = 4,
                 .cross_rank = 5,
                 .cross_size = 6,
                 .peer = "10.0.0.2",
                 .job = "j",
                 .worker = 7,
                 .restarts = 8},
      R"({"address":"10.0.0.1","cross_rank":5,"cross_size":6,"job":"j","master_port":2,"node":3,)"
      R"("nodes":4,"peer":"10.0.0.2","restarts":8,"worker":7})");
  expect_json(LeaseRequest{.number = 9}, R"({"number":9})");
  expect_json(Credit{.bytes = 7}, R"({"bytes":7})");
  expect_json(ProgramStarted{.pid = 3}, R"({"pid":3})");
  expect_json(Ended{.time_ns = 1'700'000'000'123'456'789,
                    .pid = 7,
                    .code = 139,
                    .signal = 11,
                    .dumped_core = true,
                    .stopped = true,
                    .start_error = 2},
              R"({"code":139,"dumped_core":true,"pid":7,"signal":11,"start_error":2,)"
              R"("stopped":true,"time_ns":1700000000123456789})");
  expect_json(
      Notice{
          .kind = "throw", .time_ns = 8, .code = 134, .text = "a\nb", .stopped = true, .about = 2},
      R"({"about":2,"code":134,"kind":"throw","stopped":true,"text":"a\nb","time_ns":8})");
  expect_json(SignalOrder{.signal = 15, .after_ms = 1, .stop = true, .kill_after_ms = 200},
              R"({"after_ms":1,"kill_after_ms":200,"signal":15,"stop":true})");
  EXPECT_EQ(decode<Notice>(encode(Notice{.text = "b\xff"})).text, "b\xef\xbf\xbd")
      << "an invalid byte is replaced";
}

TEST(Frames, OfTheRendezvousHaveAHeadAndBytes) {
  const std::string bytes("a\0\xff", 3);
  const RendezvousBytes sent = {.session = 0xfedcba98, .last = true, .bytes = bytes};
  std::string whole, head;
  append_frame(whole, FrameType::kRendezvous, 5, encode(sent));
  append_head(head, FrameType::kRendezvous, 5, sent);
  EXPECT_EQ(head + bytes, whole);
  FrameDecoder decoder;
  decoder.feed(whole);
  const auto frame = decoder.next();
  ASSERT_TRUE(frame);
  const RendezvousBytes back = decode_rendezvous(frame->payload);
  EXPECT_EQ(back.session, 0xfedcba98);
  EXPECT_TRUE(back.last);
  EXPECT_EQ(back.bytes, bytes);
  for (std::size_t size = 0; size < kRendezvousHeadSize; ++size)
    EXPECT_THROW(decode_rendezvous(frame->payload.substr(0, size)), ProtocolError);
}

TEST(Records, UnknownMembersAreIgnoredMissingOnesAreNot) {
  EXPECT_EQ(decode<ProgramStarted>(R"({"pid":3,"new":"field"})").pid, 3);
  EXPECT_THROW(decode<ProgramStarted>(R"({"new":"field"})"), ProtocolError);
  EXPECT_THROW(decode<ProgramStarted>(R"({"pid":"three"})"), ProtocolError);
  EXPECT_THROW(decode<ProgramStarted>("[]"), ProtocolError);
}

}  // namespace
}  // namespace hvd::launcher
