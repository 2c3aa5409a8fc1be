#include <cstdio>

#include "hvd/hvd.h"

/// hvd-build-info: prints the runtime's build information for hvdrun --check-build.
int main() {
  const std::string info = hvd::build_info();
  std::fputs(info.c_str(), stdout);
  if (!info.empty() && info.back() != '\n') std::fputc('\n', stdout);
  return 0;
}
