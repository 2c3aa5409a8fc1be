#include "reports/report.h"

#include <gtest/gtest.h>

#include <random>

namespace hvd::launcher {
namespace {

TEST(Frames, SurviveAnyCutting) {
  std::string stream;
  append_frame(stream, FrameType::kStdout, "abc");
  append_frame(stream, FrameType::kRelease, "");
  append_frame(stream, FrameType::kStderr, std::string(70'000, '\0'));
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
    EXPECT_EQ(frames[2].payload.size(), 70'000U);
  }
}

TEST(Frames, GoldenBytes) {
  std::string stream;
  append_frame(stream, FrameType::kStdout, "hi");
  EXPECT_EQ(stream, std::string("\x02\x00\x00\x00\x03hi", 7));
}

TEST(Frames, RejectUnknownTypesAndGreatLengths) {
  FrameDecoder unknown;
  unknown.feed(std::string_view("\x00\x00\x00\x00\x63", 5));
  EXPECT_THROW(unknown.next(), ProtocolError);
  FrameDecoder great;
  great.feed(std::string_view("\xff\xff\xff\xff\x03", 5));
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

TEST(Records, RoundTrip) {
  const Hello hello{.proof = "t",
                    .rank = 3,
                    .size = 4,
                    .local_rank = 1,
                    .local_size = 2,
                    .host = "h\xff",
                    .supervisor_pid = 9,
                    .omp_threads = 5,
                    .bound_cpus = 2,
                    .master_port = 8};
  const Hello hello_back = decode<Hello>(encode(hello));
  EXPECT_EQ(hello_back.proof, "t");
  EXPECT_EQ(hello_back.rank, 3);
  EXPECT_EQ(hello_back.size, 4);
  EXPECT_EQ(hello_back.local_rank, 1);
  EXPECT_EQ(hello_back.local_size, 2);
  EXPECT_EQ(hello_back.host, "h\xef\xbf\xbd") << "a stray byte is replaced, not fatal";
  EXPECT_EQ(hello_back.omp_threads, 5);
  EXPECT_EQ(hello_back.master_port, 8);

  const StartOrder start{.address = "10.0.0.1",
                         .master_port = 2,
                         .node = 3,
                         .nodes = 4,
                         .cross_rank = 5,
                         .cross_size = 6};
  const StartOrder start_back = decode<StartOrder>(encode(start));
  EXPECT_EQ(start_back.address, "10.0.0.1");
  EXPECT_EQ(start_back.master_port, 2);
  EXPECT_EQ(start_back.node, 3);
  EXPECT_EQ(start_back.nodes, 4);
  EXPECT_EQ(start_back.cross_rank, 5);
  EXPECT_EQ(start_back.cross_size, 6);

  const Ended ended{.time_ns = 1'700'000'000'123'456'789,
                    .pid = 7,
                    .code = 139,
                    .signal = 11,
                    .dumped_core = true,
                    .stopped = true,
                    .start_error = 2};
  const Ended ended_back = decode<Ended>(encode(ended));
  EXPECT_EQ(ended_back.time_ns, ended.time_ns);
  EXPECT_EQ(ended_back.pid, 7);
  EXPECT_EQ(ended_back.code, 139);
  EXPECT_EQ(ended_back.signal, 11);
  EXPECT_TRUE(ended_back.dumped_core);
  EXPECT_TRUE(ended_back.stopped);
  EXPECT_EQ(ended_back.start_error, 2);

  const SignalOrder order =
      decode<SignalOrder>(encode(SignalOrder{.signal = 15, .stop = true, .kill_after_ms = 200}));
  EXPECT_EQ(order.signal, 15);
  EXPECT_TRUE(order.stop);
  EXPECT_EQ(order.kill_after_ms, 200);
  EXPECT_EQ(decode<ProgramStarted>(encode(ProgramStarted{.pid = 3})).pid, 3);
  const Welcome welcome =
      decode<Welcome>(encode(Welcome{.columns = 80, .rows = 24, .time_ns = 5, .credit = 6}));
  EXPECT_EQ(welcome.columns, 80);
  EXPECT_EQ(welcome.time_ns, 5);
  EXPECT_EQ(welcome.credit, 6);
  EXPECT_EQ(decode<Credit>(encode(Credit{.bytes = 7})).bytes, 7);
  EXPECT_EQ(decode<Challenge>(encode(Challenge{.nonce = "n", .proof = "p"})).proof, "p");
  EXPECT_EQ(decode<Greeting>(encode(Greeting{.rank = 4, .nonce = "n"})).nonce, "n");
  const Notice notice = decode<Notice>(encode(
      Notice{.kind = "throw", .time_ns = 8, .code = 134, .text = "a\nb\xff", .stopped = true}));
  EXPECT_EQ(notice.kind, "throw");
  EXPECT_EQ(notice.time_ns, 8);
  EXPECT_EQ(notice.code, 134);
  EXPECT_EQ(notice.text, "a\nb\xef\xbf\xbd");
  EXPECT_TRUE(notice.stopped);
}

TEST(Frames, OfAMeetingHaveAHeadAndBytes) {
  const std::string bytes("a\0\xff", 3);
  std::string whole, head;
  append_frame(whole, FrameType::kRendezvous,
               RendezvousBytes{.session = 0xfedcba98, .last = true, .bytes = bytes});
  append_head(head, FrameType::kRendezvous,
              RendezvousBytes{.session = 0xfedcba98, .last = true, .bytes = bytes});
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
