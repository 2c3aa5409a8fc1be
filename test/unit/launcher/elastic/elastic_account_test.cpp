#include "elastic/elastic_account.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstring>

#include "elastic/member_stream.h"

namespace hvd::launcher {
namespace {

TEST(ElasticAccount, DescribesEveryEnd) {
  EXPECT_EQ(describe_end({.code = 3}, {}), "exit code 3");
  EXPECT_EQ(describe_end({.code = 0}, {}), "exit code 0 before the end of the job");
  EXPECT_EQ(describe_end({.code = 139, .signal = SIGSEGV}, {}), "killed by signal 11 (SIGSEGV)");
  EXPECT_EQ(describe_end({.code = 127, .start_error = ENOENT}, {}),
            "its program cannot be run: No such file or directory");
  const Notice death{.kind = "throw", .text = "std::runtime_error: no data\nmore"};
  EXPECT_EQ(describe_end({.code = 134, .signal = SIGABRT}, death),
            "killed by signal 6 (SIGABRT): std::runtime_error: no data");
}

TEST(ElasticAccount, HasALinePerLostWorkerAndTheReasonLast) {
  ElasticRecord record;
  EXPECT_EQ(final_message(record), "");
  record.lost = {{.id = 2, .host = "a", .generation = 4, .cause = "exit code 1", .replacement = 5},
                 {.id = 5, .host = "b", .cause = "killed by signal 9 (SIGKILL)"}};
  const std::string lines =
      "hvdrun: worker 2 on a was lost in generation 4: exit code 1; worker 5 was started in its "
      "place\n"
      "hvdrun: worker 5 on b was lost before it was a rank: killed by signal 9 (SIGKILL)\n";
  EXPECT_EQ(final_message(record), lines);
  record.code = 75;
  record.reason = "the job has ended";
  record.tail_worker = 5;
  record.stderr_tail = {"one", "two"};
  EXPECT_EQ(final_message(record),
            lines +
                "hvdrun: the job has ended\n"
                "hvdrun: the last lines of worker 5's stderr:\n  one\n  two\n");
}

TEST(MemberStream, CutsAnyPartsIntoMessages) {
  const std::string large(100'000, 'x');
  std::string stream;
  for (const std::string& message : {std::string("a"), large, std::string("bc")})
    stream += frame_member_message(std::as_bytes(std::span(message)));
  EXPECT_EQ(stream.substr(0, 5), std::string("\1\0\0\0a", 5));
  for (const std::size_t part : {std::size_t{1}, std::size_t{7}, std::size_t{70'000}}) {
    MemberStream cutter;
    std::vector<std::string> messages;
    for (std::size_t at = 0; at < stream.size(); at += part) {
      cutter.feed(std::string_view(stream).substr(at, part));
      while (const auto message = cutter.next())
        messages.emplace_back(reinterpret_cast<const char*>(message->data()), message->size());
    }
    EXPECT_EQ(messages, (std::vector<std::string>{"a", large, "bc"})) << part;
  }
}

TEST(MemberStream, RefusesLengthsOutOfRange) {
  MemberStream empty;
  empty.feed(std::string_view("\0\0\0\0", 4));
  EXPECT_THROW(empty.next(), wire::WireError);
  MemberStream huge;
  huge.feed(std::string_view("\1\0\0\1", 4));
  EXPECT_THROW(huge.next(), wire::WireError);
  MemberStream largest;
  largest.feed(std::string_view("\0\0\0\1", 4));
  EXPECT_FALSE(largest.next());
}

}  // namespace
}  // namespace hvd::launcher
