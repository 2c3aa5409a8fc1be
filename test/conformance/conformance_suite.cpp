#include "conformance/conformance_suite.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <random>
#include <sstream>

#include "kernels/kernels.h"
#include "support/seeds.h"

namespace hvd::conformance {
namespace {

using testing::first_difference;
using testing::make_input;
using testing::reference_reduce;

constexpr std::int64_t kCounts[] = {0, 1, 7, 1023, 65539};
constexpr std::int64_t kLarge = 65539;
constexpr ReduceOp kOps[] = {ReduceOp::kSum,     ReduceOp::kMin,    ReduceOp::kMax,
                             ReduceOp::kProduct, ReduceOp::kBitAnd, ReduceOp::kBitOr,
                             ReduceOp::kBitXor};
constexpr std::byte kGuard{0xa5};
constexpr std::size_t kGuardBytes = 64;

Bytes join(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

DataType dtype_number(int number) { return static_cast<DataType>(number); }

// Floating types have no bitwise operations. The others all use the same loop, so only int32 has
// the large cases.
bool left_out(DataType dtype, ReduceOp op, std::int64_t count) {
  return is_bitwise(op) && (is_floating(dtype) || (count == kLarge && dtype != DataType::kInt32));
}

void add_allreduces(std::vector<Case>& cases, int size) {
  for (int number = 0; number < kDataTypeCount; ++number) {
    const DataType dtype = dtype_number(number);
    for (const ReduceOp op : kOps) {
      for (const std::int64_t count : kCounts) {
        if (left_out(dtype, op, count)) continue;
        for (const bool in_place : {false, true}) {
          for (const bool unaligned : {false, true}) {
            // Large cases are slow under a sanitizer. A sum has two placements and the others one,
            // instead of four.
            if (count == kLarge && (in_place == unaligned || (op != ReduceOp::kSum && in_place))) {
              continue;
            }
            cases.push_back({.op = op,
                             .dtype = dtype,
                             .count = count,
                             .in_place = in_place,
                             .unaligned = unaligned});
          }
        }
      }
    }
    if (dtype == DataType::kBool) {
      continue;  // cannot be scaled
    }
    for (const std::int64_t count : kCounts) {
      const ReduceScale average{1.0, 1.0, size};
      cases.push_back({.dtype = dtype, .count = count, .scale = average, .in_place = true});
      cases.push_back({.dtype = dtype,
                       .count = std::min<std::int64_t>(count, 4099),
                       .scale = average,
                       .unaligned = true});
    }
    for (const ReduceScale& scale :
         {ReduceScale{0.5, 1.0, 1}, ReduceScale{1.0, 0.3, 1}, ReduceScale{1.25, 0.75, size}}) {
      for (const std::int64_t count : {7, 1023}) {
        cases.push_back({.dtype = dtype, .count = count, .scale = scale, .in_place = count == 7});
      }
    }
    cases.push_back({.op = ReduceOp::kMax, .dtype = dtype, .count = 1023, .scale = {-2.0, 0.5, 1}});
  }
}

void add_reducescatters(std::vector<Case>& cases, int size) {
  for (int number = 0; number < kDataTypeCount; ++number) {
    const DataType dtype = dtype_number(number);
    for (const ReduceOp op : kOps) {
      for (const std::int64_t count : kCounts) {
        if (left_out(dtype, op, count)) continue;
        const Case one{.kind = OpKind::kReducescatter, .op = op, .dtype = dtype, .count = count};
        for (const Blocks blocks : {Blocks::kEqual, Blocks::kRagged}) {
          if (count == kLarge && blocks == Blocks::kEqual && op != ReduceOp::kSum) {
            continue;
          }
          cases.push_back(one);
          cases.back().blocks = blocks;
          cases.back().unaligned = blocks == Blocks::kRagged;
        }
      }
    }
    if (dtype != DataType::kBool) {
      for (const ReduceScale& scale : {ReduceScale{1.0, 1.0, size}, ReduceScale{1.25, 0.3, 1}}) {
        cases.push_back({.kind = OpKind::kReducescatter,
                         .dtype = dtype,
                         .count = 1023,
                         .blocks = Blocks::kRagged,
                         .scale = scale});
      }
    }
  }
}

void add_copies(std::vector<Case>& cases, OpKind kind, int size) {
  for (int number = 0; number < kDataTypeCount; ++number) {
    for (const std::int64_t count : kCounts) {
      for (const bool unaligned : {false, true}) {
        const Case one{
            .kind = kind, .dtype = dtype_number(number), .count = count, .unaligned = unaligned};
        if (kind == OpKind::kBroadcast) {
          for (int root = 0; root < size; ++root) {
            if (count == kLarge && root != number % size) {
              continue;
            }
            cases.push_back(one);
            cases.back().root = root;
            cases.back().in_place = (root + number) % 2 == 0;
            cases.push_back(cases.back());
            cases.back().in_place = !cases.back().in_place;
          }
          continue;
        }
        for (const Blocks blocks : {Blocks::kEqual, Blocks::kRagged}) {
          const bool common =
              unaligned == (blocks == Blocks::kRagged) && unaligned == (number % 2 == 0);
          if (count != kLarge || common) {
            cases.push_back(one);
            cases.back().blocks = blocks;
            if (kind != OpKind::kAllgather) {
              continue;
            }
            cases.push_back(cases.back());
            cases.back().in_place = true;
          }
        }
      }
    }
  }
}

}  // namespace

std::string describe(const Case& c) {
  std::ostringstream text;
  text << to_string(c.kind) << ' ' << to_string(c.op) << ' ' << to_string(c.dtype) << " count "
       << c.count << (c.blocks == Blocks::kRagged ? ", ragged" : "")
       << (c.in_place ? ", in place" : "") << (c.unaligned ? ", unaligned" : "");
  if (c.kind == OpKind::kBroadcast) {
    text << ", root " << c.root;
  }
  if (!c.scale.identity()) {
    text << ", scale " << c.scale.prescale << ' ' << c.scale.postscale << " / " << c.scale.divisor;
  }
  return text.str();
}

std::vector<Case> cases_of(OpKind kind, int size) {
  std::vector<Case> cases;
  if (kind == OpKind::kAllreduce) {
    add_allreduces(cases, size);
  } else if (kind == OpKind::kReducescatter) {
    add_reducescatters(cases, size);
  } else {
    add_copies(cases, kind, size);
  }
  // Every rank computes the inputs of all ranks, so many ranks with large tensors take most of the
  // time.
  if (size > 4 && !testing::long_run()) {
    std::erase_if(cases, [](const Case& one) {
      return one.count == kLarge && static_cast<int>(one.dtype) % 3 != 0;
    });
  }
  return cases;
}

std::vector<Case> some_cases_of(OpKind kind, int size, int every) {
  std::vector<Case> cases = cases_of(kind, size);
  if (testing::long_run()) return cases;
  // Random, because a fixed step would always leave out the same placement.
  std::mt19937 draw(static_cast<unsigned>(kind) + 1);
  std::erase_if(cases, [&](const Case&) { return draw() % static_cast<unsigned>(every) != 0; });
  return cases;
}

std::vector<Case> mixed_cases(int size) {
  std::vector<Case> cases;
  for (int i = 0; i < 60; ++i) {
    Case one;
    one.kind = kKinds[static_cast<std::size_t>(i) % std::size(kKinds)];
    one.dtype = i % 3 == 0 ? DataType::kFloat32 : i % 3 == 1 ? DataType::kInt8 : DataType::kFloat16;
    one.count = i % 7 == 6 ? kLarge : i % 4 == 3 ? 0 : 1 + 37 * i;
    one.blocks = i % 2 == 0 ? Blocks::kRagged : Blocks::kEqual;
    one.root = i % size;
    one.in_place = i % 4 < 2;
    one.unaligned = i % 5 == 1;
    cases.push_back(one);
  }
  return cases;
}

void Run::View::allocate(const Bytes& content, std::size_t shift) {
  begin = kGuardBytes + shift;
  size = content.size();
  memory.assign(begin + size + kGuardBytes, kGuard);
  std::copy(content.begin(), content.end(), memory.begin() + static_cast<std::ptrdiff_t>(begin));
}

bool Run::View::surroundings_intact() const {
  const auto is_guard = [](std::byte value) { return value == kGuard; };
  const auto first = memory.begin() + static_cast<std::ptrdiff_t>(begin);
  return std::all_of(memory.begin(), first, is_guard) &&
         std::all_of(first + static_cast<std::ptrdiff_t>(size), memory.end(), is_guard);
}

Run::Run(const Case& one, int rank, int size, std::uint64_t seed, std::pmr::memory_resource& memory)
    : case_(one), rank_(rank), size_(size), seed_(seed), input_(memory), output_(memory) {
  switch (case_.kind) {
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      prepare_reduction();
      break;
    case OpKind::kBroadcast:
      prepare_broadcast();
      break;
    default:
      prepare_blocks();
      break;
  }
}

/// Elements that `from` sends to `to` (allgather: that `from` contributes; reducescatter: that `to`
/// receives).
std::int64_t Run::block(int from, int to) const {
  if (case_.kind == OpKind::kReducescatter) {
    const std::int64_t begin = case_.count * to / size_;
    const std::int64_t end = case_.count * (to + 1) / size_;
    if (case_.blocks == Blocks::kEqual) {
      return end - begin;
    }
    // Every second block is empty, and its elements belong to the block before.
    if (to % 2 == 1) {
      return 0;
    }
    return case_.count * std::min(to + 2, size_) / size_ - begin;
  }
  if (case_.blocks == Blocks::kEqual) {
    return case_.count;
  }
  return (case_.count * ((from + 2 * to + 1) % 3) + 1) / 2;
}

/// The input of a rank (alltoall: its block for `to`).
Bytes Run::input_of(int rank, int to) const {
  const std::int64_t count = case_.kind == OpKind::kAllgather || case_.kind == OpKind::kAlltoall
                                 ? block(rank, to)
                                 : case_.count;
  return make_input(count, case_.dtype, case_.op, rank,
                    seed_ * 1024 + static_cast<std::uint64_t>(to));
}

void Run::prepare_reduction() {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < size_; ++rank) {
    inputs.push_back(input_of(rank, 0));
  }
  expected_ = reference_reduce(inputs, case_.dtype, case_.op, case_.scale);
  if (case_.kind == OpKind::kReducescatter) {
    for (int rank = 0; rank < size_; ++rank) {
      counts_.push_back(block(0, rank));
    }
    const auto own = counts_.begin() + rank_;
    const auto width = static_cast<std::int64_t>(size_of(case_.dtype));
    const auto begin =
        expected_.begin() + std::accumulate(counts_.begin(), own, std::int64_t{0}) * width;
    expected_ = Bytes(begin, begin + *own * width);
  }
  aliased_ = case_.kind == OpKind::kAllreduce && case_.in_place;
  place(inputs[static_cast<std::size_t>(rank_)]);
}

void Run::prepare_broadcast() {
  expected_ = input_of(case_.root, 0);
  aliased_ = case_.in_place && rank_ == case_.root;
  place(rank_ == case_.root ? expected_ : Bytes());
}

void Run::prepare_blocks() {
  const bool personal = case_.kind == OpKind::kAlltoall;
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  for (int other = 0; other < size_; ++other) {
    counts_.push_back(block(other, personal ? rank_ : 0));
    received.push_back(input_of(other, personal ? rank_ : 0));
    if (personal) {
      send_counts_.push_back(block(rank_, other));
      sent.push_back(input_of(rank_, other));
    }
  }
  expected_ = join(received);
  aliased_ = !personal && case_.in_place;
  for (int before = 0; aliased_ && before < rank_; ++before) {
    own_begin_ += received[static_cast<std::size_t>(before)].size();
  }
  place(personal ? join(sent) : received[static_cast<std::size_t>(rank_)]);
}

void Run::place(const Bytes& input) {
  const auto shift = static_cast<std::size_t>(case_.unaligned ? 2 * (rank_ % 8) + 1 : 0);
  original_input_ = input;
  if (!aliased_) {
    input_.allocate(input, shift);
  }
  Bytes output(expected_.size(), std::byte{0x5a});
  if (aliased_) {
    std::copy(input.begin(), input.end(), output.begin() + static_cast<std::ptrdiff_t>(own_begin_));
  }
  output_.allocate(output, case_.unaligned ? 16 - shift : 0);
}

std::unique_ptr<Work> Run::launch(Channel& channel) {
  Collective collective;
  collective.kind = case_.kind;
  collective.op = case_.op;
  collective.dtype = case_.dtype;
  collective.scale = case_.scale;
  collective.root = case_.root;
  collective.count =
      case_.kind == OpKind::kAllreduce || case_.kind == OpKind::kBroadcast ? case_.count : 0;
  collective.counts = counts_;
  collective.send_counts = send_counts_;
  const std::byte* const source = aliased_ ? output_.data() + own_begin_ : input_.data();
  return channel.launch(collective, {source, original_input_.size()},
                        {output_.data(), output_.size});
}

void Run::check() const {
  const std::int64_t wrong = first_difference(output_.data(), expected_, case_.dtype);
  EXPECT_EQ(wrong, -1) << "rank " << rank_ << " of " << size_ << ", " << describe(case_)
                       << ": the first wrong element";
  EXPECT_TRUE(output_.surroundings_intact()) << "rank " << rank_ << " of " << size_ << ", "
                                             << describe(case_) << ": wrote outside its output";
  if (!aliased_) {
    EXPECT_EQ(first_difference(input_.data(), original_input_, case_.dtype), -1)
        << "rank " << rank_ << " of " << size_ << ", " << describe(case_) << ": the input changed";
    EXPECT_TRUE(input_.surroundings_intact()) << "rank " << rank_ << " of " << size_ << ", "
                                              << describe(case_) << ": wrote around its input";
  }
}

void run_cases(Harness& harness, const std::vector<Case>& cases) {
  std::uint64_t seed = 0;
  for (const Case& one : cases) {
    Run run(one, harness.rank(), harness.size(), ++seed, harness.memory());
    const std::unique_ptr<Work> work = run.launch(harness.channel());
    harness.run(*work);
    run.check();
  }
}

void run_back_to_back(Harness& harness, const std::vector<Case>& cases) {
  std::deque<Run> runs;  // a Run does not move
  for (const Case& one : cases) {
    runs.emplace_back(one, harness.rank(), harness.size(), runs.size() + 1, harness.memory());
  }
  for (Run& run : runs) {
    const std::unique_ptr<Work> work = run.launch(harness.channel());
    harness.run(*work);
  }
  for (const Run& run : runs) {
    run.check();
  }
}

}  // namespace hvd::conformance
