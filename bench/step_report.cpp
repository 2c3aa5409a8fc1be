#include "bench/step_report.h"

#include <algorithm>
#include <ostream>

#include "bench/statistics.h"

namespace hvd::bench {
namespace {

const StepSamples* find(const std::vector<StepSamples>& all, const std::string& prefix) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const StepSamples& one) {
    return one.contender.starts_with(prefix);
  });
  return found == all.end() ? nullptr : &*found;
}

std::vector<double> differences(const std::vector<double>& left, const std::vector<double>& right) {
  std::vector<double> result(left.size());
  std::transform(left.begin(), left.end(), right.begin(), result.begin(), std::minus<>());
  return result;
}

Json summarize_step(const StepSamples& step, const StepSamples& alone) {
  const Summary times = summarize(step.seconds);
  const Summary added = summarize(differences(step.seconds, alone.seconds));
  return {
      {"p50_us", json_number(times.p50 * 1e6)},
      {"p95_us", json_number(times.p95 * 1e6)},
      {"p99_us", json_number(times.p99 * 1e6)},
      {"added_p50_us", json_number(added.p50 * 1e6)},
      {"added_p95_us", json_number(added.p95 * 1e6)},
      {"added_percent", json_number(added.p50 / percentile(alone.seconds, 0.5) * 100)},
      {"peak_bytes", json_number(step.peak_bytes)},
      {"peak_bytes_over_alone", json_number(step.peak_bytes - alone.peak_bytes)},
      {"first_peak_bytes_over_alone", json_number(step.first_peak_bytes - alone.first_peak_bytes)}};
}

std::string cell(const Json& object, const char* key, double factor = 1) {
  return object.contains(key) && object[key].is_number()
             ? number_text(object[key].get<double>() * factor)
             : "-";
}

}  // namespace

Json compare_steps(const std::vector<StepSamples>& samples) {
  const StepSamples& alone = *find(samples, "alone");
  const StepSamples* const one = find(samples, "one");
  const StepSamples* const ours = find(samples, "hvd");
  Json result;
  result["repetitions"] = alone.seconds.size();
  for (const StepSamples& step : samples) {
    Json& entry = result["contenders"][step.contender] = summarize_step(step, alone);
    if (one != nullptr)
      entry["percent_over_one"] = json_number((median_ratio(step.seconds, one->seconds) - 1) * 100);
    if (ours == nullptr || &step == ours) continue;
    entry["hvd_step_ratio"] = json_number(median_ratio(ours->seconds, step.seconds));
    if (&step == &alone || &step == one) continue;  // they exchange no data
    entry["hvd_added_ratio"] =
        json_number(median_ratio_of_added(ours->seconds, step.seconds, alone.seconds));
  }
  return result;
}

void add_gloo_steps(Json& row, const Json& gloo) {
  const Json measured_steps =
      gloo.value("step", Json::object()).value(row["set"].get<std::string>(), Json::object());
  if (row["compute"].get<bool>()) return;  // gloo_peers.py does not measure this
  for (const auto& [name, measured] : measured_steps.items()) {
    Json& entry = row["contenders"][name] = measured;
    entry["not_interleaved"] = true;
    for (const auto& [ours, own] : row["contenders"].items()) {
      if (!ours.starts_with("hvd") || !measured.contains("added_p50_us")) continue;
      // Uses the ratio of the medians, because the two were not measured in turns.
      entry["hvd_step_ratio"] =
          json_number(own["p50_us"].get<double>() / measured["p50_us"].get<double>());
      entry["hvd_added_ratio"] =
          json_number(own["added_p50_us"].get<double>() / measured["added_p50_us"].get<double>());
    }
  }
}

void print_step(const Json& row, std::ostream& out) {
  constexpr double kMebibyte = 1.0 / (1 << 20);
  out << "\nstep of " << row["set"].get<std::string>()
      << (row["compute"].get<bool>() ? " with its computation" : "") << ": " << row["tensors"]
      << " tensors, " << row["parameters"] << " parameters, " << row["repetitions"]
      << " times, gradients " << (row["correct"].get<bool>() ? "ok" : "WRONG")
      << "; added: to alone\n";
  Table table({"contender", "p50 ms", "p95 ms", "added ms", "p95", "added %", "% over one",
               "hvd/step", "hvd/added", "MiB over alone", "at first"});
  for (const auto& [name, entry] : row["contenders"].items()) {
    table.add({name, cell(entry, "p50_us", 1e-3), cell(entry, "p95_us", 1e-3),
               cell(entry, "added_p50_us", 1e-3), cell(entry, "added_p95_us", 1e-3),
               cell(entry, "added_percent"), cell(entry, "percent_over_one"),
               cell(entry, "hvd_step_ratio"), cell(entry, "hvd_added_ratio"),
               cell(entry, "peak_bytes_over_alone", kMebibyte),
               cell(entry, "first_peak_bytes_over_alone", kMebibyte)});
  }
  table.print(out);
}

}  // namespace hvd::bench
