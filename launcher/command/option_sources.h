#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "command/rank_environment.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace hvd::launcher {

/// The options of a command line, and where the value of each comes from. The command line takes
/// precedence over the configuration file, and that over the environment. Not thread-safe.
class OptionSources {
 public:
  /// @param app has parsed the command line, and outlives this object
  /// @param actions options that a file must not set, such as --help
  OptionSources(CLI::App& app, std::set<std::string> actions);

  /// Reads the options that the command line lacks from a YAML file, whose keys are the options'
  /// names. Both spellings of a name, with hyphens and with underscores, are keys.
  /// @throws LaunchError (kUsage) that names the file, and the line of a key that is unknown or has
  /// a value of the wrong kind
  void read_file(const std::string& path);
  /// Takes an option's value from a variable, if no other source gives the option.
  /// @throws LaunchError (kUsage) that names the variable
  void read_variable(const std::string& option, const char* name, const Lookup& variable);

  /// Whether the command line or the file gives the option.
  bool is_given(const std::string& option) const;
  /// Whether any source gives it.
  bool is_set(const std::string& option) const { return sources_.contains(option); }

  /// The source that gives an option, as "command line" or "job.yaml, line 3".
  const std::string& source_of(const std::string& option) const { return sources_.at(option); }

  /// All options in YAML, which read_file() reads, with the source of each value as a comment.
  std::string print() const;

 private:
  void apply(CLI::Option& option, const std::vector<std::string>& values,
             const std::string& source);

  CLI::App& app_;
  const std::set<std::string> actions_;
  std::map<std::string, std::string> sources_;  ///< by option name
  std::set<std::string> given_;
};

}  // namespace hvd::launcher
