#include "optimizer/group_mirror.h"

#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <tuple>
#include <typeinfo>

#include "hvd/error.h"
#include "optimizer/each_option.h"

namespace hvd::libtorch {
namespace {

using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::LBFGSOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::RMSpropOptions;
using torch::optim::SGDOptions;

template <class T>
bool equal(const T& a, const T& b) {
  return a == b || (a != a && b != b);  // two nan are no change
}

template <class T>
std::string text_of(const T& value) {
  return c10::str(value);
}
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "none";
}
std::string text_of(const std::tuple<double, double>& values) {
  return c10::str("(", std::get<0>(values), ", ", std::get<1>(values), ")");
}

[[noreturn]] void throw_conflict(const std::string& who, const std::string& option,
                                 const std::string& wrapped, const std::string& wrapper) {
  throw UsageError(who + ": " + option + " was written on both sides since step(): " + wrapper +
                   " in the " + who + " and " + wrapped +
                   " in the optimizer that it wraps; expected them to be one: have schedulers and "
                   "the program write to the same of the two");
}

/// Of one option; see GroupMirror::reconcile().
class MergeOption {
 public:
  /// @param who begins messages  @param group nothing: the defaults
  MergeOption(const char* who, std::optional<std::size_t> group, bool apply)
      : who_(who), group_(group), apply_(apply) {}

  template <class T>
  void operator()(const char* name, T& wrapped, T& wrapper, T& last) const {
    const bool changed = !equal(wrapped, last);
    if (changed && !equal(wrapper, last) && !equal(wrapped, wrapper)) {
      throw_conflict(who_,
                     "the option " + std::string(name) + " of " +
                         (group_ ? "parameter group " + std::to_string(*group_) : "the defaults"),
                     text_of(wrapped), text_of(wrapper));
    }
    if (!apply_) return;
    if (changed) {
      last = wrapper = wrapped;
    } else {
      last = wrapped = wrapper;
    }
  }

 private:
  const char* who_;
  std::optional<std::size_t> group_;
  bool apply_;
};

/// @return whether all are of this type
template <class T>
bool merge_as(const MergeOption& merge, OptimizerOptions& wrapped, OptimizerOptions& wrapper,
              OptimizerOptions& last) {
  const auto is = [](const OptimizerOptions& options) { return typeid(options) == typeid(T); };
  if (!is(wrapped) || !is(wrapper) || !is(last)) return false;
  each_option(merge, static_cast<T&>(wrapped), static_cast<T&>(wrapper), static_cast<T&>(last));
  return true;
}

bool merge_options(const MergeOption& merge, OptimizerOptions& wrapped, OptimizerOptions& wrapper,
                   OptimizerOptions& last) {
  return merge_as<SGDOptions>(merge, wrapped, wrapper, last) ||
         merge_as<AdamOptions>(merge, wrapped, wrapper, last) ||
         merge_as<AdamWOptions>(merge, wrapped, wrapper, last) ||
         merge_as<AdagradOptions>(merge, wrapped, wrapper, last) ||
         merge_as<RMSpropOptions>(merge, wrapped, wrapper, last) ||
         merge_as<LBFGSOptions>(merge, wrapped, wrapper, last);
}

bool of_libtorch(OptimizerOptions& options) {
  return merge_options(MergeOption("", std::nullopt, false), options, options, options);
}

/// Type and values. Empty if there are none, or they cannot be serialized.
std::string description_of(const OptimizerOptions& options) {
  try {
    torch::serialize::OutputArchive archive;
    options.serialize(archive);
    std::ostringstream stream;
    stream << typeid(options).name() << ' ';
    archive.save_to(stream);
    return std::move(stream).str();
  } catch (const c10::Error&) {
    return {};
  }
}

std::string description_of(const OptimizerParamGroup& group) {
  return group.has_options() ? description_of(group.options()) : std::string();
}

/// @pre both are of one type of LibTorch's
void copy_options(OptimizerOptions& from, OptimizerOptions& to) {
  merge_options(MergeOption("", std::nullopt, true), from, to, *to.clone());
}

bool same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.is_same(y); });
}

}  // namespace

GroupMirror::GroupMirror(Optimizer& wrapped, Optimizer& wrapper, const char* who)
    : wrapped_(wrapped), wrapper_(wrapper), who_(who) {
  if (of_libtorch(wrapped.defaults())) last_defaults_ = wrapped.defaults().clone();
  take_over();
}

void GroupMirror::take_over() {
  std::vector<OptimizerParamGroup> groups;
  std::vector<Last> last;
  for (const auto& group : wrapped_.param_groups()) {
    last.push_back(Last::of(group));
    const bool has_options = last.back().options || !last.back().description.empty();
    has_options ? groups.push_back(group) : static_cast<void>(groups.emplace_back(group.params()));
  }
  if (last_defaults_) {
    copy_options(wrapped_.defaults(), wrapper_.defaults());
    copy_options(wrapped_.defaults(), *last_defaults_);
  }
  wrapper_.param_groups() = std::move(groups);
  last_ = std::move(last);
}

GroupMirror::Last GroupMirror::Last::of(const OptimizerParamGroup& group) {
  Last last{.parameters = group.params(), .options = nullptr, .description = {}};
  if (group.has_options()) {
    last.options = group.options().clone();
    if (of_libtorch(*last.options)) return last;
    last.options.reset();
  }
  last.description = description_of(group);
  return last;
}

void GroupMirror::refuse_changed_wrapper() const {
  const auto& groups = wrapper_.param_groups();
  if (!wrapper_.state().empty()) {
    throw UsageError(
        std::string(who_) +
        ": something was written to the state() that it has as a "
        "torch::optim::Optimizer, which nobody reads; expected it in the state of the optimizer "
        "that it wraps: inner().state()");
  }
  const auto refuse = [this](const std::string& what) {
    throw UsageError(std::string(who_) + ": " + what +
                     " through torch::optim::Optimizer&, whose functions cannot be replaced; "
                     "expected " +
                     who_ +
                     "::add_param_group(), on every rank, so that the gradients are reduced");
  };
  if (groups.size() > last_.size()) {
    refuse("parameter group " + std::to_string(last_.size()) + " was added");
  }
  bool changed = groups.size() < last_.size();
  for (std::size_t g = 0; g < groups.size() && !changed; ++g)
    changed = !same(groups[g].params(), last_[g].parameters);
  if (changed) refuse("parameters were added or removed");
}

bool GroupMirror::wrapped_has_other_parameters() const {
  const auto& groups = wrapped_.param_groups();
  return !std::equal(
      groups.begin(), groups.end(), last_.begin(), last_.end(),
      [](const auto& group, const Last& last) { return same(group.params(), last.parameters); });
}

void GroupMirror::reconcile() {
  refuse_changed_wrapper();
  if (wrapped_has_other_parameters()) return take_over();
  merge(false);
  merge(true);
}

void GroupMirror::try_to_reconcile() noexcept {
  try {
    reconcile();
  } catch (const std::exception&) {  // which step() reports
  }
}

void GroupMirror::merge(bool apply) {
  for (std::size_t g = 0; g < last_.size(); ++g) {
    OptimizerParamGroup& wrapped = wrapped_.param_groups()[g];
    OptimizerParamGroup& wrapper = wrapper_.param_groups()[g];
    const MergeOption one(who_, g, apply);
    const bool merged = last_[g].options && wrapped.has_options() && wrapper.has_options() &&
                        merge_options(one, wrapped.options(), wrapper.options(), *last_[g].options);
    if (!merged) merge_whole(g, apply);
  }
  if (last_defaults_)
    merge_options(MergeOption(who_, std::nullopt, apply), wrapped_.defaults(), wrapper_.defaults(),
                  *last_defaults_);
}

/// Options that were replaced by those of another type, too.
void GroupMirror::merge_whole(std::size_t group, bool apply) {
  OptimizerParamGroup& wrapped = wrapped_.param_groups()[group];
  OptimizerParamGroup& wrapper = wrapper_.param_groups()[group];
  const std::string where = "the options of parameter group " + std::to_string(group);
  const std::string last =
      last_[group].options ? description_of(*last_[group].options) : last_[group].description;
  const std::string ours = description_of(wrapped), theirs = description_of(wrapper);
  if (wrapper.has_options() && theirs.empty()) {
    throw UsageError(std::string(who_) + ": " + where +
                     " cannot be serialized, and so not be compared with those of the optimizer "
                     "that it wraps; expected them to be set there, or a type with serialize()");
  }
  if (ours != last && theirs != last && ours != theirs)
    throw_conflict(who_, where, "others", "some");
  if (!apply || ours == theirs || (ours == last && theirs == last)) return;
  const OptimizerParamGroup& source = ours != last ? wrapped : wrapper;
  OptimizerParamGroup& target = ours != last ? wrapper : wrapped;
  target.set_options(source.has_options() ? source.options().clone() : nullptr);
  last_[group] = Last::of(source);
}

}  // namespace hvd::libtorch
