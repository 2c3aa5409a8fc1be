#include <cstdio>

#include "hvd/hvd.h"

/// hvd-build-info: the runtime's own account of itself, for hvdrun --check-build.
int main() {
  const std::string info = hvd::build_info();
  std::fputs(info.c_str(), stdout);
  if (!info.empty() && info.back() != '\n') std::fputc('\n', stdout);
  return 0;
}
