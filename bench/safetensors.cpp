#include "hvd/torch/safetensors.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <ostream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bench/commands.h"
#include "bench/statistics.h"
#include "bench/step_contender.h"

namespace hvd::bench {
namespace {

namespace fs = std::filesystem;

/// Parameters as a transformer has them: some large ones, many small ones.
StateDict make_weights(std::int64_t bytes) {
  std::vector<StateDict::value_type> weights;
  const auto add = [&](std::int64_t elements) {
    weights.emplace_back("weight" + std::to_string(weights.size()), torch::randn({elements}));
  };
  constexpr std::int64_t kLayers = 24, kSmall = 1024;
  const std::int64_t large = (bytes / 4 - 4 * kLayers * kSmall) / kLayers / 2;
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (int i = 0; i < 2; ++i) add(large);
    for (int i = 0; i < 4; ++i) add(kSmall);
  }
  return weights;
}

void run_shell(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// Seconds of each round.
struct RoundTimes {
  std::vector<double> copy, write, load, load_new, synced_copy, durable_write;
};

/// The files and tensors of a measurement.
class FileMatch {
 public:
  FileMatch(fs::path folder, std::int64_t megabytes)
      : folder_(std::move(folder)), weights_(make_weights(megabytes * 1'000'000)) {
    std::vector<StateDict::value_type> zeros;
    for (const auto& [name, tensor] : weights_.tensors())
      zeros.emplace_back(name, torch::zeros_like(tensor));
    targets_ = zeros;
    fs::create_directories(folder_);
    save_safetensors(weights_, original_);
  }
  FileMatch(const FileMatch&) = delete;
  FileMatch& operator=(const FileMatch&) = delete;
  ~FileMatch() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  void play_round(RoundTimes& times) {
    const std::string copy =
        "cp --reflink=never '" + original_.string() + "' '" + made_.string() + "'";
    measure(times.copy, [&] { run_shell(copy); });
    measure(times.write, [&] { save_safetensors(weights_, made_, {.durable = false}); });
    measure(times.load, [&] { load_safetensors(targets_, original_); });
    measure(times.load_new, [&] { loaded_ = load_safetensors(original_); });
    correct_ = correct_ && is_loaded();
    loaded_.clear();
    measure(times.synced_copy, [&] { run_shell(copy + " && sync '" + made_.string() + "'"); });
    measure(times.durable_write, [&] { save_safetensors(weights_, made_); });
  }

  bool correct() const { return correct_; }

 private:
  template <class Act>
  void measure(std::vector<double>& seconds, const Act& act) {
    fs::remove(made_);
    const auto begin = std::chrono::steady_clock::now();
    act();
    seconds.push_back(seconds_since(begin));
  }

  bool is_loaded() const {
    bool same = loaded_.size() == weights_.tensors().size();
    for (std::size_t i = 0; same && i < weights_.tensors().size(); ++i) {
      const auto& [name, tensor] = weights_.tensors()[i];
      same = loaded_.at(name).equal(tensor) && targets_.tensors()[i].second.equal(tensor);
    }
    return same;
  }

  const fs::path folder_, original_ = folder_ / "original", made_ = folder_ / "made";
  const StateDict weights_;
  StateDict targets_;
  std::map<std::string, torch::Tensor> loaded_;
  bool correct_ = true;
};

}  // namespace

Json run_safetensors(const Session& session, const SafetensorsOptions& options, std::ostream& out) {
  share_out_threads(options.threads);
  FileMatch match(options.folder / ("hvd-bench-safetensors-" + std::to_string(session.rank())),
                  options.megabytes);
  RoundTimes times;
  for (int round = 0; round <= options.rounds; ++round) {
    if (round == 1) times = {};  // the first one warms up
    match.play_round(times);
  }
  const auto milliseconds = [](const std::vector<double>& seconds) {
    return json_number(percentile(seconds, 0.5) * 1e3);
  };
  const auto speed = [](const std::vector<double>& copy, const std::vector<double>& ours) {
    return json_number(median_ratio(copy, ours));
  };
  Json result = {
      {"correct", session.all(match.correct())},
      {"copy_ms", milliseconds(times.copy)},
      {"write_ms", milliseconds(times.write)},
      {"load_ms", milliseconds(times.load)},
      {"load_new_ms", milliseconds(times.load_new)},
      {"durable_write_ms", milliseconds(times.durable_write)},
      {"write_speed_over_copy", speed(times.copy, times.write)},
      {"load_speed_over_copy", speed(times.copy, times.load)},
      {"load_new_speed_over_copy", speed(times.copy, times.load_new)},
      {"durable_write_speed_over_synced_copy", speed(times.synced_copy, times.durable_write)}};
  if (session.rank() == 0) {
    const auto number = [&](const char* key) {
      return result[key].is_null() ? "-" : number_text(result[key].get<double>());
    };
    Table table({"", "ms", "speed / cp"});
    table.add({"cp --reflink=never", number("copy_ms"), "1"});
    table.add({"write", number("write_ms"), number("write_speed_over_copy")});
    table.add({"load into a model", number("load_ms"), number("load_speed_over_copy")});
    table.add({"load new tensors", number("load_new_ms"), number("load_new_speed_over_copy")});
    table.add({"durable write, beside cp and sync", number("durable_write_ms"),
               number("durable_write_speed_over_synced_copy")});
    out << "safetensors beside cp, " << options.megabytes
        << " MB: " << (result["correct"].get<bool>() ? "ok" : "WRONG") << '\n';
    table.print(out);
  }
  return result;
}

}  // namespace hvd::bench
