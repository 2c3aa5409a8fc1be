// Runs inputs like the fuzzer's without the fuzzer, with any compiler, in a few seconds.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <variant>

#include "fuzz/harness.h"
#include "fuzz/membership.h"
#include "member/messages.h"
#include "unit/negotiation/golden.h"

namespace hvd::fuzz {
namespace {

using wire::Bytes;
namespace golden = wire::golden;

// Seconds for each of the random tests.
double budget() {
  const char* const text = std::getenv("HVD_FUZZ_SECONDS");
  return (text == nullptr ? 5.0 : std::strtod(text, nullptr)) / 2;
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

std::map<std::string, Bytes> corpus() {
  std::map<std::string, Bytes> files;
  for (const auto& entry : std::filesystem::directory_iterator(HVD_FUZZ_CORPUS)) {
    files[entry.path().stem()] = read_file(entry.path());
  }
  return files;
}

std::byte step(Step kind, int rank) {
  return static_cast<std::byte>(static_cast<unsigned>(kind) * 8 + static_cast<unsigned>(rank));
}

void add_message(Bytes& session, Step kind, int rank, const Bytes& message) {
  const std::size_t body = std::min<std::size_t>(message.size() - 3, 255);
  session.push_back(step(kind, rank));
  session.push_back(static_cast<std::byte>(body));
  session.insert(session.end(), message.begin() + 3,
                 message.begin() + 3 + static_cast<std::ptrdiff_t>(body));
}

void mutate(Bytes& bytes, std::mt19937_64& random) {
  for (std::size_t times = 1 + random() % 4; times > 0 && !bytes.empty(); --times) {
    const std::size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] ^= std::byte{1} << (random() % 8);
        break;
      case 1:
        bytes[at] = static_cast<std::byte>(random());
        break;
      case 2:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                     static_cast<std::byte>(random()));
        break;
      case 3:
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      default:
        // Makes a varint long, for huge sizes, counts and slots.
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 1 + random() % 9,
                     std::byte{0xff});
        break;
    }
  }
}

wire::Request random_request(std::mt19937_64& random) {
  constexpr std::int64_t kDims[] = {
      0, 1, 2, 3, 1 << 20, std::int64_t{1} << 40, std::int64_t{1} << 61};
  const std::string names[] = {"a", "b", "g", "z", "m0", "m1", "new", ""};
  wire::Request request;
  request.name = names[random() % 8];
  request.kind = static_cast<OpKind>(random() % (random() % 4 == 0 ? kOpKindCount : 3));
  request.unnamed = random() % 4 == 0;
  request.ordinal = random() % 4;
  request.in_sequence = request.unnamed && random() % 2 == 0;
  if (request.unnamed) request.name = wire::unnamed_name(request, request.ordinal);
  request.dtype = random() % 8 == 0 ? DataType::kInt64 : DataType::kFloat32;
  if (random() % 8 == 0)
    request.compression =
        static_cast<Compression>(random() % kCompressionCount);  // some of them refused
  request.root = static_cast<int>(random() % 4);
  request.removed_set = request.last_to_join = request.root;
  request.process_set = random() % 16 == 0 ? 1 : 0;
  if (random() % 8 == 0) request.prescale = random() % 2 == 0 ? 0.5 : std::strtod("nan", nullptr);
  if (random() % 3 == 0 && !request.unnamed) {
    request.group = std::string(1, random() % 2 == 0 ? 'm' : 'n');
    request.group_size = static_cast<int>(random() % 4);
    request.group_index =
        request.group_size == 0
            ? 0
            : static_cast<int>(random() % static_cast<unsigned>(request.group_size));
  }
  for (std::size_t i = random() % 4; i > 0; --i)
    request.shape.push_back(kDims[random() % std::size(kDims)]);
  return request;
}

Bytes random_report(std::mt19937_64& random) {
  golden::RankReport report;
  report.rank = static_cast<int>(random() % 4);
  report.number = 1 + random() % 3;
  report.last_applied = random() % 4;
  report.shutdown = random() % 16 == 0;
  for (std::uint32_t slot = 0; slot < 5; ++slot) {
    if (random() % 3 == 0) report.cached.push_back(slot);
  }
  if (random() % 4 == 0)
    report.cached_unnamed.push_back({static_cast<std::uint32_t>(random() % 4), random() % 4});
  for (std::size_t i = random() % 4; i > 0; --i) report.requests.push_back(random_request(random));
  return wire::encode(golden::make_report(report));
}

Bytes random_plan(std::mt19937_64& random) {
  wire::Plan plan;
  plan.sequence = 2 + random() % 2;
  plan.batches.resize(random() % 3);
  for (auto& batch : plan.batches) {
    for (std::size_t i = random() % 3; i > 0; --i) {
      if (random() % 2 == 0) {
        batch.tensors.emplace_back(
            wire::SlotUse{static_cast<std::uint32_t>(random() % 4), random() % 2});
      } else {
        wire::Response response{random_request(random)};
        response.first_dims.assign(random() % 5,
                                   static_cast<std::int64_t>(random() >> (1 + random() % 63)));
        batch.tensors.emplace_back(std::move(response));
      }
    }
  }
  if (random() % 3 == 0)
    plan.errors.push_back({0, random_request(random).name, StatusCode::kStalled, "", -1, {0, 1}});
  return wire::encode(plan);
}

Bytes random_session(std::mt19937_64& random) {
  Bytes session = {kSession};
  for (std::size_t steps = 1 + random() % 12; steps > 0; --steps) {
    const auto rank = static_cast<int>(random() % 3);
    switch (random() % 8) {
      case 0:
        add_message(session, Step::kPlan, rank, random_plan(random));
        break;
      case 1:
      case 2:
        session.push_back(step(Step::kDecide, static_cast<int>(random() % 8)));
        break;
      case 3:
        session.push_back(step(Step::kPublish, rank));
        break;
      default:
        add_message(session, Step::kReport, rank, random_report(random));
        break;
    }
  }
  return session;
}

TEST(FuzzSmoke, TheCorpusHoldsTheGoldenMessages) {
  const auto files = corpus();
  for (const auto& [name, message, hex] : golden::messages()) {
    ASSERT_TRUE(files.contains(name)) << name;
    EXPECT_EQ(golden::to_hex(files.at(name)), golden::to_hex(golden::from_hex(hex))) << name;
  }
  EXPECT_TRUE(std::any_of(files.begin(), files.end(),
                          [](const auto& file) { return file.second.at(0) == kSession; }));
}

TEST(FuzzSmoke, TheCorpusHoldsEveryMessageOfMembership) {
  std::set<std::byte> kinds;
  for (const auto& [name, bytes] : corpus()) {
    if (bytes.at(0) != kMembership) continue;
    EXPECT_NO_THROW(feed_membership(bytes)) << name;
    kinds.insert(bytes.at(2));
  }
  EXPECT_EQ(kinds.size(),
            std::variant_size_v<member::ToCoordinator> + std::variant_size_v<member::ToWorker>);
}

TEST(FuzzSmoke, TheCorpusAndEveryBitFlipOfIt) {
  for (const auto& [name, bytes] : corpus()) {
    feed(bytes);
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      Bytes damaged = bytes;
      damaged[bit / 8] ^= std::byte{1} << (bit % 8);
      feed(damaged);
    }
    for (std::size_t size = 0; size < bytes.size(); ++size) feed(std::span(bytes).first(size));
  }
}

TEST(FuzzSmoke, MutatedCorpus) {
  const Stopwatch stopwatch;
  std::vector<Bytes> inputs;
  for (auto& [name, bytes] : corpus()) inputs.push_back(bytes);
  std::mt19937_64 random(11);
  std::uint64_t fed = 0;
  while (stopwatch.seconds() < budget()) {
    for (const Bytes& input : inputs) {
      Bytes mutated = input;
      mutate(mutated, random);
      feed(mutated);
      ++fed;
    }
    Bytes noise(random() % 64);
    for (auto& byte : noise) byte = static_cast<std::byte>(random());
    feed(noise);
  }
  EXPECT_GT(fed, 0u);
  RecordProperty("inputs", static_cast<int>(fed));
}

TEST(FuzzSmoke, SessionsOfMessagesThatDecodeButMakeNoSense) {
  const Stopwatch stopwatch;
  std::mt19937_64 random(12);
  std::uint64_t fed = 0;
  while (stopwatch.seconds() < budget()) {
    Bytes session = random_session(random);
    feed(session);
    mutate(session, random);
    feed(session);
    fed += 2;
  }
  EXPECT_GT(fed, 0u);
  RecordProperty("inputs", static_cast<int>(fed));
}

}  // namespace
}  // namespace hvd::fuzz
