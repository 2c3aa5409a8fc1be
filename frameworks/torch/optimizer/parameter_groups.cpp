#include "optimizer/parameter_groups.h"

#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "hvd/error.h"

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

// each_option(visit, a, b, ...) calls visit(name, a's, b's, ...) for each option of one of
// LibTorch's types.

template <class Visit, std::same_as<torch::optim::SGDOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("momentum", o.momentum()...);
  visit("dampening", o.dampening()...);
  visit("weight_decay", o.weight_decay()...);
  visit("nesterov", o.nesterov()...);
}

template <class Visit, class... O>
  requires((std::same_as<O, torch::optim::AdamOptions> ||
            std::same_as<O, torch::optim::AdamWOptions>) &&
           ...)
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("betas", o.betas()...);
  visit("eps", o.eps()...);
  visit("weight_decay", o.weight_decay()...);
  visit("amsgrad", o.amsgrad()...);
}

template <class Visit, std::same_as<torch::optim::AdagradOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("lr_decay", o.lr_decay()...);
  visit("weight_decay", o.weight_decay()...);
  visit("initial_accumulator_value", o.initial_accumulator_value()...);
  visit("eps", o.eps()...);
}

template <class Visit, std::same_as<torch::optim::RMSpropOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("alpha", o.alpha()...);
  visit("eps", o.eps()...);
  visit("weight_decay", o.weight_decay()...);
  visit("momentum", o.momentum()...);
  visit("centered", o.centered()...);
}

template <class Visit, std::same_as<torch::optim::LBFGSOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("max_iter", o.max_iter()...);
  visit("max_eval", o.max_eval()...);
  visit("tolerance_grad", o.tolerance_grad()...);
  visit("tolerance_change", o.tolerance_change()...);
  visit("history_size", o.history_size()...);
  visit("line_search_fn", o.line_search_fn()...);
}

/// The fewest digits that identify the number.
template <class T>
  requires std::integral<T> || std::floating_point<T>
std::string exact_text(T value) {
  std::array<char, 64> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}
std::string exact_text(bool value) { return value ? "true" : "false"; }
std::string exact_text(const std::tuple<double, double>& values) {
  return "(" + exact_text(std::get<0>(values)) + ", " + exact_text(std::get<1>(values)) + ")";
}
std::string exact_text(const std::string& value) { return value; }
template <class T>
std::string exact_text(const std::optional<T>& value) {
  return value ? exact_text(*value) : "none";
}

template <class T>
bool equal(const T& a, const T& b) {
  return a == b || (a != a && b != b);  // two NaN count as equal
}

[[noreturn]] void throw_conflict(const std::string& who, const std::string& option,
                                 const std::string& wrapped, const std::string& wrapper) {
  throw UsageError(who + ": " + option + " was written on both sides since step(): " + wrapper +
                   " in the " + who + " and " + wrapped +
                   " in the optimizer that it wraps; expected them to be one: have schedulers and "
                   "the program write to the same of the two");
}

/// Merges one option; see GroupMirror::reconcile().
class MergeOption {
 public:
  /// @param who the class name at the beginning of messages  @param group empty for the defaults
  MergeOption(const char* who, std::optional<std::size_t> group, bool apply)
      : who_(who), group_(group), apply_(apply) {}

  template <class T>
  void operator()(const char* name, T& wrapped, T& wrapper, T& last) const {
    const bool changed = !equal(wrapped, last);
    if (changed && !equal(wrapper, last) && !equal(wrapped, wrapper)) {
      throw_conflict(who_,
                     "the option " + std::string(name) + " of " +
                         (group_ ? "parameter group " + std::to_string(*group_) : "the defaults"),
                     exact_text(wrapped), exact_text(wrapper));
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

/// @return whether all options are of this type
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

/// Type and values; empty if they cannot be serialized.
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

/// @pre both have the same type, one of LibTorch's
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
  copy_wrapped_groups();
}

void GroupMirror::copy_wrapped_groups() {
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
        "torch::optim::Optimizer, which is never read; expected it in the state of the optimizer "
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
  if (wrapped_has_other_parameters()) return copy_wrapped_groups();
  merge(false);
  merge(true);
}

void GroupMirror::try_to_reconcile() noexcept {
  try {
    reconcile();
  } catch (const std::exception&) {  // step() reports it
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

/// Merges the options of a group as a whole, even if they were replaced by options of another type.
void GroupMirror::merge_whole(std::size_t group, bool apply) {
  OptimizerParamGroup& wrapped = wrapped_.param_groups()[group];
  OptimizerParamGroup& wrapper = wrapper_.param_groups()[group];
  const std::string where = "the options of parameter group " + std::to_string(group);
  const std::string last =
      last_[group].options ? description_of(*last_[group].options) : last_[group].description;
  const std::string ours = description_of(wrapped), theirs = description_of(wrapper);
  if (wrapper.has_options() && theirs.empty()) {
    throw UsageError(std::string(who_) + ": " + where +
                     " cannot be serialized, so they cannot be compared with those of the "
                     "optimizer that it wraps; expected them to be set there, or a type with "
                     "serialize()");
  }
  if (ours != last && theirs != last && ours != theirs)
    throw_conflict(who_, where, "others", "some");
  if (!apply || ours == theirs || (ours == last && theirs == last)) return;
  const OptimizerParamGroup& source = ours != last ? wrapped : wrapper;
  OptimizerParamGroup& target = ours != last ? wrapper : wrapped;
  target.set_options(source.has_options() ? source.options().clone() : nullptr);
  last_[group] = Last::of(source);
}

namespace {

using torch::optim::OptimizerOptions;

template <class Options>
bool describe_as(const OptimizerOptions& options, std::string& text) {
  if (typeid(options) != typeid(Options)) return false;
  Options copy = static_cast<const Options&>(options);
  each_option(
      [&](std::string_view name, const auto& value) {
        text += (text.empty() ? "" : ", ") + (name == "lr" ? "learning rate" : std::string(name)) +
                ' ' + exact_text(value);
      },
      copy);
  return true;
}

std::string text_of_other(const OptimizerOptions& options) {
  try {
    std::string text = "learning rate " + exact_text(options.get_lr());
    torch::serialize::OutputArchive archive;
    options.serialize(archive);
    std::ostringstream bytes;
    archive.save_to(bytes);
    return text + ", options with hash " +
           std::to_string(std::hash<std::string>()(std::move(bytes).str()));
  } catch (const c10::Error&) {
    return "options that cannot be compared";
  }
}

}  // namespace

std::string text_of(const OptimizerOptions& options) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  std::string text;
  const bool known =
      describe_as<SGDOptions>(options, text) || describe_as<AdamOptions>(options, text) ||
      describe_as<AdamWOptions>(options, text) || describe_as<AdagradOptions>(options, text) ||
      describe_as<RMSpropOptions>(options, text) || describe_as<LBFGSOptions>(options, text);
  return known ? text : text_of_other(options);
}

namespace {

/// Calls a function with a reference to each number among the options.
template <class Options, class Visit>
bool visit_numbers_as(OptimizerOptions& options, const Visit& visit) {
  if (typeid(options) != typeid(Options)) return false;
  const auto number = [&visit]<class T>(T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      visit(value);
    } else {
      std::apply([&visit](auto&... each) { (visit(each), ...); }, value);  // betas
    }
  };
  each_option([&number](std::string_view, auto& value) { number(value); },
              static_cast<Options&>(options));
  return true;
}

template <class Visit>
void visit_numbers(OptimizerOptions& options, const Visit& visit) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  const bool known = visit_numbers_as<SGDOptions>(options, visit) ||
                     visit_numbers_as<AdamOptions>(options, visit) ||
                     visit_numbers_as<AdamWOptions>(options, visit) ||
                     visit_numbers_as<AdagradOptions>(options, visit) ||
                     visit_numbers_as<RMSpropOptions>(options, visit);
  if (!known) throw UsageError("expected the options of one of LibTorch's elementwise optimizers");
}

}  // namespace

std::vector<double> option_values(const OptimizerOptions& options) {
  std::vector<double> values;
  visit_numbers(const_cast<OptimizerOptions&>(options),  // NOLINT: only read
                [&](const auto& value) { values.push_back(static_cast<double>(value)); });
  return values;
}

void set_option_values(OptimizerOptions& options, const std::vector<double>& values) {
  auto next = values.begin();
  visit_numbers(options, [&]<class T>(T& value) {
    if (next == values.end()) throw UsageError("expected a value for each option");
    value = static_cast<T>(*next++);
  });
}

std::vector<std::string> group_lines(const torch::optim::Optimizer& optimizer) {
  std::vector<std::string> lines;
  for (const auto& group : optimizer.param_groups()) {
    lines.push_back("parameter group " + std::to_string(lines.size()) + " with " +
                    (group.has_options() ? text_of(group.options()) : "no options"));
  }
  return lines;
}

}  // namespace hvd::libtorch
