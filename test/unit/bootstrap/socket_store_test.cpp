#include "bootstrap/socket_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/connection.h"
#include "bootstrap/socket_server.h"
#include "bootstrap/store_server.h"
#include "support/seeds.h"
#include "unit/bootstrap/ports.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace std::chrono_literals;

using Listener = Connection;  // owns the descriptor

class SocketStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<Store> open(int rank, int size = 2, Deadline deadline = soon()) const {
    return open_tcp_store("localhost", port_, info(rank, size), deadline);
  }
  std::string url() const { return "tcp://localhost:" + std::to_string(port_); }
  static std::string wait(Store& store, std::vector<std::string> keys, Deadline deadline = soon()) {
    const auto found = store.wait(keys, deadline);
    return found ? std::to_string(found->index) + " " + shown(found->value) : "nothing";
  }

  std::uint16_t port_ = free_port();
};

TEST_F(SocketStoreTest, RanksShareValues) {
  const auto first = open(0), second = open(1);
  EXPECT_EQ(first->url(), url());
  EXPECT_TRUE(second->notices_loss());
  EXPECT_FALSE(second->stays_open());
  EXPECT_EQ(shown(second->get("k", soon())), "nothing");
  first->set("k", copy_of("v"), soon());
  EXPECT_EQ(shown(second->get("k", soon())), "v");
  EXPECT_EQ(second->add("n", 2, soon()), 2);
  EXPECT_EQ(first->add("n", -3, soon()), -1);
  EXPECT_TRUE(second->create("once", copy_of("1"), soon()));
  EXPECT_FALSE(first->create("once", copy_of("2"), soon()));
  EXPECT_EQ(wait(*first, {"never", "once"}), "1 1");
  EXPECT_EQ(wait(*first, {"never"}, in(1ms)), "nothing");
  const std::string large(5 << 20, 'x');
  std::jthread waits([&] { EXPECT_EQ(wait(*second, {"large"}), "0 " + large); });
  first->set("large", copy_of(large), soon());
  waits.join();
  EXPECT_THAT(outcome_of([&] { first->set("k", Bytes((64 << 20) + 1), soon()); }),
              HasSubstr("larger than 64 MiB"));
  EXPECT_THAT(outcome_of([&] { first->add("k", 1, soon()); }), HasSubstr("malformed"));
  first->remove_all_if("k", copy_of("v"), soon());
  EXPECT_EQ(shown(second->get("once", soon())), "nothing");
  second->close(soon());
  EXPECT_THAT(outcome_of([&] { second->get("k", soon()); }), HasSubstr("the connection is closed"));
  open(1)->close(soon());
}

TEST_F(SocketStoreTest, OneOfManyCreatesAKeyAndAllCount) {
  constexpr int kRanks = 8;
  const auto server = open(0, kRanks);
  std::atomic<int> created = 0;
  std::vector<std::function<void()>> ranks;
  for (int rank = 1; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = open(rank, kRanks);
      if (store->create("k", copy_of("v"), soon())) ++created;
      for (int i = 0; i < 50; ++i) store->add("n", 1, soon());
      store->close(soon());
    });
  }
  EXPECT_THAT(all_of(ranks), Each("fine"));
  EXPECT_EQ(created, 1);
  EXPECT_EQ(server->add("n", 0, soon()), 50 * (kRanks - 1));
}

TEST_F(SocketStoreTest, TakesAnIpv6AddressInBrackets) {
  const int probe = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  const bool works =
      probe >= 0 && ::bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(probe);
  if (!works) GTEST_SKIP() << "there is no IPv6 here";
  const auto first = open_tcp_store("[::1]", port_, info(0, 2), soon());
  const auto second = open_tcp_store("[::1]", port_, info(1, 2), soon());
  EXPECT_EQ(second->url(), "tcp://[::1]:" + std::to_string(port_));
}

// The resolver's files and DNS may give the name any address.
TEST_F(SocketStoreTest, LocalhostIsLiteral) {
  const Resolved resolved = resolve("localhost", 7).get();
  ASSERT_EQ(resolved.addresses.size(), 2U);
  EXPECT_EQ(resolved.addresses[0].ss_family, AF_INET);
  EXPECT_EQ(resolved.addresses[1].ss_family, AF_INET6);
  EXPECT_EQ(resolve("127.0.0.1", 7).get().addresses.size(), 1U);
  EXPECT_THAT(resolve(std::string(300, 'x'), 7).get().problem, HasSubstr("does not resolve"));
}

TEST_F(SocketStoreTest, RanksWaitForRank0) {
  EXPECT_THAT(all_of({[&] {
                        std::this_thread::sleep_for(200ms);
                        const auto store = open(0);
                        EXPECT_EQ(wait(*store, {"k"}), "0 v");
                        wait(*store, {"left"});
                      },
                      [&] {
                        const auto store = open(1);
                        store->set("k", copy_of("v"), soon());
                        store->set("left", {}, soon());
                        store->close(soon());
                      }}),
              Each("fine"));
}

TEST_F(SocketStoreTest, Rank0IsNamedIfItIsNotReached) {
  EXPECT_THAT(outcome_of([&] { open(1, 2, short_time()); }),
              AllOf(StartsWith("lost 0: "), HasSubstr("could not be reached at " + url()),
                    HasSubstr("within 0.3 s (HVD_START_TIMEOUT)"), HasSubstr("Connection refused"),
                    HasSubstr("start rank 0 on that host")));
  EXPECT_THAT(
      outcome_of([&] { open_tcp_store("no-such-host.invalid", 1, info(1, 2), short_time()); }),
      AllOf(StartsWith("lost 0: "), HasSubstr("no-such-host.invalid")));
}

/// Makes a network whose only port for clients is this one. Returns false where it cannot.
bool enter_network_of_one_port(std::uint16_t port) {
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
  range << port << ' ' << port << std::endl;
  return ::ioctl(socket, SIOCSIFFLAGS, &request) == 0 && range.good();
}

// The kernel connects a socket to itself if it gives it the port that it connects to, and no
// process listens there.
TEST_F(SocketStoreTest, AConnectionToItselfIsNone) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!enter_network_of_one_port(port_)) ::_exit(77);
    try {
      Connection::to_host("127.0.0.1", port_, in(5s));
      ::_exit(1);
    } catch (const Connection::Failure& failure) {
      ::_exit(failure.reason == "Connection refused" ? 0 : 2);
    }
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "cannot make a network namespace here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(SocketStoreTest, APortInUseIsAnErrorWithAdvice) {
  const Listener other(listen_at(port_));
  EXPECT_THAT(outcome_of([&] { open(0, 2, in(2s)); }),
              AllOf(StartsWith("usage: "), HasSubstr("rank 0 cannot serve " + url()),
                    HasSubstr("Address already in use"), HasSubstr("its own port")));
}

TEST_F(SocketStoreTest, ASecondRank0DoesNotDisturbTheFirst) {
  const auto first = open(0);
  EXPECT_THAT(outcome_of([&] { open(0, 2, in(2s)); }), HasSubstr("Address already in use"));
  const auto second = open(1);
  second->set("k", copy_of("v"), soon());
  EXPECT_EQ(wait(*first, {"k"}), "0 v");
}

TEST_F(SocketStoreTest, WaitsForAPortInUse) {
  auto other = std::make_unique<Listener>(listen_at(port_));
  std::jthread closes([&] {
    std::this_thread::sleep_for(300ms);
    other.reset();
  });
  open(0);
}

// The system may have given a connection of hvd the port that a later job serves.
TEST_F(SocketStoreTest, AnEarlierConnectionDoesNotHoldItsPort) {
  for (const bool ended : {false, true}) {
    const int listener = listen_at(0);
    auto earlier = Connection::to_host("127.0.0.1", port_of(listener), soon());
    sockaddr_in client{};
    socklen_t length = sizeof client;
    const Connection accepted(::accept(listener, reinterpret_cast<sockaddr*>(&client), &length));
    if (ended) {  // by the client first, so its socket enters the state TIME_WAIT
      earlier.close();
      EXPECT_THROW(accepted.receive(1, soon()), Connection::Failure);
    }
    ::close(listener);
    EXPECT_EQ(outcome_of(
                  [&] { open_tcp_store("localhost", ntohs(client.sin_port), info(0, 1), in(1s)); }),
              "fine")
        << ended;
  }
}

TEST_F(SocketStoreTest, AnotherServerIsNotTakenForRank0) {
  const int listener = listen_at(port_);
  std::jthread answers([&] {
    for (int accepted; (accepted = ::accept(listener, nullptr, nullptr)) >= 0; ::close(accepted))
      EXPECT_GT(::send(accepted, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL), 0);
  });
  EXPECT_THAT(outcome_of([&] { open(1, 2, in(500ms)); }),
              AllOf(StartsWith("lost 0: "), HasSubstr("could not be reached")));
  ::shutdown(listener, SHUT_RDWR);
  answers.join();
  ::close(listener);
}

// A process that listens at the port before rank 0 does, and uses the right protocol but does not
// have the token.
TEST_F(SocketStoreTest, AServerWithoutTheTokenLearnsNothing) {
  const int listener = listen_at(port_);
  std::string received;
  std::jthread pretends([&] {
    for (int accepted; (accepted = ::accept(listener, nullptr, nullptr)) >= 0;) {
      Connection connection(accepted);
      try {
        const Bytes hello = connection.receive(kMaxHelloBytes, soon());
        received += text_of(hello);
        const auto decoded = *decode_store_hello(hello);
        const std::string nonce = random_id();
        connection.send(
            join_fields(
                {"challenge", "0",
                 text_of(join_fields({"train", nonce, server_proof("guess", decoded, nonce)}))}),
            soon());
        for (;;) received += text_of(connection.receive(kMaxFrameBytes, soon()));
      } catch (const Connection::Failure&) {
      }
    }
  });
  EXPECT_THAT(
      outcome_of([&] { open(1, 2, in(1s)); }),
      AllOf(StartsWith("usage: "), HasSubstr("with another token than rank 0's"),
            HasSubstr("give each job its own rendezvous address"), Not(HasSubstr("secret"))));
  ::shutdown(listener, SHUT_RDWR);
  pretends.join();
  ::close(listener);
  EXPECT_THAT(received, AllOf(HasSubstr("train"), HasSubstr("distrust"), Not(HasSubstr("secret")),
                              Not(HasSubstr("proof"))));
}

TEST_F(SocketStoreTest, ProcessesOfAnotherJobAreRefusedAloneAndNamed) {
  const auto first = open(0);
  RankInfo other = info(1, 2);
  other.job = "test";
  EXPECT_THAT(outcome_of([&] { open_tcp_store("localhost", port_, other, in(1s)); }),
              AllOf(StartsWith("usage: "), HasSubstr("for job 'test', where rank 0 begins job "
                                                     "'train'")));
  EXPECT_THAT(first->remarks(std::vector{1}), HasSubstr("it has another job name (HVD_JOB_NAME)"));
  other = info(1, 2);
  other.token = "guess";
  EXPECT_THAT(outcome_of([&] { open_tcp_store("localhost", port_, other, in(1s)); }),
              AllOf(StartsWith("usage: "), HasSubstr("another token"), Not(HasSubstr("guess")),
                    Not(HasSubstr("secret"))));
  EXPECT_THAT(first->remarks(std::vector{1}), HasSubstr("it has another token (HVD_JOB_TOKEN)"));
  open(1);
}

// The port may belong to rank 0 of an earlier run with another name, which ends soon.
TEST_F(SocketStoreTest, RanksOutwaitTheServerOfAnEarlierRun) {
  RankInfo earlier = info(0, 2);
  earlier.job = "earlier";
  auto old = open_tcp_store("localhost", port_, earlier, soon());
  EXPECT_THAT(all_of({[&] {
                        std::this_thread::sleep_for(500ms);
                        old.reset();
                      },
                      [&] {
                        const auto store = open(0);
                        EXPECT_EQ(wait(*store, {"k"}), "0 v");
                      },
                      [&] { open(1)->set("k", copy_of("v"), soon()); }}),
              Each("fine"));
}

TEST_F(SocketStoreTest, ASecondProcessOfARankIsRefused) {
  const auto first = open(0), second = open(1);
  EXPECT_THAT(outcome_of([&] { open(1); }),
              AllOf(StartsWith("usage: "), HasSubstr("rank 1 (host "),
                    HasSubstr("has joined at " + url() + " twice, first from host")));
  EXPECT_EQ(shown(second->get("k", soon())), "nothing");
}

TEST_F(SocketStoreTest, ForgedAndReplayedProofsAreRefused) {
  const auto first = open(0);
  const StoreHello hello{.job = "train", .rank = 1, .size = 2, .process = "p", .nonce = "0"};
  const auto try_with = [&](const std::function<std::string(const std::string& nonce)>& proof) {
    Connection connection = Connection::to_host("localhost", port_, soon());
    connection.send(encode(hello), soon());
    const auto challenge = *decode_store_reply(connection.receive(kMaxHelloBytes, soon()));
    const auto fields = *split_fields(bytes_of(challenge.value), 3);
    connection.send(join_fields({"proof", proof(fields[1])}), soon());
    try {
      return decode_store_reply(connection.receive(kMaxHelloBytes, soon()))->verdict;
    } catch (const Connection::Failure& failure) {
      return failure.reason;
    }
  };
  std::string recorded;
  EXPECT_EQ(try_with([&](const std::string& nonce) {
              return recorded = client_proof("secret", hello, nonce);
            }),
            "admitted");
  for (const std::string& forged : {recorded, std::string(64, '0'), std::string()})
    EXPECT_EQ(try_with([&](const std::string&) { return forged; }), "the connection is closed");
}

TEST_F(SocketStoreTest, RandomBytesDoNotDisturbTheServer) {
  const auto first = open(0);
  testing::Random random(11, 0);
  for (int i = 0; i < 200; ++i) {
    const Listener stranger(connect_to(port_));
    std::string bytes;
    for (int left = random.below(64); left > 0; --left)
      bytes += static_cast<char>(random.below(256));
    if (i % 2 == 0) bytes = std::string("\xff\xff\xff\x7f", 4) + bytes;  // an oversized frame
  }
  open(1)->set("k", copy_of("v"), soon());
  EXPECT_EQ(wait(*first, {"k"}), "0 v");
}

TEST_F(SocketStoreTest, ALostConnectionPublishesItsWillAtOnce) {
  const auto first = open(0, 3);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto store = open(1, 3);
    store->publish_on_loss("failed", copy_of("rank 1 is lost"), "", "left.1", soon());
    ::kill(::getpid(), SIGKILL);
  }
  EXPECT_EQ(wait(*first, {"all", "failed"}), "1 rank 1 is lost");
  EXPECT_EQ(wait(*first, {"left.1"}), "0 ");
  ::waitpid(child, nullptr, 0);
}

TEST_F(SocketStoreTest, TheEndOfRank0IsItsLossAtOnceAndLater) {
  auto first = open(0);
  const auto second = open(1);
  std::jthread ends([&] {
    std::this_thread::sleep_for(50ms);
    first.reset();
  });
  EXPECT_THAT(outcome_of([&] { wait(*second, {"never"}); }),
              AllOf(StartsWith("lost 0: "), HasSubstr("rank 0 no longer serves " + url())));
  EXPECT_THAT(outcome_of([&] { second->get("k", soon()); }),
              StartsWith("lost 0: hvd::init: rank 0 no longer answers: "));
}

TEST_F(SocketStoreTest, AKilledRank0IsLostAtOnceAndTheNextOneIsNotItsOwn) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto store = open(0);
    for (;;) ::pause();
  }
  const auto store = open(1);
  std::jthread kills([&] {
    std::this_thread::sleep_for(50ms);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  });
  EXPECT_THAT(outcome_of([&] { wait(*store, {"never"}); }), StartsWith("lost 0: "));
  kills.join();
  const auto next = open(0);  // another run at the same port
  next->set("k", copy_of("v"), soon());
  EXPECT_THAT(outcome_of([&] { store->get("k", soon()); }), StartsWith("lost 0: "));
}

TEST_F(SocketStoreTest, AStoppedRank0IsAnErrorInTime) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto store = open(0);
    for (;;) ::pause();
  }
  const auto store = open(1);
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(outcome_of([&] { store->set("k", {}, in(300ms)); }),
              AllOf(StartsWith("lost 0: "), HasSubstr("it has not replied in time")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// fork() copies the connection and rank 0's server, but not its thread.
TEST_F(SocketStoreTest, AChildDoesNotEndItsParentsConnection) {
  auto first = open(0), second = open(1);
  const pid_t child = ::fork();
  if (child == 0) {
    second->close(soon());
    second.reset();
    first.reset();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  second->set("k", copy_of("v"), soon());
  EXPECT_EQ(wait(*first, {"k"}), "0 v");
}

TEST_F(SocketStoreTest, ALostConnectionIsNoticedThoughAChildHoldsIt) {
  const auto first = open(0);
  auto second = open(1);
  second->publish_on_loss("failed", copy_of("rank 1"), "", "", soon());
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  second.reset();
  EXPECT_EQ(wait(*first, {"failed"}), "0 rank 1");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

/// The descriptors of this process that stay open in a program that it executes.
std::vector<std::string> inherited() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(entry.path().filename());
    const int flags = ::fcntl(descriptor, F_GETFD);
    std::error_code error;
    if (descriptor > 2 && flags >= 0 && (flags & FD_CLOEXEC) == 0)
      found.push_back(std::filesystem::read_symlink(entry.path(), error).string());
  }
  return found;
}

TEST_F(SocketStoreTest, AllDescriptorsAreClosedOnExec) {
  const auto before = inherited();
  const auto first = open(0), second = open(1);
  EXPECT_EQ(inherited(), before);
}

TEST_F(SocketStoreTest, TheServersThreadBlocksAsynchronousSignals) {
  const auto first = open(0);
  int threads = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    if (name != "hvd-store") continue;  // a thread of an earlier test, or of a sanitizer
    std::ifstream status(entry.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("SigBlk:")) continue;
      const std::uint64_t blocked = std::stoull(line.substr(8), nullptr, 16);
      const auto blocks = [&](int signal) { return (blocked >> (signal - 1) & 1) != 0; };
      for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGPIPE})
        EXPECT_TRUE(blocks(signal)) << signal;
      for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF})
        EXPECT_FALSE(blocks(signal)) << signal;
      ++threads;
    }
  }
  EXPECT_EQ(threads, 1);
}

TEST_F(SocketStoreTest, AThousandIdleStrangersDoNotKeepRanksOut) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 2200 && limit.rlim_max >= 2200) {
    const rlimit raised{.rlim_cur = 2200, .rlim_max = limit.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &raised);
  }
  const auto first = open(0);
  std::vector<int> strangers;
  for (int i = 0; i < 1000; ++i) strangers.push_back(connect_to(port_));
  const auto begin = std::chrono::steady_clock::now();
  open(1)->set("k", copy_of("v"), soon());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
  EXPECT_EQ(wait(*first, {"k"}), "0 v");
  // All but the newest have been closed.
  int closed = 0;
  for (const int stranger : strangers) {
    char byte = 0;
    if (::recv(stranger, &byte, 1, MSG_DONTWAIT) == 0) ++closed;
    ::close(stranger);
  }
  EXPECT_GE(closed, 1000 - 2 - 128);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

/// Runs rank 0 of two ranks in a process that has no more descriptors than rank 0 needs, and three.
/// Returns 0 if it has received rank 1's value without using much CPU time.
int run_rank_0_with_few_descriptors(std::uint16_t port) {
  const rlimit few{.rlim_cur = 64, .rlim_max = 64};
  ::setrlimit(RLIMIT_NOFILE, &few);
  const auto store = open_tcp_store("localhost", port, info(0, 2), soon());
  std::vector<int> taken;
  for (int next; (next = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken.push_back(next);
  for (int i = 0; i < 3; ++i) {
    ::close(taken.back());
    taken.pop_back();
  }
  if (::write(STDERR_FILENO, "r", 1) != 1) return 3;  // ready
  const std::vector<std::string> keys = {"k"};
  if (!store->wait(keys, soon())) return 1;
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime) < 0.7 ? 0 : 2;
}

TEST_F(SocketStoreTest, StrangersThatTakeAllDescriptorsNeitherBlockNorSpinRank0) {
  int log[2];
  ASSERT_EQ(::pipe2(log, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(log[1], STDERR_FILENO);
    ::_exit(run_rank_0_with_few_descriptors(port_));
  }
  ::close(log[1]);
  char ready = 0;
  ASSERT_EQ(::read(log[0], &ready, 1), 1);
  std::vector<Listener> strangers;
  for (int i = 0; i < 50; ++i) strangers.emplace_back(connect_to(port_));
  std::this_thread::sleep_for(1s);  // rank 0 must not spin meanwhile
  open(1)->set("k", copy_of("v"), soon());
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  std::string written(4096, '\0');
  const ssize_t count = ::read(log[0], written.data(), written.size());
  written.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  ::close(log[0]);
  const std::string line = "cannot accept a connection at " + url() + ": Too many open files";
  const auto at = written.find(line);
  EXPECT_NE(at, std::string::npos) << written;
  EXPECT_EQ(written.find(line, at + 1), std::string::npos) << "it was logged twice";
}

}  // namespace
}  // namespace hvd::rendezvous
