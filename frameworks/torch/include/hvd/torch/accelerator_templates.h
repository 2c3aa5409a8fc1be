#pragma once

/// The templates of <hvd/accelerator.h>, which includes this file.

#include <concepts>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/accelerator.h"

namespace hvd {

namespace libtorch {

/// The type that prepare() gives for an argument.
template <class Object>
struct PrepareResult {
  using T = std::remove_cvref_t<Object>;
  using Target = Pointee<Object>;

  static_assert(!IsPrepared<T>::value,
                "hvd: prepare() was called on this object already; pass the program's own "
                "optimizer, scheduler or loader, once");
  static_assert(
      !TorchLoaderType<Target>,
      "hvd: LibTorch's DataLoader cannot be divided among the ranks; make the loader with "
      "hvd::loader(data_set, options) instead of torch::data::make_data_loader()");

  static constexpr bool kScript = std::same_as<T, torch::jit::Module>;
  static constexpr bool kShared = kScript || ModuleHolderType<T> ||
                                  (PointerType<T> && std::copy_constructible<T> &&
                                   std::derived_from<Target, torch::nn::Module>);
  static constexpr bool kModule = kShared || std::derived_from<Target, torch::nn::Module>;
  static constexpr bool kOptimizer = std::derived_from<Target, torch::optim::Optimizer>;
  static constexpr bool kScheduler = SchedulerType<Target>;
  static constexpr bool kLoader = IsHvdLoader<Target>::value;

  static_assert(
      IsPrepared<T>::value || TorchLoaderType<Target> || kModule || kOptimizer || kScheduler ||
          kLoader,
      "hvd: prepare() takes modules, module holders, exported modules (torch::jit::Module), "
      "optimizers and schedulers of LibTorch, and what hvd::loader() returns");
  static_assert(std::is_lvalue_reference_v<Object> || kShared,
                "hvd: prepare() refers to optimizers, schedulers and loaders; keep them in "
                "variables that outlive the training, and pass these");
  static_assert(!std::is_const_v<std::remove_reference_t<Object>> || kShared,
                "hvd: prepare() changes its arguments; pass variables that are not const");
};

}  // namespace libtorch

template <class T>
libtorch::PrepareArgument Accelerator::argument_of(T& object) {
  using Traits = libtorch::PrepareResult<T&>;
  if constexpr (Traits::kScript) {
    return libtorch::PreparedModule{.module = nullptr, .owner = nullptr, .script = object};
  } else if constexpr (libtorch::ModuleHolderType<std::remove_const_t<T>>) {
    if (object.is_empty()) return libtorch::PreparedModule();
    return libtorch::PreparedModule{.module = object.ptr().get(), .owner = object.ptr()};
  } else {
    auto* const target = libtorch::address_of(object);
    if constexpr (Traits::kModule) {
      std::shared_ptr<torch::nn::Module> owner;
      if constexpr (std::convertible_to<const T&, std::shared_ptr<torch::nn::Module>>)
        owner = object;
      return libtorch::PreparedModule{.module = target, .owner = std::move(owner)};
    } else if constexpr (Traits::kOptimizer) {
      return static_cast<torch::optim::Optimizer*>(target);
    } else if constexpr (Traits::kScheduler) {
      return libtorch::PreparedScheduler(target);
    } else {
      return decltype(libtorch::prepared_loader_of(target))::progress_of(target);
    }
  }
}

template <class Object>
decltype(auto) Accelerator::result_of(Object& object) const {
  using Traits = libtorch::PrepareResult<Object&>;
  if constexpr (Traits::kShared) {
    return std::remove_cv_t<Object>(object);
  } else {
    auto* const target = libtorch::address_of(object);
    if constexpr (Traits::kModule) {
      return (*target);
    } else if constexpr (Traits::kOptimizer) {
      return (prepared(static_cast<const torch::optim::Optimizer&>(*target)));
    } else if constexpr (Traits::kScheduler) {
      return (prepared(libtorch::PreparedScheduler(target)));
    } else {
      return decltype(libtorch::prepared_loader_of(target))(*target, running_loaders(),
                                                            placement());
    }
  }
}

template <class... Objects>
  requires(sizeof...(Objects) > 0)
auto Accelerator::prepare(Objects&&... objects) -> decltype(auto) {
  // Checks the types of all arguments first.
  (static_cast<void>(libtorch::PrepareResult<Objects&&>::kModule), ...);
  std::vector<libtorch::PrepareArgument> arguments;
  arguments.reserve(sizeof...(Objects));
  (arguments.push_back(argument_of(objects)), ...);
  prepare_all(std::move(arguments));
  if constexpr (sizeof...(Objects) == 1) {
    return (result_of(objects), ...);
  } else {
    return std::tuple<decltype(result_of(objects))...>(result_of(objects)...);
  }
}

template <class T>
Accelerator::Recorder Accelerator::recorder_of(T& object) {
  using torch::serialize::InputArchive;
  using torch::serialize::OutputArchive;
  T* const target = &object;
  return [target](TrainingState& state, const std::string& name) {
    if constexpr (requires { state.model(*target, name); }) {
      state.model(*target, name);
    } else if constexpr (requires { state.optimizer(*target, name); }) {
      state.optimizer(*target, name);
    } else if constexpr (requires { state.scheduler(*target, name); }) {
      state.scheduler(*target, name);
    } else if constexpr (requires { state.scaler(*target, name); }) {
      state.scaler(*target, name);
    } else if constexpr (requires { state.sampler(*target, name); }) {
      state.sampler(*target, name);
    } else if constexpr (requires { state.loader(*target, name); }) {
      state.loader(*target, name);
    } else if constexpr (requires { state.loader(**target, name); }) {
      state.loader(**target, name);
    } else if constexpr (requires { state.metric(*target, name); }) {
      state.metric(*target, name);
    } else if constexpr (requires { state.random(*target, name); }) {
      state.random(*target, name);
    } else if constexpr (requires(T& t, OutputArchive& out, InputArchive& in) {
                           t.save(out);
                           t.load(in);
                         }) {
      state.custom(
          name, [target](OutputArchive& archive) { target->save(archive); },
          [target](InputArchive& archive) { target->load(archive); });
    } else {
      state.value(name, *target);
    }
  };
}

}  // namespace hvd
