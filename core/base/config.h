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

/// An environment variable: what may be in it, and what docs/configuration.md says of it.
struct Variable {
  std::string_view name;  ///< after "HVD_"; those for the runtime are read under "HOROVOD_" too
  VariableUse use = VariableUse::kRuntime;
  VariableKind kind = VariableKind::kText;
  std::string_view option = {};   ///< the member of hvd::Options that goes before it
  std::int64_t lowest = 0;        ///< of a whole number; of seconds: 1 means more than 0
  std::int64_t highest = 0;       ///< of a whole number
  std::string_view choices = {};  ///< "auto|off"
  std::string_view fallback =
      {};  ///< what it is when it is unset, as it would be written; empty: described in `otherwise`
  std::string_view otherwise = {};
  std::string_view meaning = {};
};

/// All of them, in the order of the document.
std::span<const Variable> variables() noexcept;

/// Of HVD_<name>, or of HOROVOD_<name>; unset and empty are the same. All of these throw
/// UsageError, naming the variable, what was expected and what it holds, and Error for a name that
/// is not in the table.
std::optional<std::string> env_string(std::string_view name);
std::optional<std::int64_t> env_int(std::string_view name);
/// Seconds, fractions allowed, as milliseconds.
std::optional<std::chrono::milliseconds> env_seconds(std::string_view name);
/// 1, yes, true and on, or 0, no, false and off, in any case.
std::optional<bool> env_switch(std::string_view name);
/// One of the choices, which are in lower case; in any case.
std::optional<std::string> env_choice(std::string_view name);

/// Looks at all variables for the runtime. @throws UsageError for the first that cannot be
/// understood
void check_environment();
/// "HVD_PEER_TIMEOUT=3" for each variable of this use that is set to something else than its
/// default.
std::vector<std::string> variables_in_force(VariableUse);
/// A sentence for each variable that begins with "HVD_" and is none of hvd's, with the name that is
/// most like it.
std::vector<std::string> unknown_variables();

/// For people, and the document: "seconds, more than 0", "`auto` or `off`"; empty for any text.
std::string expected_values(const Variable&, char quote);

}  // namespace hvd
