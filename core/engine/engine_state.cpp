// What an engine is doing, for people: the answer to SIGUSR1.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "engine/engine.h"
#include "negotiation/validator.h"

namespace hvd::runtime {
namespace {

constexpr std::size_t kMostOperationsTold = 50;

std::string age(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

std::string line_of(const OperationState& operation, const std::string& state, TimePoint now) {
  const wire::Request& request = operation.request;
  std::string text = "  " + control::describe(request);
  if (!wire::only_agrees(request.kind)) {
    text.append(" ")
        .append(to_string(request.dtype))
        .append(shape_to_string(operation.submission.input.shape));
  }
  if (request.process_set != 0) text += " of process set " + std::to_string(request.process_set);
  return text + ": " + age(now - operation.submitted) + ", " + state + "\n";
}

}  // namespace

std::string Engine::state_text() const {
  const TimePoint now = time_.now();
  struct Told {
    OperationPtr operation;
    std::string state;
  };
  std::vector<Told> told;
  for (auto& [operation, state] : executor_.running()) told.push_back({operation, state});
  for (const auto& [order, operation] : all_outstanding())
    told.push_back({operation, "waits for other ranks"});
  for (const OperationPtr& operation : front_.submissions())
    told.push_back({operation, "submitted"});
  std::stable_sort(told.begin(), told.end(), [](const Told& a, const Told& b) {
    return a.operation->submitted < b.operation->submitted;
  });

  std::ostringstream text;
  text << "hvd: rank " << control_->rank() << " of " << control_->size() << " (host "
       << control_->topology().host_name(control_->rank()) << "): "
       << (front_.failed()               ? "failed: " + front_.failure().message
           : front_.shut_down()          ? "shut down"
           : front_.shutdown_requested() ? "shutting down"
                                         : "running")
       << ", " << told.size() << " operations outstanding, last plan applied "
       << negotiator_.last_applied();
  if (steady_.repeating()) text << ", replaying a schedule of " << steady_.batches() << " batches";
  if (negotiator_.last_applied() > 0) text << ", " << age(now - route_.last_plan_at()) << " ago";
  text << "\n";
  for (std::size_t i = 0; i < told.size(); ++i) {
    if (i == kMostOperationsTold) {
      text << "  and " << told.size() - i << " more\n";
      break;
    }
    text << line_of(*told[i].operation, told[i].state, now);
  }
  const std::vector<std::string> waiting = route_.waiting_texts(kMostOperationsTold);
  if (!waiting.empty()) text << "  as the coordinator sees it:\n";
  for (const std::string& line : waiting) text << "    " << line << "\n";
  return text.str();
}

void Engine::dump_state_if_asked() {
  if (!front_.take_dump_request()) return;
  const std::string text = state_text();
  std::fwrite(text.data(), 1, text.size(),
              stderr);  // at once, so that ranks do not mix; whatever the log level
}

}  // namespace hvd::runtime
