#include "optimizer/option_text.h"

#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <sstream>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "optimizer/each_option.h"

namespace hvd::libtorch {
namespace {

using torch::optim::OptimizerOptions;

/// As many digits as tell numbers apart.
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

std::vector<std::string> group_lines(const torch::optim::Optimizer& optimizer) {
  std::vector<std::string> lines;
  for (const auto& group : optimizer.param_groups()) {
    lines.push_back("parameter group " + std::to_string(lines.size()) + " with " +
                    (group.has_options() ? text_of(group.options()) : "no options"));
  }
  return lines;
}

}  // namespace hvd::libtorch
