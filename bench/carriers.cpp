#include "bench/commands.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <stdexcept>
#include <utility>

#include "bench/exercise.h"
#include "bench/streams.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;

enum Turn : std::size_t { kHvdMpi, kHvdUcx, kPlainMpi, kPlainUcx, kTurns };
constexpr std::array<const char*, kTurns> kTurnNames = {"hvd-mpi", "hvd-ucx", "mpi", "ucx"};

TensorView tensor(std::span<float> data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {reinterpret_cast<std::byte*>(data.data()), count, DataType::kFloat32, {}, {count}};
}

Operation allreduce(std::string name, std::span<float> data) {
  Submission submission;
  submission.name = std::move(name);
  submission.input = submission.output = tensor(data);
  return submit(std::move(submission));
}

void finish(const Operation& operation) {
  operation.wait();
  operation.status().raise_if_error();
}

class Rounds {
 public:
  Rounds(const Session& session, const CarriersOptions& options)
      : session_(session),
        options_(options),
        arena_(Exercise::floats_needed(
            *std::max_element(options.sizes.begin(), options.sizes.end()), session.size())) {
    for (const std::size_t bytes : options.sizes)
      exercises_.emplace_back(OpKind::kAllreduce, bytes, session.rank(), session.size(), arena_);
    for (auto& samples : samples_) samples.resize(options.sizes.size());
  }

  void run() {
    std::array<std::size_t, kTurns> order{};
    std::iota(order.begin(), order.end(), 0);
    // The first round is not counted. In it hvd over UCX runs before plain UCX, so that hvd loads
    // UCX.
    for (const std::size_t turn : order) play(static_cast<Turn>(turn));
    forget();
    std::mt19937 random(1);  // the same on every rank
    for (int round = 0; round < options_.rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t turn : order) play(static_cast<Turn>(turn));
    }
    for (auto& of_turn : samples_)
      for (auto& samples : of_turn) session_.slowest(samples);
    for (auto& samples : first_) session_.slowest(samples);
  }

  Json result() const {
    Json rows = Json::array();
    for (std::size_t size = 0; size < exercises_.size(); ++size) {
      Json row = {{"bytes", exercises_[size].bytes()}};
      for (std::size_t turn = 0; turn < kTurns; ++turn)
        row["p50_us"][kTurnNames[turn]] = json_number(summarize(samples_[turn][size]).p50 * 1e6);
      const auto ratio = [&](Turn ucx, Turn mpi) {
        return median_ratio(samples_[ucx][size], samples_[mpi][size]);
      };
      const double hvd = ratio(kHvdUcx, kHvdMpi);
      const double plain = ratio(kPlainUcx, kPlainMpi);
      row["ratio_of_hvd"] = json_number(hvd);
      row["ratio_of_streams"] = json_number(plain);
      row["ratio_of_ratios"] = json_number(hvd / plain);
      rows.push_back(std::move(row));
    }
    Json first = {{"tensors", options_.tensors}};
    for (const Turn turn : {kHvdMpi, kHvdUcx})
      first["p50_us"][kTurnNames[turn]] = json_number(summarize(first_[turn]).p50 * 1e6);
    first["ratio"] = json_number(median_ratio(first_[kHvdUcx], first_[kHvdMpi]));
    return {{"correct", session_.all(correct_)},
            {"rounds", options_.rounds},
            {"rows", std::move(rows)},
            {"first_negotiation", std::move(first)}};
  }

 private:
  void play(Turn turn) {
    if (turn == kHvdMpi || turn == kHvdUcx) {
      play_hvd(turn);
    } else {
      play_stream(turn);
    }
  }

  /// Starts hvd, measures all sizes, and shuts hvd down.
  void play_hvd(Turn turn) {
    session_.align();
    session_.join(turn == kHvdUcx ? session_.init_method() : "mpi://");
    session_.align();
    first_[turn].push_back(negotiate());
    for (std::size_t size = 0; size < exercises_.size(); ++size) {
      const Exercise& exercise = exercises_[size];
      const std::string name = "carriers." + std::to_string(exercise.bytes());
      const auto once = [&] { finish(allreduce(name, exercise.input())); };
      exercise.fill();
      exercise.spoil();
      once();
      correct_ = correct_ && !exercise.fault();
      std::fill(exercise.input().begin(), exercise.input().end(), 0.0F);  // sums of 0 stay 0
      samples_[turn][size].push_back(time(once));
    }
    session_.align();
    shutdown();
  }

  void play_stream(Turn turn) {
    session_.align();
    const auto stream =
        turn == kPlainMpi ? make_mpi_stream(session_.peers()) : make_ucx_stream(session_.peers());
    for (std::size_t size = 0; size < exercises_.size(); ++size) {
      const Exercise& exercise = exercises_[size];
      const std::span<float> out = exercise.input();
      const std::span<float> in = exercise.spare();
      const auto once = [&] { stream->exchange(std::as_bytes(out), std::as_writable_bytes(in)); };
      std::fill(out.begin(), out.end(), static_cast<float>(session_.rank() + 1));
      once();
      const auto theirs = static_cast<float>(2 - session_.rank());
      correct_ = correct_ &&
                 std::count(in.begin(), in.end(), theirs) == static_cast<std::ptrdiff_t>(in.size());
      samples_[turn][size].push_back(time(once));
    }
    session_.align();
  }

  /// The median of repetitions. They follow each other without a pause, which keeps the ranks
  /// together.
  template <class Once>
  double time(const Once& once) {
    constexpr int kWarmUps = 10;  // hvd skips the negotiation only after some equal steps
    session_.align();
    double warm = 0;
    for (int i = 0; i < kWarmUps; ++i) {
      const auto begin = Clock::now();
      once();
      warm = seconds_since(begin);
    }
    const int repetitions = repetitions_for(session_.slowest(warm), options_.repetitions);
    std::vector<double> seconds;
    for (int i = 0; i < repetitions; ++i) {
      const auto begin = Clock::now();
      once();
      seconds.push_back(seconds_since(begin));
    }
    return percentile(seconds, 0.5);
  }

  /// Measures the negotiation of one operation per parameter, as in the first step of a training,
  /// right after the runtime has started.
  double negotiate() {
    std::vector<float> data(static_cast<std::size_t>(options_.tensors),
                            static_cast<float>(session_.rank() + 1));
    const auto begin = Clock::now();
    std::vector<Operation> operations;
    for (std::size_t i = 0; i < data.size(); ++i)
      operations.push_back(allreduce("carriers.parameter." + std::to_string(i), {&data[i], 1}));
    for (const Operation& operation : operations) finish(operation);
    const double seconds = seconds_since(begin);
    correct_ = correct_ && std::count(data.begin(), data.end(), 3.0F) ==
                               static_cast<std::ptrdiff_t>(data.size());
    return seconds;
  }

  void forget() {
    for (auto& of_turn : samples_)
      for (auto& samples : of_turn) samples.clear();
    for (auto& samples : first_) samples.clear();
  }

  const Session& session_;
  const CarriersOptions& options_;
  const Arena arena_;
  std::vector<Exercise> exercises_;
  std::array<std::vector<std::vector<double>>, kTurns> samples_;  ///< by size and round
  std::array<std::vector<double>, kTurns> first_;  ///< first negotiation of hvd's turns, by round
  bool correct_ = true;
};

void print(const Json& result, std::ostream& out) {
  const auto cell = [](const Json& value) {
    return number_text(value.is_number() ? value.get<double>() : 0.0 / 0.0);
  };
  Table table({"size", "hvd-mpi us", "hvd-ucx us", "mpi us", "ucx us", "hvd: ucx/mpi",
               "plain: ucx/mpi", "ratio"});
  for (const Json& row : result["rows"]) {
    std::vector<std::string> cells = {bytes_text(row["bytes"].get<std::size_t>())};
    for (const char* name : kTurnNames) cells.push_back(cell(row["p50_us"][name]));
    for (const char* name : {"ratio_of_hvd", "ratio_of_streams", "ratio_of_ratios"})
      cells.push_back(cell(row[name]));
    table.add(std::move(cells));
  }
  out << "\nallreduce by hvd, and plain messages of the same size, medians of " << result["rounds"]
      << " rounds\n";
  table.print(out);
  const Json& first = result["first_negotiation"];
  out << "\nfirst negotiation of " << first["tensors"] << " tensors: hvd-mpi "
      << cell(first["p50_us"]["hvd-mpi"]) << " us, hvd-ucx " << cell(first["p50_us"]["hvd-ucx"])
      << " us, ratio " << cell(first["ratio"]) << '\n';
}

}  // namespace

Json run_carriers(const Session& session, const CarriersOptions& options, std::ostream& out) {
  if (session.size() != 2 || session.init_method().empty()) {
    throw std::runtime_error(
        "carriers: expected two ranks and --init-method (where they meet for a job over UCX), "
        "got " +
        std::to_string(session.size()) + " and '" + session.init_method() + "'");
  }
  shutdown();
  Rounds rounds(session, options);
  rounds.run();
  session.join(session.init_method());
  Json result = rounds.result();
  if (session.rank() == 0) print(result, out);
  return result;
}

}  // namespace hvd::bench
