#include "base/expect.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace hvd {

void expectation_failed(const char* file, int line, const char* condition,
                        const char* expected) noexcept {
  try {
    throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": expected that " +
                           expected + ", but not: " + condition);
  } catch (...) {
    std::terminate();  // its handlers ask for the exception that is being handled, and print it
  }
}

}  // namespace hvd
