#include <hvd/collectives.h>
#include <hvd/hvd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

/// Sums rank + 1 over the ranks; the argument is the number of ranks to expect.
int main(int argc, char** argv) {
  const int expected = argc > 1 ? std::atoi(argv[1]) : 1;
  try {
    hvd::init();
    if (hvd::size() != expected) throw hvd::Error("size is " + std::to_string(hvd::size()));
    hvd::barrier();

    std::vector<std::int64_t> value = {hvd::rank() + 1};
    const hvd::TensorView view{.data = reinterpret_cast<std::byte*>(value.data()),
                               .count = 1,
                               .dtype = hvd::DataType::kInt64,
                               .shape = {1}};
    const hvd::Operation operation = hvd::submit({.name = "sum", .input = view, .output = view});
    operation.wait();
    operation.status().raise_if_error();
    if (value[0] != expected * (expected + 1) / 2)
      throw hvd::Error("the sum is " + std::to_string(value[0]));
    hvd::shutdown();
  } catch (const hvd::Error& error) {
    std::fprintf(stderr, "core_consumer: %s\n", error.what());
    return 1;
  }
  std::puts("core_consumer: ok");
  return 0;
}
