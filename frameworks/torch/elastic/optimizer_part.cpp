#include "elastic/optimizer_part.h"

#include <c10/util/Type.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/torch/distributed_optimizer.h"
#include "optimizer/live_optimizers.h"
#include "optimizer/parameter_groups.h"
#include "reducer/gradient_reducer.h"
#include "sharded/element_state.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

using torch::optim::Optimizer;

/// Bytes that a part has produced, or that are loaded into it.
using Bytes = std::shared_ptr<std::vector<std::byte>>;

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* const raw = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), raw, raw + sizeof value);
}

/// Reads what append() has written.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string name)
      : bytes_(bytes), name_(std::move(name)) {}
  template <class T>
  T read() {
    T value;
    copy(&value, sizeof value);
    return value;
  }
  void copy(void* to, std::size_t size) {
    if (size > bytes_.size()) {
      throw Error(text("hvd::elastic: the received state of '", name_,
                       "' ends early; start the same program everywhere"));
    }
    if (size > 0) std::memcpy(to, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string name_;
};

elastic::Part part_of(std::string name, std::string type,
                      const std::function<void(std::vector<std::byte>&)>& save,
                      const std::function<void(Reader&)>& load, bool frees = false) {
  const auto bytes = std::make_shared<std::vector<std::byte>>();
  return {.name = name,
          .type = std::move(type),
          .view =
              [bytes, save] {
                bytes->clear();
                save(*bytes);
                return std::span<const std::byte>(*bytes);
              },
          .room =
              [bytes](std::size_t size) {
                bytes->resize(size);
                return std::span<std::byte>(*bytes);
              },
          .loaded =
              [bytes, load, name] {
                Reader reader(*bytes, name);
                load(reader);
              },
          .committed =
              [bytes, frees](std::uint64_t) {
                if (frees) std::vector<std::byte>().swap(*bytes);
              }};
}

/// The wrapper may have options that were not copied to the optimizer yet.
void reconcile(Optimizer& optimizer) {
  if (OptimizerWrapper* const wrapper = LiveOptimizers::instance().wrapper_of(optimizer))
    wrapper->inner();
}

/// The reference of the weights of the optimizer's gradients; 0 without one. It affects the
/// rounding of gradients, so it belongs to the state.
double weight_reference(const Optimizer& optimizer) {
  const auto reducer = LiveOptimizers::instance().reducer_of(optimizer);
  if (!reducer) return 0;
  return locked(*reducer, [](const GradientReducer& one) {
    return one.weights().agreed() ? one.weights().reference() : 0;
  });
}

void restore_weight_reference(const Optimizer& optimizer, double reference) {
  const auto reducer = LiveOptimizers::instance().reducer_of(optimizer);
  if (!reducer) return;
  const std::optional<double> restored = reference > 0 ? std::optional(reference) : std::nullopt;
  locked(*reducer, [&](GradientReducer& one) { one.restore_reference(restored); });
}

std::string type_of(const Optimizer& optimizer) {
  std::size_t parameters = 0;
  for (const auto& group : optimizer.param_groups()) parameters += group.params().size();
  return text(c10::demangle(typeid(optimizer).name()), " of ", parameters);
}

void save_state(const Optimizer& optimizer, std::vector<std::byte>& bytes) {
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      append(bytes, static_cast<std::uint8_t>(found != optimizer.state().end()));
      if (found == optimizer.state().end()) continue;
      const ElementState state = element_state_of(*found->second);
      append(bytes, state.step);
      append(bytes, static_cast<std::uint64_t>(state.tensors.size()));
      for (const torch::Tensor& tensor : state.tensors) {
        append(bytes, static_cast<std::uint64_t>(tensor.defined() ? tensor.nbytes() : 0));
        if (!tensor.defined()) continue;
        const torch::Tensor row = tensor.detach().cpu().contiguous();
        const auto* const raw = static_cast<const std::byte*>(row.const_data_ptr());
        bytes.insert(bytes.end(), raw, raw + row.nbytes());
      }
    }
  }
}

void load_state(Optimizer& optimizer, Reader& reader) {
  const torch::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      void* const key = parameter.unsafeGetTensorImpl();
      if (reader.read<std::uint8_t>() == 0) {
        optimizer.state().erase(key);
        continue;
      }
      ElementState state{.step = reader.read<std::int64_t>(), .tensors = {}};
      const auto count = reader.read<std::uint64_t>();
      for (std::uint64_t i = 0; i < count; ++i) {
        torch::Tensor& tensor = state.tensors.emplace_back();
        const auto size = reader.read<std::uint64_t>();
        if (size == 0) continue;
        torch::Tensor row = torch::empty(
            parameter.sizes(), parameter.options().device(torch::kCPU).requires_grad(false));
        if (size != row.nbytes()) {
          throw Error(text("hvd::elastic: the state of a parameter of shape ",
                           shape_to_string(parameter.sizes().vec()), " has ", size,
                           " bytes, expected ", row.nbytes()));
        }
        reader.copy(row.mutable_data_ptr(), size);
        tensor = with_strides_of(parameter, row.to(parameter.device()));
      }
      optimizer.state()[key] = make_state(optimizer, state);
    }
  }
}

}  // namespace

elastic::Part options_part(std::string name, Optimizer& optimizer) {
  return part_of(
      std::move(name), text(type_of(optimizer), " options"),
      [&optimizer](std::vector<std::byte>& bytes) {
        reconcile(optimizer);
        append(bytes, weight_reference(optimizer));
        for (const auto& group : optimizer.param_groups())
          for (const double value : option_values(group.options())) append(bytes, value);
      },
      [&optimizer](Reader& reader) {
        reconcile(optimizer);
        restore_weight_reference(optimizer, reader.read<double>());
        for (auto& group : optimizer.param_groups()) {
          std::vector<double> values = option_values(group.options());
          for (double& value : values) value = reader.read<double>();
          set_option_values(group.options(), values);
        }
        reconcile(optimizer);
      });
}

elastic::Part state_part(std::string name, Optimizer& optimizer, bool copied) {
  return part_of(
      std::move(name), type_of(optimizer),
      [&optimizer](std::vector<std::byte>& bytes) { save_state(optimizer, bytes); },
      [&optimizer](Reader& reader) { load_state(optimizer, reader); }, !copied);
}

}  // namespace hvd::libtorch
