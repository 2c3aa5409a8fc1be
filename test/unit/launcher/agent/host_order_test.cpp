#include "agent/host_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

#include "system/process.h"

namespace hvd::launcher {
namespace {

using ::testing::ElementsAre;

HostOrder some_order() {
  HostOrder order;
  order.folder = "/home/u/it's here";
  order.variables = {{"A", "1=2\n3"}, {"NOT_UTF_8", "\xff\xfe"}, {"EMPTY", ""}};
  order.program = {"./train", "--name", "a b", ""};
  order.size = 8;
  order.ranks = {4, 5, 7};
  order.heartbeat = 10'000'000'000;
  return order;
}

std::optional<HostOrder> read_from(const std::string& bytes, std::string* rest = nullptr) {
  Pipe pipe = make_pipe();
  EXPECT_EQ(::write(pipe.write_end.get(), bytes.data(), bytes.size()),
            static_cast<ssize_t>(bytes.size()));
  pipe.write_end.reset();
  auto order = read_host_order(pipe.read_end.get(), 2000);
  std::array<char, 256> buffer{};
  if (rest != nullptr)
    rest->assign(buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(
                                    0, ::read(pipe.read_end.get(), buffer.data(), buffer.size()))));
  return order;
}

TEST(HostOrder, IsReadWithoutTheFollowingBytes) {
  std::string rest;
  const auto read = read_from(encode(some_order()) + "rank 0's input", &rest);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->folder, some_order().folder);
  EXPECT_EQ(read->variables, some_order().variables);
  EXPECT_EQ(read->program, some_order().program);
  EXPECT_EQ(read->size, 8);
  EXPECT_THAT(read->ranks, ElementsAre(4, 5, 7));
  EXPECT_EQ(read->heartbeat, 10'000'000'000);
  EXPECT_EQ(rest, "rank 0's input");
}

TEST(HostOrder, MalformedOrdersAreRefused) {
  const std::string whole = encode(some_order());
  for (const std::string& bytes :
       {std::string(), std::string("\n"), std::string("12"), std::string("x\n"),
        std::string("5\n{}"), std::string("2\n{}"), std::string("9999999999999\n"),
        std::string("-3\nabc"), whole.substr(0, whole.size() - 1)}) {
    EXPECT_FALSE(read_from(bytes)) << bytes;
  }
}

TEST(HostOrder, ASilentSenderTimesOut) {
  const Pipe silent = make_pipe();
  EXPECT_FALSE(read_host_order(silent.read_end.get(), 20));
}

}  // namespace
}  // namespace hvd::launcher
