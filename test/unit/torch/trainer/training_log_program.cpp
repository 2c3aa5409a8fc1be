#include "trainer/training_log.h"

// Writes the logs of a run that was ended after step 4 and resumed at step 3, for
// tensorboard_test.py.

int main(int, char** arguments) {
  const std::vector<std::string> kinds = {"tensorboard"};
  {
    hvd::libtorch::TrainingLog log(arguments[1], kinds, 0);
    for (int step = 1; step <= 4; ++step)
      log.write(step, step, {{"eval/loss", 10 + step}, {"rate", 0.5}});
  }
  hvd::libtorch::TrainingLog log(arguments[1], kinds, 3);
  for (int step = 3; step <= 300; ++step) log.write(step, step, {{"eval/loss", 20 + step}});
}
