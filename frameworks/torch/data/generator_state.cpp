#include "data/generator_state.h"

#include <ATen/CPUGeneratorImpl.h>

#include "data/mix.h"

namespace hvd::libtorch {

// Words 1 and 2 of the state are the 64 bits of a bijection of `start`; of word 0 the algorithm
// uses one bit.
at::Generator generator_from(std::uint64_t start) {
  at::mt19937_data_pod state{};
  state.seed_ = start;
  state.left_ = 1;
  state.next_ = 0;
  state.seeded_ = true;
  state.state_[0] = 0x80000000U;
  for (std::size_t i = 1; i < state.state_.size(); ++i) {
    const std::uint64_t pair = mix(start + (i - 1) / 2);
    state.state_[i] = static_cast<std::uint32_t>(i % 2 == 1 ? pair >> 32 : pair);
  }
  at::mt19937 engine;
  engine.set_data(state);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
}

}  // namespace hvd::libtorch
