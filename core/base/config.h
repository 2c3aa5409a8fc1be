#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hvd {

enum class VariableKind : std::uint8_t { kWhole, kSeconds, kSwitch, kChoice, kText };
enum class VariableUse : std::uint8_t {
  kRuntime,   ///< read by hvd::init(), or when the library is loaded
  kLauncher,  ///< read or set by hvdrun
  kTest,      ///< for hvd's own tests
};

/// An environment variable: its valid values, and its row in docs/configuration.md.
struct Variable {
  std::string_view name;  ///< without "HVD_"; the runtime also reads its variables as "HOROVOD_"
  VariableUse use = VariableUse::kRuntime;
  VariableKind kind = VariableKind::kText;
  std::string_view option = {};          ///< the member of hvd::Options that overrides it
  std::int64_t lowest = 0;               ///< least whole number; for seconds, 1 means more than 0
  std::int64_t highest = 0;              ///< greatest whole number
  std::string_view choices = {};         ///< "auto|off"
  std::string_view removed_choice = {};  ///< a former choice, which is now an error
  std::string_view instead = {};         ///< the end of that error's text: what to set
  std::string_view fallback =
      {};  ///< the default, as a user would write it; empty: `otherwise` describes the default
  std::string_view otherwise = {};
  std::string_view meaning = {};
};

/// All variables, in the order of the document.
std::span<const Variable> variables() noexcept;

/// Returns the value of HVD_<name>, or else of HOROVOD_<name>. An empty value counts as unset. All
/// five functions throw a UsageError that names the variable, the expected values and the value
/// found. For a name that is not in the table they throw an Error.
std::optional<std::string> env_string(std::string_view name);
std::optional<std::int64_t> env_int(std::string_view name);
/// Reads a number of seconds, which may have a fraction, and returns milliseconds.
std::optional<std::chrono::milliseconds> env_seconds(std::string_view name);
/// Reads 1, yes, true or on as true, and 0, no, false or off as false. Case does not matter.
std::optional<bool> env_switch(std::string_view name);
/// Returns one of the choices, in lower case. The case of the variable's value does not matter.
std::optional<std::string> env_choice(std::string_view name);

/// Checks all variables for the runtime. @throws UsageError for the first invalid one
void check_environment();
/// Returns a text such as "HVD_PEER_TIMEOUT=3" for each variable of this use whose value is not the
/// default.
std::vector<std::string> variables_in_force(VariableUse);
/// Returns a sentence for each variable of the environment that begins with "HVD_" and is unknown,
/// with the most similar known name.
std::vector<std::string> unknown_variables();

/// The valid values in words, for error texts and the document: "seconds, more than 0", "`auto` or
/// `off`". Empty if any text is valid.
std::string expected_values(const Variable&, char quote);

}  // namespace hvd
