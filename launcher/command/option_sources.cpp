#include "command/option_sources.h"

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

/// The name of an option in a file: its long name, or its only letter.
std::string name_of(const CLI::Option& option) {
  const auto& names = option.get_lnames();
  return names.empty() ? option.get_snames().front() : names.front();
}

constexpr const char* kCommandLine = "command line";

bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
bool is_list(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

[[noreturn]] void refuse(const std::string& source, const std::string& what) {
  throw LaunchError(ExitCode::kUsage, text(source, ": ", what));
}

/// The words that the values of a key stand for. A map stands for NAME=VALUE, or NAME alone.
std::vector<std::string> words_of(const CLI::Option& option, const YAML::Node& node,
                                  const std::string& source, const std::string& key) {
  std::vector<std::string> words;
  const auto add = [&](const YAML::Node& value, const std::string& prefix) {
    if (!value.IsScalar()) refuse(source, text(key, ": expected a value, got a list or a map"));
    words.push_back(prefix + value.Scalar());
  };
  if (!is_list(option) || node.IsScalar()) {
    add(node, "");
  } else if (node.IsSequence()) {
    for (const YAML::Node& value : node) add(value, "");
  } else {
    for (const auto& entry : node) {
      const std::string name = entry.first.Scalar();
      entry.second.IsNull() ? words.push_back(name) : add(entry.second, name + "=");
    }
  }
  return words;
}

}  // namespace

OptionSources::OptionSources(CLI::App& app, std::set<std::string> actions)
    : app_(app), actions_(std::move(actions)) {
  for (const CLI::Option* option : app_.get_options()) {
    if (option->count() == 0) continue;
    sources_[name_of(*option)] = kCommandLine;
    given_.insert(name_of(*option));
  }
}

void OptionSources::apply(CLI::Option& option, const std::vector<std::string>& values,
                          const std::string& source) {
  try {
    option.add_result(values);
    option.run_callback();
  } catch (const CLI::ParseError& error) {
    refuse(source, error.what());
  }
  sources_[name_of(option)] = source;
}

void OptionSources::read_file(const std::string& path) {
  std::ifstream stream(path);
  if (!stream.is_open())
    refuse("--config-file",
           text("expected a readable file, got ", path, ": ", std::strerror(errno)));
  YAML::Node root;
  try {
    root = YAML::Load(stream);
  } catch (const YAML::Exception& error) {
    refuse(text(path, ", line ", error.mark.line + 1), text("expected YAML: ", error.msg));
  }
  if (root.IsNull()) return;
  if (!root.IsMap()) refuse(path, "expected lines such as 'np: 4', with the names of options");
  std::set<std::string> seen;
  for (const auto& entry : root) {
    const std::string source = text(path, ", line ", entry.first.Mark().line + 1);
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    CLI::Option* option =
        name.empty() ? nullptr : app_.get_option_no_throw((name.size() > 1 ? "--" : "-") + name);
    if (option == nullptr || actions_.contains(name_of(*option))) {
      refuse(source,
             text("expected the name of an option that 'hvdrun --help' lists, got '", key, "'"));
    }
    if (!seen.insert(name_of(*option)).second) refuse(source, text("'", key, "' is set twice"));
    if (entry.second.IsNull() || is_given(name_of(*option))) continue;
    const auto& excludes = option->get_excludes();
    const auto other = std::find_if(excludes.begin(), excludes.end(), [&](const auto* excluded) {
      return is_given(name_of(*excluded));
    });
    if (other != excludes.end()) {
      const std::string& given = name_of(**other);
      if (source_of(given) == kCommandLine) continue;  // it takes precedence
      refuse(source, text("'", key, "' excludes '", given, "' (", source_of(given),
                          "); remove one of them"));
    }
    apply(*option, words_of(*option, entry.second, source, key), source);
    given_.insert(name_of(*option));
  }
}

void OptionSources::read_variable(const std::string& option, const char* name,
                                  const Lookup& variable) {
  const auto value = variable(name);
  if (!value || value->empty() || is_set(option)) return;
  apply(*app_.get_option("--" + option), {*value}, name);
}

bool OptionSources::is_given(const std::string& option) const { return given_.contains(option); }

std::string OptionSources::print() const {
  std::string lines;
  for (const CLI::Option* option : std::as_const(app_).get_options()) {
    const std::string name = name_of(*option);
    if (actions_.contains(name)) continue;
    const auto source = sources_.find(name);
    YAML::Emitter value;
    if (source == sources_.end()) {
      is_flag(*option)                    ? value << false
      : option->get_default_str().empty() ? value << YAML::Null
                                          : value << option->get_default_str();
    } else if (is_flag(*option)) {
      value << option->as<bool>();
    } else if (is_list(*option)) {
      value << YAML::Flow << option->results();
    } else {
      value << option->results().front();
    }
    std::string line = text(name, ": ", value.c_str());
    line.resize(std::max<std::size_t>(line.size() + 2, 40), ' ');
    lines += text(line, "# ", source == sources_.end() ? "default" : source->second, "\n");
  }
  return lines;
}

}  // namespace hvd::launcher
