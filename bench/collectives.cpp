#include "bench/commands.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "bench/exercise.h"
#include "bench/peers.h"
#include "hvd/error.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kGloo = "gloo";
constexpr int kCallsOfLargeLoop = 4;

TensorView view(std::span<float> data) {
  const auto count = static_cast<std::int64_t>(data.size());
  return {reinterpret_cast<std::byte*>(data.data()), count, DataType::kFloat32, {}, {count}};
}

/// Uses the public interface as an adapter does: it builds a new submission for every call, always
/// with the same name.
class Hvd final : public Contender {
 public:
  Hvd(const Exercise& exercise, Progress progress)
      : exercise_(exercise),
        progress_(progress),
        name_(std::string(to_string(exercise.kind())) + "." + std::to_string(exercise.bytes())) {}
  std::string name() const override { return "hvd"; }

  void run() override {
    const Operation operation = submit(describe(), progress_);
    operation.wait();
    operation.status().raise_if_error();
  }

  /// Waits until hvd's thread sleeps. Before it sleeps it polls for more work for a short time,
  /// which would make MPI several times slower.
  void settle() override { std::this_thread::sleep_for(std::chrono::microseconds(300)); }

 private:
  OperationParameters parameters() const {
    const auto members = static_cast<std::size_t>(exercise_.ranks());
    switch (exercise_.kind()) {
      case OpKind::kAlltoall:
        return Alltoall{
            std::vector<std::int64_t>(members, static_cast<std::int64_t>(exercise_.block()))};
      case OpKind::kAllgather:
        return Allgather{};
      case OpKind::kBroadcast:
        return Broadcast{};
      case OpKind::kReducescatter:
        return Reducescatter{};
      default:
        return Allreduce{};
    }
  }

  Submission describe() const {
    Submission submission;
    submission.name = name_;
    submission.parameters = parameters();
    submission.input = view(exercise_.input());
    switch (exercise_.kind()) {
      case OpKind::kAlltoall:
      case OpKind::kAllgather:
        submission.allocate_output = [this](const OutputSizes&) {
          return view(exercise_.output());
        };
        break;
      default:
        submission.output = view(exercise_.output());
        break;
    }
    return submission;
  }

  const Exercise& exercise_;
  Progress progress_;
  std::string name_;
};

/// Loops of large messages are shorter, so that a row takes seconds.
int calls_of_loop(std::size_t bytes, int wanted) {
  return bytes <= kChunkBytes ? wanted : std::min(wanted, kCallsOfLargeLoop);
}

/// All contenders at one kind and size.
class Match {
 public:
  Match(const Session& session, const CollectivesOptions& options, Exercise exercise)
      : session_(session),
        options_(options),
        exercise_(std::move(exercise)),
        calls_(calls_of_loop(exercise_.bytes(), options.loop)) {
    contenders_.push_back(std::make_unique<Hvd>(exercise_, options.progress));
    for (auto& peer : make_peers(exercise_, session.peers()))
      contenders_.push_back(std::move(peer));
    samples_.resize(contenders_.size());
    loop_samples_.resize(contenders_.size());
  }

  Json play() {
    const bool correct = check();
    const CoreDistance before = session_.core_distance();
    measure();
    Json result = row(correct);
    result["cores"] = {{"before", to_json(before)}, {"after", to_json(session_.core_distance())}};
    return result;
  }

 private:
  bool check() {
    bool correct = true;
    for (const auto& contender : contenders_) {
      if (!contender->does_the_exercise()) continue;
      exercise_.fill();
      exercise_.spoil();
      session_.align();
      contender->run();
      const auto fault = exercise_.fault();
      // Printed in one piece, because the ranks share the terminal.
      if (fault) std::cerr << "hvd-bench: " + contender->name() + ": " + *fault + "\n";
      correct = session_.all(!fault.has_value()) && correct;
    }
    return correct;
  }

  /// Times `calls` calls, one directly after another. @return seconds per call
  double time(Contender& contender, int calls) const {
    exercise_.fill();
    // If a rank slept, the ranks leave the first barrier as far apart as they reached it. The
    // second one brings them together.
    session_.align();
    session_.align();
    const auto begin = Clock::now();
    for (int call = 0; call < calls; ++call) contender.run();
    const double seconds = seconds_since(begin) / calls;
    contender.settle();
    return seconds;
  }

  /// @return seconds of a single call, and of one call of a loop
  std::pair<double, double> time_both(Contender& contender) const {
    const double single = time(contender, 1);
    return {single, calls_ > 1 ? time(contender, calls_) : 0};
  }

  void measure() {
    constexpr int kWarmUps = 3;
    double round = 0;
    for (int i = 0; i < kWarmUps; ++i) {
      session_.align();
      const auto begin = Clock::now();
      for (const auto& contender : contenders_) time_both(*contender);
      round = session_.slowest(seconds_since(begin));
    }
    repetitions_ = repetitions_for(round, options_.repetitions);
    std::vector<std::size_t> order(contenders_.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(1);  // the same on every rank
    for (int repetition = 0; repetition < repetitions_; ++repetition) {
      // The order is random, so that no contender always runs after the same other one, whose data
      // in the cache might affect it.
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t index : order) {
        const auto [single, looped] = time_both(*contenders_[index]);
        samples_[index].push_back(single);
        if (calls_ > 1) loop_samples_[index].push_back(looped);
      }
    }
    for (auto& samples : samples_) session_.slowest(samples);
    for (auto& samples : loop_samples_) session_.slowest(samples);
  }

  Json row(bool correct) const {
    Json row;
    row["kind"] = to_string(exercise_.kind());
    row["bytes"] = exercise_.bytes();
    row["repetitions"] = repetitions_;
    row["calls_of_loop"] = calls_;
    row["correct"] = correct;
    const double bytes = static_cast<double>(exercise_.bytes());
    for (std::size_t i = 0; i < contenders_.size(); ++i) {
      const Summary summary = summarize(samples_[i]);
      const double bandwidth = bytes / summary.p50 / 1e9;
      Json& entry = row["contenders"][contenders_[i]->name()];
      entry["p50_us"] = json_number(summary.p50 * 1e6);
      entry["p95_us"] = json_number(summary.p95 * 1e6);
      entry["p99_us"] = json_number(summary.p99 * 1e6);
      if (calls_ > 1) {
        const Summary looped = summarize(loop_samples_[i]);
        entry["loop"] = {{"p50_us", json_number(looped.p50 * 1e6)},
                         {"p95_us", json_number(looped.p95 * 1e6)}};
      }
      entry["algbw_gb_per_s"] = json_number(bandwidth);
      if (!contenders_[i]->does_the_exercise()) continue;
      entry["busbw_gb_per_s"] =
          json_number(bandwidth * bus_factor(exercise_.kind(), exercise_.ranks()));
    }
    for (const std::string& name : peer_names()) row["ratio_to"][name] = nullptr;
    row["loop_ratio_to"] = row["ratio_to"];
    for (std::size_t i = 1; i < contenders_.size(); ++i) {
      const std::string name = contenders_[i]->name();
      row["ratio_to"][name] = json_number(median_ratio(samples_[0], samples_[i]));
      row["loop_ratio_to"][name] = json_number(median_ratio(loop_samples_[0], loop_samples_[i]));
    }
    return row;
  }

  const Session& session_;
  const CollectivesOptions& options_;
  const Exercise exercise_;
  std::vector<std::unique_ptr<Contender>> contenders_;  // hvd first
  const int calls_;                                     // of a loop; 1: no loops
  std::vector<std::vector<double>> samples_;            // seconds of a single call, per contender
  std::vector<std::vector<double>> loop_samples_;       // seconds per call of a loop
  int repetitions_ = 0;
};

std::string cell(const Json& object, const char* key) {
  return object.contains(key) && object[key].is_number() ? number_text(object[key].get<double>())
                                                         : "-";
}

/// Adds to a row the results of gloo_peers.py at the same size, if there are any.
void add_gloo(Json& row, const Json& gloo) {
  const Json measured =
      gloo.value(row["kind"].get<std::string>(), Json::object()).value(row["bytes"].dump(), Json());
  if (!measured.is_object()) return;
  row["contenders"][kGloo] = measured;
  row["contenders"][kGloo]["not_interleaved"] = true;
  row["ratio_to"][kGloo] = json_number(row["contenders"]["hvd"]["p50_us"].get<double>() /
                                       measured["p50_us"].get<double>());
}

/// The peers that have a result in some row.
std::vector<std::string> peers_in(const Json& rows) {
  std::vector<std::string> peers = peer_names();
  peers.emplace_back(kGloo);
  std::erase_if(peers, [&](const std::string& peer) {
    return std::none_of(rows.begin(), rows.end(),
                        [&](const Json& row) { return row["contenders"].contains(peer); });
  });
  return peers;
}

/// The round trip between the cores of ranks 0 and 1 before and after a row was measured.
std::string round_trips(const Json& row) {
  const Json& cores = row["cores"];
  return cell(cores["before"], "round_trip_ns") + ".." + cell(cores["after"], "round_trip_ns");
}

void print_rows(const Json& rows, std::ostream& out) {
  const std::vector<std::string> peers = peers_in(rows);
  std::vector<std::string> headers = {"size",   "times",  "cores ns", "p50 us",
                                      "p95 us", "p99 us", "algbw",    "busbw"};
  for (const std::string& peer : peers) headers.push_back(peer + " us");
  for (const std::string& peer : peers) headers.push_back("/" + peer);
  headers.push_back("result");
  Table table(std::move(headers));
  for (const Json& row : rows) {
    const Json& all = row["contenders"];
    const Json& own = all["hvd"];
    std::vector<std::string> cells = {bytes_text(row["bytes"].get<std::size_t>()),
                                      std::to_string(row["repetitions"].get<int>()),
                                      round_trips(row)};
    for (const char* key : {"p50_us", "p95_us", "p99_us", "algbw_gb_per_s", "busbw_gb_per_s"})
      cells.push_back(cell(own, key));
    for (const std::string& peer : peers)
      cells.push_back(all.contains(peer) ? cell(all[peer], "p50_us") : "-");
    for (const std::string& peer : peers) cells.push_back(cell(row["ratio_to"], peer.c_str()));
    cells.push_back(row["correct"].get<bool>() ? "ok" : "WRONG");
    table.add(std::move(cells));
  }
  table.print(out);
}

void print_loops(const Json& rows, std::ostream& out) {
  std::vector<std::string> peers = peers_in(rows);
  std::erase(peers, kGloo);
  std::vector<std::string> headers = {"size", "calls", "cores ns", "p50 us", "p95 us"};
  for (const std::string& peer : peers) headers.push_back(peer + " us");
  for (const std::string& peer : peers) headers.push_back("/" + peer);
  Table table(std::move(headers));
  for (const Json& row : rows) {
    const Json& all = row["contenders"];
    const Json& own = all["hvd"]["loop"];
    std::vector<std::string> cells = {bytes_text(row["bytes"].get<std::size_t>()),
                                      std::to_string(row["calls_of_loop"].get<int>()),
                                      round_trips(row), cell(own, "p50_us"), cell(own, "p95_us")};
    for (const std::string& peer : peers)
      cells.push_back(all.contains(peer) ? cell(all[peer]["loop"], "p50_us") : "-");
    for (const std::string& peer : peers) cells.push_back(cell(row["loop_ratio_to"], peer.c_str()));
    table.add(std::move(cells));
  }
  table.print(out);
}

}  // namespace

Json run_collectives(const Session& session, const CollectivesOptions& options, std::ostream& out) {
  const Json gloo = options.gloo_path.empty() ? Json::object() : read_json(options.gloo_path);
  const Arena arena(Exercise::floats_needed(options.highest_bytes, session.size()), options.memory);
  Json result = {{"correct", true}, {"rows", Json::array()}};
  for (const OpKind kind : options.kinds) {
    Json rows = Json::array();
    std::size_t last_bytes = 0;
    for (const std::size_t bytes :
         geometric_sizes(options.lowest_bytes, options.highest_bytes, options.factor)) {
      Exercise exercise(kind, bytes, session.rank(), session.size(), arena);
      // Sizes below one element per rank are all rounded up to it.
      if (exercise.bytes() == last_bytes) continue;
      last_bytes = exercise.bytes();
      rows.push_back(Match(session, options, std::move(exercise)).play());
      add_gloo(rows.back(), gloo);
      result["correct"] = result["correct"].get<bool>() && rows.back()["correct"].get<bool>();
    }
    if (session.rank() == 0) {
      out << '\n' << to_string(kind) << ", float32, single calls, bandwidths in GB/s\n";
      print_rows(rows, out);
      if (options.loop > 1) {
        out << '\n' << to_string(kind) << ", float32, per call of a loop\n";
        print_loops(rows, out);
      }
    }
    for (Json& row : rows) result["rows"].push_back(std::move(row));
  }
  return result;
}

}  // namespace hvd::bench
