#include "bench/commands.h"

namespace hvd::bench {

std::vector<Command> torch_commands(CLI::App&) { return {}; }

}  // namespace hvd::bench
