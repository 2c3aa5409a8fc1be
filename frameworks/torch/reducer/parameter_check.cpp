#include "reducer/parameter_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"

namespace hvd::libtorch {
namespace {

constexpr std::size_t kSigns = 1024;
/// A first trial may be over before the first of the regular checks.
constexpr std::uint64_t kSoon = 10;
// Of one tolerance, in a projection as it travels.
constexpr double kSteps = 16;
constexpr std::int32_t kNotFinite = std::numeric_limits<std::int32_t>::min();

std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

/// 1 and -1 as if at random.
const std::array<float, kSigns>& signs() {
  static const std::array<float, kSigns> table = [] {
    std::array<float, kSigns> values{};
    for (std::size_t i = 0; i < kSigns; ++i) values[i] = (mixed(i + 1) & 1U) != 0 ? 1.0F : -1.0F;
    return values;
  }();
  return table;
}

std::uint64_t hash_of(const std::byte* bytes, std::size_t count) {
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + i + 8 * lane, 8);
      lanes[lane] = std::rotl((lanes[lane] ^ word) * 0x9e3779b97f4a7c15U, 29);
    }
  }
  std::uint64_t hash = count;
  for (; i < count; ++i) hash = hash * 257 + static_cast<std::uint64_t>(bytes[i]);
  for (const std::uint64_t lane : lanes) hash = mixed(hash ^ lane);
  return hash;
}

struct Sums {
  double along = 0;  ///< with the signs
  double squares = 0;
};

template <class T>
Sums sums_of(const T* values, std::int64_t count) {
  constexpr std::size_t kLanes = 16;
  const float* const sign = signs().data();
  Sums sums;
  for (std::int64_t begin = 0; begin < count; begin += static_cast<std::int64_t>(kSigns)) {
    const T* const block = values + begin;
    const auto length = static_cast<std::size_t>(std::min<std::int64_t>(count - begin, kSigns));
    std::array<T, kLanes> along{};
    std::array<T, kLanes> squares{};
    const auto add = [&](std::size_t i, std::size_t lane) {
      along[lane] += static_cast<T>(sign[i]) * block[i];
      squares[lane] += block[i] * block[i];
    };
    std::size_t i = 0;
    for (; i + kLanes <= length; i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (; i < length; ++i) add(i, i % kLanes);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums.along += static_cast<double>(along[lane]);
      sums.squares += static_cast<double>(squares[lane]);
    }
  }
  return sums;
}

/// On a GPU: reads the values once, and waits for two numbers.
Sums sums_on_device(const torch::Tensor& flat) {
  const auto options = torch::TensorOptions().dtype(torch::kFloat32);
  const torch::Tensor all = torch::from_blob(const_cast<float*>(signs().data()),
                                             {static_cast<std::int64_t>(kSigns)}, options)
                                .to(flat.options().requires_grad(false));
  const std::int64_t rows = flat.numel() / all.numel();
  const std::int64_t head = rows * all.numel();
  torch::Tensor along =
      (flat.narrow(0, head, flat.numel() - head) * all.narrow(0, 0, flat.numel() - head))
          .sum()
          .to(torch::kFloat32);
  if (rows > 0)
    along =
        along + flat.narrow(0, 0, head).view({rows, all.numel()}).mv(all).to(torch::kFloat32).sum();
  const torch::Tensor both = torch::stack({along, flat.norm().to(torch::kFloat32)}).cpu();
  const double norm = both[1].item<double>();
  return {.along = both[0].item<double>(), .squares = norm * norm};
}

/// Dense, contiguous, real.
torch::Tensor flattened(const torch::Tensor& parameter) {
  torch::Tensor values = parameter.detach().resolve_conj().resolve_neg();
  if (values.is_complex()) values = torch::view_as_real(values);
  return values.contiguous().view({-1});
}

std::uint64_t hash_of(const torch::Tensor& parameter) {
  const torch::Tensor values = flattened(parameter).cpu();
  return hash_of(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
}

/// What may differ, relative to the norm. Every rank applies the same gradients, so what differs
/// without a fault is the roundings of processors of different kinds, which add up over the steps.
double tolerance_of(torch::ScalarType type) {
  if (type == torch::kFloat16) return 1e-2;
  return type == torch::kBFloat16 ? 3e-2 : 3e-5;
}

Sums sums_of(const torch::Tensor& parameter) {
  // The most common kind, for which nothing is allocated.
  if (parameter.is_cpu() && parameter.scalar_type() == torch::kFloat32 &&
      parameter.is_contiguous() && !parameter.is_neg()) {
    return sums_of(parameter.const_data_ptr<float>(), parameter.numel());
  }
  const torch::Tensor values = flattened(parameter);
  if (values.is_cuda()) return sums_on_device(values);
  if (values.scalar_type() == torch::kFloat64)
    return sums_of(values.const_data_ptr<double>(), values.numel());
  const torch::Tensor single = values.to(torch::kFloat32);
  return sums_of(single.const_data_ptr<float>(), single.numel());
}

/// A parameter's projection on a direction that looks random, relative to its norm; in tolerances.
double projection_of(const torch::Tensor& parameter) {
  const Sums sums = sums_of(parameter);
  if (sums.squares == 0) return 0;
  return sums.along / std::sqrt(sums.squares) /
         tolerance_of(c10::toRealValueType(parameter.scalar_type()));
}

std::int32_t quantized(double projection) {
  constexpr double kMost = std::numeric_limits<std::int32_t>::max();
  if (!std::isfinite(projection)) return kNotFinite;
  return static_cast<std::int32_t>(std::clamp(std::round(projection * kSteps), -kMost, kMost));
}

/// Of values that travelled as quantized().
bool apart(std::int64_t low, std::int64_t high, double tolerances) {
  if (low == kNotFinite) return high != kNotFinite;
  return static_cast<double>(high - low) > tolerances * kSteps + 2;
}

/// One number for all parameters: the hashes of all, or the projections of those that are trained
/// added with signs, so that what is off in several does not cancel out.
std::uint32_t code_of(std::span<const torch::Tensor> parameters, bool exact) {
  if (exact) {
    std::uint64_t hash = parameters.size();
    for (const torch::Tensor& parameter : parameters) hash = mixed(hash ^ hash_of(parameter));
    return static_cast<std::uint32_t>(hash ^ (hash >> 32U));
  }
  double sum = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].requires_grad())
      sum += static_cast<double>(signs()[i % kSigns]) * projection_of(parameters[i]);
  }
  return static_cast<std::uint32_t>(quantized(sum));
}

std::uint32_t code_of(const std::vector<std::string>& lines) {
  std::uint64_t hash = lines.size();
  for (const std::string& line : lines) {
    const auto bytes = std::as_bytes(std::span(line));
    hash = mixed(hash ^ hash_of(bytes.data(), bytes.size()));
  }
  return static_cast<std::uint32_t>(hash ^ (hash >> 32U));
}

std::string list_of(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kMost ? text + " and " + std::to_string(ranks.size() - kMost) + " more"
                              : text;
}

/// "rank 2 from ranks 0, 1, 3": those that most agree with are right. @param values one for each
/// rank  @param same of two of them
template <class Same>
std::string who_differs(const std::vector<std::int64_t>& values, const std::vector<int>& ranks,
                        const Same& same) {
  std::vector<int> most;
  std::vector<int> others;
  for (const std::int64_t candidate : values) {
    std::vector<int> with;
    std::vector<int> without;
    for (std::size_t r = 0; r < values.size(); ++r)
      (same(values[r], candidate) ? with : without).push_back(ranks[r]);
    if (with.size() <= most.size()) continue;
    most = with;
    others = without;
  }
  return list_of(others) + " from " + list_of(most);
}

}  // namespace

ParameterCheck::ParameterCheck(const GradientReduction& how, std::vector<std::string> names,
                               std::vector<torch::Tensor> parameters)
    : who_(how.who),
      scope_(how.scope),
      every_(how.check_every),
      set_(how.process_set),
      average_(how.op == ReduceOp::kAverage),
      compressed_(how.compression != Compression::kNone),
      options_(how.options),
      names_(std::move(names)),
      parameters_(std::move(parameters)),
      trained_(parameters_.size()) {}

void ParameterCheck::add(const std::string& name, const torch::Tensor& parameter) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(cycles_ == 0);
  names_.push_back(name);
  parameters_.push_back(parameter);
}

void ParameterCheck::go_on_after_updates() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(cycles_ == 0);
  cycles_ = 1;
  retry_ = true;
}

// 16-bit floats hold small integers only, and an average rounds them once more.
std::size_t ParameterCheck::room(const torch::Tensor& like) {
  bits_ = std::size_t{compressed_ || c10::isReducedFloatingType(like.scalar_type()) ? 4U : 16U};
  return set_.size() == 1 ? 0 : static_cast<std::size_t>(set_.size()) * places();
}

bool ParameterCheck::due() const {
  return every_ > 0 && (cycles_ == 0 || (cycles_ == kSoon && every_ > static_cast<int>(kSoon)) ||
                        retry_ || since_ + 1 >= every_);
}

void ParameterCheck::write_code(std::span<float> place, std::uint32_t code) const {
  for (std::size_t i = 0; i < 32 / bits_; ++i)
    place[i] = static_cast<float>((code >> (i * bits_)) & ((1U << bits_) - 1));
}

// A rank's places: in which way it checks, whether once more, its checksum, that of its options.
void ParameterCheck::write(std::span<float> room) const {
  std::fill(room.begin(), room.end(), 0.0F);
  if (room.empty() || !due()) return;
  const torch::NoGradGuard no_grad;
  const std::span<float> own =
      room.subspan(static_cast<std::size_t>(set_.rank()) * places(), places());
  const std::uint32_t code = code_of(parameters_, mode() == Mode::kExact);
  own[0] = static_cast<float>(mode());
  own[1] = retry_ ? 1.0F : 0.0F;
  write_code(own.subspan(2), code);
  if (options_) write_code(own.subspan(2 + 32 / bits_), code_of(options_()));
}

/// @pre every rank has contributed
std::uint32_t ParameterCheck::decode(float reduced) const {
  return static_cast<std::uint32_t>(
      std::lround(static_cast<double>(reduced) * (average_ ? set_.size() : 1)));
}

std::uint32_t ParameterCheck::decode_code(std::span<const float> place) const {
  std::uint32_t code = 0;
  for (std::size_t i = 0; i < 32 / bits_; ++i) code |= decode(place[i]) << (i * bits_);
  return code;
}

bool ParameterCheck::differs(std::span<const float> reduced) {
  ++cycles_;
  ++since_;
  retry_ = false;
  bool any = false;
  bool all = true;
  bool again = false;
  for (std::size_t at = 0; at < reduced.size(); at += places()) {
    any = any || reduced[at] != 0;
    all = all && reduced[at] != 0;
    again = again || reduced[at + 1] != 0;
  }
  if (!any) return false;
  for (std::size_t at = 0; all && at < reduced.size(); at += places())
    all = decode(reduced[at]) == decode(reduced[0]);
  if (!all) {
    retry_ = !again;
    if (again) since_ = 0;
    return false;
  }
  since_ = 0;
  last_ = static_cast<Mode>(decode(reduced[0]));
  options_apart_ = options_differ(reduced);
  return options_apart_ || codes_differ(reduced);
}

bool ParameterCheck::options_differ(std::span<const float> reduced) const {
  if (!options_) return false;
  const auto of_rank_at = [&](std::size_t at) {
    return decode_code(reduced.subspan(at + 2 + 32 / bits_, 32 / bits_));
  };
  for (std::size_t at = 0; at < reduced.size(); at += places()) {
    if (of_rank_at(at) != of_rank_at(0)) return true;
  }
  return false;
}

bool ParameterCheck::codes_differ(std::span<const float> reduced) {
  std::int64_t low = std::numeric_limits<std::int64_t>::max();
  std::int64_t high = std::numeric_limits<std::int64_t>::min();
  for (std::size_t at = 0; at < reduced.size(); at += places()) {
    const std::uint32_t code = decode_code(reduced.subspan(at + 2, 32 / bits_));
    low = std::min<std::int64_t>(low, static_cast<std::int32_t>(code));
    high = std::max<std::int64_t>(high, static_cast<std::int32_t>(code));
  }
  nonfinite_ = last_ == Mode::kProjection && high == kNotFinite;
  return last_ == Mode::kExact ? low != high
                               : apart(low, high, std::sqrt(static_cast<double>(trained_)));
}

/// Which is the first to differ, and where. Collective over the set. @pre differs()
std::string ParameterCheck::first_difference() const {
  const torch::NoGradGuard no_grad;
  const bool exact = last_ == Mode::kExact;
  std::vector<std::int64_t> own;
  for (const torch::Tensor& parameter : parameters_) {
    if (!exact && !parameter.requires_grad()) {
      own.push_back(0);
      continue;
    }
    own.push_back(exact ? static_cast<std::int64_t>(hash_of(parameter))
                        : quantized(projection_of(parameter)));
  }
  const torch::Tensor all = allgather(torch::tensor(own, torch::kInt64).unsqueeze(0),
                                      {.name = scope_ + ".checksums", .process_set = set_});
  const std::vector<int> ranks = set_.ranks();
  std::size_t worst = 0;
  double spread = -1;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const torch::Tensor column = all.select(1, static_cast<std::int64_t>(i)).contiguous();
    const std::vector<std::int64_t> values(column.const_data_ptr<std::int64_t>(),
                                           column.const_data_ptr<std::int64_t>() + column.numel());
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    if (exact ? *low != *high : apart(*low, *high, 1)) {
      const auto same = [&](std::int64_t a, std::int64_t b) {
        return exact ? a == b : !apart(std::min(a, b), std::max(a, b), 1);
      };
      return "'" + names_[i] + "' differs on " + who_differs(values, ranks, same);
    }
    const double distance = static_cast<double>(*high) - static_cast<double>(*low);
    if (distance > spread) {
      spread = distance;
      worst = i;
    }
  }
  return "'" + names_[worst] + "' differs most";
}

void ParameterCheck::warn_of_nonfinite() {
  if (!nonfinite_ || warned_) return;
  warned_ = true;
  TORCH_WARN(who_, " (", scope_, "): after ", cycles_ - 1,
             " reductions of gradients the parameters contain inf or nan on every rank, as the "
             "gradients of one rank did before. To find out which rank and parameter were the "
             "first, run again with DistributedOptimizerOptions::error_if_nonfinite");
}

/// Collective over the set.
void ParameterCheck::throw_of_options() const {
  const auto all = allgather_object(options_(), {.name = scope_ + ".options", .process_set = set_});
  const std::vector<int> ranks = set_.ranks();
  std::string difference = "they have become equal again";
  for (std::size_t r = 1; r < all.size(); ++r) {
    const auto [first, other] =
        std::mismatch(all[0].begin(), all[0].end(), all[r].begin(), all[r].end());
    if (first == all[0].end() || other == all[r].end()) continue;
    difference = "rank " + std::to_string(ranks[0]) + " has " + *first + ", rank " +
                 std::to_string(ranks[r]) + " has " + *other;
    break;
  }
  throw DivergedError(
      who_ + " (" + scope_ + "): the options of the ranks are not the same: " + difference +
      "; expected the same on every rank, as each updates a part of the parameters. "
      "A scheduler that decides by a metric needs the same metric on every rank: "
      "allreduce() it first. (check_every, HVD_CHECK_EVERY)");
}

void ParameterCheck::compare(std::span<const float> reduced) {
  const std::uint64_t cycle = cycles_;
  if (!differs(reduced)) {
    warn_of_nonfinite();
    return;
  }
  if (options_apart_) throw_of_options();
  std::string difference;
  try {
    difference = first_difference();
  } catch (const Error& error) {
    difference = std::string("which one could not be found out: ") + error.what();
  }
  const std::string after = cycle == 0
                                ? "before the first update"
                                : "after " + std::to_string(cycle) + " reductions of gradients";
  throw DivergedError(
      who_ + " (" + scope_ + "): " + after + " the parameters of the ranks are not the same: " +
      difference + "; expected equal parameters on every rank. What is usually forgotten: " +
      (cycle == 0 ? "broadcast_parameters() before training, or after a checkpoint was loaded on "
                    "one rank; step() of the " +
                        who_ +
                        ", instead of that of the optimizer it wraps. Parameters that each rank is "
                        "to have of its own belong into another optimizer, and if they are frozen, "
                        "not among the parameters that the " +
                        who_ + " is constructed with"
                  : "broadcast_optimizer_state() after a checkpoint was loaded on one rank; step() "
                    "of the " +
                        who_ +
                        ", instead of that of the optimizer it wraps; a step() or a change of the "
                        "learning rate that one "
                        "rank skips; broadcast_parameters() and "
                        "broadcast_optimizer_state() from the rank that join() returns, after it") +
      ". (check_every, HVD_CHECK_EVERY)");
}

}  // namespace hvd::libtorch
