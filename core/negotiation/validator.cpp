#include "negotiation/validator.h"

#include <algorithm>
#include <cmath>

#include "base/expect.h"
#include "base/text.h"

namespace hvd::control {
namespace {

struct Difference {
  const char* what;
  std::string reference;
  std::string other;
};

std::string group_text(const wire::Request& request) {
  if (request.group_size == 0) return "none";
  return text("'", request.group_key(), "' of ", request.group_size, ", member ",
              request.group_index);
}

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter || kind == OpKind::kReduce;
}

// NaN equals NaN here, because all ranks may pass it.
bool same_number(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kGather || kind == OpKind::kReduce ||
         kind == OpKind::kScatter;
}

// Concatenating and exchanging operations agree on all dimensions but the first.
bool first_dim_is_free(OpKind kind) { return wire::gathers(kind) || kind == OpKind::kAlltoall; }

std::string shape_text(const wire::Request& request) {
  std::string shape = shape_to_string(request.shape);
  // The rows of an alltoall may differ between ranks.
  if (request.kind != OpKind::kAlltoall || request.shape.empty()) return shape;
  return "[*" + shape.substr(shape.find_first_of(",]"));
}

bool shapes_agree(const wire::Request& a, const wire::Request& b) {
  if (!first_dim_is_free(a.kind)) return a.shape == b.shape;
  return a.shape.size() == b.shape.size() &&
         (a.shape.empty() || std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1));
}

std::string list_text(const std::vector<int>& ranks) {
  return shape_to_string(std::vector<std::int64_t>(ranks.begin(), ranks.end()));
}

std::optional<Difference> difference(const wire::Request& a, const wire::Request& b) {
  if (a.kind != b.kind) return Difference{"kind of operation", text(a.kind), text(b.kind)};
  if (a.dtype != b.dtype) return Difference{"dtype", text(a.dtype), text(b.dtype)};
  if (a.compression != b.compression)
    return Difference{"compression", text(a.compression), text(b.compression)};
  if (!shapes_agree(a, b)) {
    return Difference{first_dim_is_free(a.kind) ? "shape after the first dimension" : "shape",
                      shape_text(a), shape_text(b)};
  }
  if (reduces(a.kind) && a.op != b.op) return Difference{"op", text(a.op), text(b.op)};
  if (!same_number(a.prescale, b.prescale))
    return Difference{"prescale factor", text(a.prescale), text(b.prescale)};
  if (!same_number(a.postscale, b.postscale))
    return Difference{"postscale factor", text(a.postscale), text(b.postscale)};
  if (has_root(a.kind) && a.root != b.root) {
    return Difference{a.kind == OpKind::kGather ? "destination" : "root",
                      text("uses rank ", a.root), text("uses rank ", b.root)};
  }
  if (a.removed_set != b.removed_set) {
    return Difference{"process set", text(a.removed_set), text(b.removed_set)};
  }
  if (a.new_set != b.new_set)
    return Difference{"list of ranks", list_text(a.new_set), list_text(b.new_set)};
  if (a.device != b.device) return Difference{"device", text(a.device), text(b.device)};
  if (a.group_size != b.group_size || a.group_index != b.group_index ||
      (a.group_size > 0 && a.group_key() != b.group_key())) {
    return Difference{"group", group_text(a), group_text(b)};
  }
  return std::nullopt;
}

}  // namespace

std::string describe(const wire::Request& request) {
  return text(request.kind, " '", request.name, "'");
}

std::optional<std::string> find_mismatch(const wire::Request& reference, int reference_rank,
                                         const wire::Request& other, int other_rank) {
  const bool in_order = reference_rank <= other_rank;
  const wire::Request& low = in_order ? reference : other;
  const wire::Request& high = in_order ? other : reference;
  const auto found = difference(low, high);
  if (!found) return std::nullopt;
  return text(describe(low), ": ", found->what, " differs: rank ",
              std::min(reference_rank, other_rank), " ", found->reference, ", rank ",
              std::max(reference_rank, other_rank), " ", found->other,
              "; every rank must submit the same ", found->what);
}

std::optional<std::string> find_misplanned(const wire::Request& planned,
                                           const wire::Request& submitted, int rank) {
  if (planned == submitted) return std::nullopt;
  auto found = difference(planned, submitted);
  // Ranks may contribute different numbers of rows, but a plan keeps the number of each rank.
  if (!found && wire::gathers(planned.kind) && planned.shape != submitted.shape)
    found = Difference{"shape", shape_text(planned), shape_text(submitted)};
  if (!found) return std::nullopt;
  return text(describe(submitted), " on rank ", rank, ": the plan has another ", found->what,
              " than this rank submitted: expected ", found->other, ", got ", found->reference,
              "; run the same build of hvd on every rank");
}

namespace {

// Faults of a request from which joined members are absent.
std::optional<std::string> find_fault_of_joined(const wire::Request& request,
                                                const std::vector<int>& absent) {
  if (absent.empty()) return std::nullopt;
  const std::string subject = describe(request) + ": rank ";
  if (has_root(request.kind) && std::binary_search(absent.begin(), absent.end(), request.root)) {
    return text(subject, request.root, ", its ",
                (request.kind == OpKind::kGather ? "destination" : "root"), ", has called join()");
  }
  if (request.kind == OpKind::kAlltoall || request.kind == OpKind::kAddProcessSet ||
      request.kind == OpKind::kRemoveProcessSet) {
    return text(subject, absent.front(), " has called join(), and ", request.kind,
                " has no meaning without it");
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> find_fault(const wire::Request& request, const std::vector<int>& members,
                                      const std::vector<int>& absent) {
  const bool cuts_rows = first_dim_is_free(request.kind) || request.kind == OpKind::kReducescatter;
  if (cuts_rows && request.shape.empty()) {
    return describe(request) + ": a scalar has no first dimension; reshape it to [1]";
  }
  if (has_root(request.kind) && !std::binary_search(members.begin(), members.end(), request.root)) {
    return text(describe(request), ": root rank ", request.root, " is not in process set ",
                request.process_set, "; a root is a world rank of a member");
  }
  return find_fault_of_joined(request, absent);
}

std::int64_t gathered_bytes(const wire::Request& request,
                            const std::vector<std::int64_t>& first_dims) noexcept {
  HVD_EXPECT(!request.shape.empty(), "a gathering operation has a first dimension");
  std::int64_t rows = 0;
  for (const auto dim : first_dims) rows = saturating_sum(rows, dim);
  std::int64_t bytes = saturating_product(rows, static_cast<std::int64_t>(size_of(request.dtype)));
  for (std::size_t i = 1; i < request.shape.size(); ++i)
    bytes = saturating_product(bytes, request.shape[i]);
  return bytes;
}

}  // namespace hvd::control
