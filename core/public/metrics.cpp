#include <array>
#include <string>

#include "base/text.h"
#include "observe/counters.h"

namespace hvd {
namespace {

struct Field {
  const char* name;
  const char* help;
  std::uint64_t Metrics::*value;
};

constexpr std::array kFields = {
    Field{"control_messages_sent", "Control messages sent by this rank",
          &Metrics::control_messages_sent},
    Field{"control_messages_received", "Control messages received by this rank",
          &Metrics::control_messages_received},
    Field{"control_bytes_sent", "Bytes of control messages sent by this rank",
          &Metrics::control_bytes_sent},
    Field{"negotiated_operations", "Operations that went through the coordinator",
          &Metrics::negotiated_operations},
    Field{"cached_operations", "Negotiated operations that were a cache hit",
          &Metrics::cached_operations},
    // One counter under two names: the name of the member and in the C interface, and the name in
    // docs/glossary.md.
    Field{"locked_operations", "Operations run without the coordinator",
          &Metrics::locked_operations},
    Field{"replayed_operations", "Operations run without the coordinator",
          &Metrics::locked_operations},
    Field{"completed_operations", "Operations that ended without an error",
          &Metrics::completed_operations},
    Field{"failed_operations", "Operations that ended with an error", &Metrics::failed_operations},
    Field{"backend_calls", "Collectives handed to a backend", &Metrics::backend_calls},
    Field{"bytes", "Payload bytes of this rank's inputs", &Metrics::bytes},
    Field{"stalls", "Operations reported as stalled", &Metrics::stalls},
    Field{"plans_applied", "Plans of the coordinator that this rank applied",
          &Metrics::plans_applied},
};

}  // namespace

std::string Metrics::to_json() const {
  std::vector<std::string> fields;
  for (const Field& field : kFields)
    fields.push_back(text('"', field.name, "\": ", this->*field.value));
  return text("{", join_text(fields, ", "), "}");
}

std::string Metrics::to_prometheus() const {
  std::string page;
  for (const Field& field : kFields) {
    const std::string name = text("hvd_", field.name, "_total");
    page += text("# HELP ", name, " ", field.help, "\n# TYPE ", name, " counter\n", name, " ",
                 this->*field.value, "\n");
  }
  return page;
}

namespace observe {

Metrics Counters::snapshot() const {
  Metrics metrics;
  metrics.control_messages_sent = control_messages_sent.load();
  metrics.control_messages_received = control_messages_received.load();
  metrics.control_bytes_sent = control_bytes_sent.load();
  metrics.negotiated_operations = negotiated_operations.load();
  metrics.cached_operations = cached_operations.load();
  metrics.locked_operations = locked_operations.load();
  metrics.completed_operations = completed_operations.load();
  metrics.failed_operations = failed_operations.load();
  metrics.backend_calls = backend_calls.load();
  metrics.bytes = bytes.load();
  metrics.stalls = stalls.load();
  metrics.plans_applied = plans_applied.load();
  return metrics;
}

}  // namespace observe
}  // namespace hvd
