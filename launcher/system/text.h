#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// The text without blanks at its ends.
std::string_view trim(std::string_view line);
/// "SIGKILL" for 9; "signal 64" for one without a name.
std::string signal_name(int signal);
/// Quotes a word so that a POSIX shell reads it back unchanged.
std::string shell_quote(std::string_view word);
/// Splits a line like a shell, without expansion: blanks separate words, unless quoted or escaped.
/// @throws LaunchError (kUsage) for a quote that is never closed.
std::vector<std::string> shell_split(std::string_view line);
/// "0.09 s" below a minute, then hh:mm:ss.
std::string format_duration(double seconds);
/// Whether a line is part of a backtrace of LibTorch or of Open MPI's signal handler. The final
/// message omits these.
bool is_backtrace(std::string_view line);

}  // namespace hvd::launcher
