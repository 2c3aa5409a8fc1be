#include "control/validator.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "control/saturating.h"

namespace hvd::control {
namespace {

struct Difference {
  const char* what;
  std::string reference;
  std::string other;
};

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

std::string group_text(const wire::Request& request) {
  if (request.group_size == 0) return "none";
  std::ostringstream out;
  out << '\'' << request.group_key() << "' of " << request.group_size << ", member "
      << request.group_index;
  return out.str();
}

bool reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter; }

// Not a number is what all ranks may have agreed on.
bool same_number(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Concatenating and exchanging operations agree on all dimensions but the first.
bool shapes_agree(const wire::Request& a, const wire::Request& b) {
  if (a.kind != OpKind::kAllgather && a.kind != OpKind::kAlltoall) return a.shape == b.shape;
  return a.shape.size() == b.shape.size() &&
         (a.shape.empty() || std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1));
}

std::optional<Difference> difference(const wire::Request& a, const wire::Request& b) {
  const auto text = [](auto value) { return std::string(to_string(value)); };
  if (a.kind != b.kind) return Difference{"kind of operation", text(a.kind), text(b.kind)};
  if (a.dtype != b.dtype) return Difference{"dtype", text(a.dtype), text(b.dtype)};
  if (!shapes_agree(a, b))
    return Difference{"shape", shape_to_string(a.shape), shape_to_string(b.shape)};
  if (reduces(a.kind) && a.op != b.op) return Difference{"op", text(a.op), text(b.op)};
  if (!same_number(a.prescale, b.prescale))
    return Difference{"prescale factor", number(a.prescale), number(b.prescale)};
  if (!same_number(a.postscale, b.postscale))
    return Difference{"postscale factor", number(a.postscale), number(b.postscale)};
  if (a.kind == OpKind::kBroadcast && a.root != b.root) {
    return Difference{"root", std::to_string(a.root), std::to_string(b.root)};
  }
  if (a.device != b.device) return Difference{"device", text(a.device), text(b.device)};
  if (a.group_size != b.group_size || a.group_index != b.group_index ||
      (a.group_size > 0 && a.group_key() != b.group_key())) {
    return Difference{"group", group_text(a), group_text(b)};
  }
  return std::nullopt;
}

}  // namespace

std::string describe(const wire::Request& request) {
  return std::string(to_string(request.kind)) + " '" + request.name + "'";
}

std::optional<std::string> find_mismatch(const wire::Request& reference, int reference_rank,
                                         const wire::Request& other, int other_rank) {
  const bool in_order = reference_rank <= other_rank;
  const wire::Request& low = in_order ? reference : other;
  const wire::Request& high = in_order ? other : reference;
  const auto found = difference(low, high);
  if (!found) return std::nullopt;
  return describe(low) + ": " + found->what + " differs: rank " +
         std::to_string(std::min(reference_rank, other_rank)) + " " + found->reference + ", rank " +
         std::to_string(std::max(reference_rank, other_rank)) + " " + found->other +
         "; every rank must submit the same " + found->what;
}

std::optional<std::string> find_fault(const wire::Request& request,
                                      const std::vector<int>& members) {
  if (request.kind == OpKind::kAllgather && request.shape.empty()) {
    return describe(request) +
           ": a scalar has no first dimension to concatenate along; reshape it to [1]";
  }
  if (request.kind == OpKind::kBroadcast &&
      !std::binary_search(members.begin(), members.end(), request.root)) {
    return describe(request) + ": root rank " + std::to_string(request.root) +
           " is not in process set " + std::to_string(request.process_set) +
           "; a root is a world rank of a member";
  }
  return std::nullopt;
}

std::int64_t gathered_bytes(const wire::Request& request,
                            const std::vector<std::int64_t>& first_dims) noexcept {
  std::int64_t rows = 0;
  for (const auto dim : first_dims) rows = saturating_sum(rows, dim);
  std::int64_t bytes = saturating_product(rows, static_cast<std::int64_t>(size_of(request.dtype)));
  for (std::size_t i = 1; i < request.shape.size(); ++i)
    bytes = saturating_product(bytes, request.shape[i]);
  return bytes;
}

}  // namespace hvd::control
