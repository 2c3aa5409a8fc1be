#pragma once

#include <cstdint>
#include <functional>

namespace hvd::elastic {

/// The stages of a worker's run() in an elastic job, each just completed or about to begin.
enum class Stage : std::uint8_t {
  kReady,       ///< it has left its generation and reported this
  kAssigned,    ///< it is a member of the next generation
  kConnecting,  ///< it joins the other members
  kGiving,      ///< it sends its state
  kReceiving,   ///< it receives a state
  kSynced,      ///< it has reported that it has the state
  kCommitting,  ///< it has begun a commit, which is not complete
  kAtEnd,       ///< its function has returned, and it has reported this
};

/// For tests, before run(): calls the function at each stage.
void observe_stages(std::function<void(Stage)> observer);
/// Calls the test's function, if there is one.
void reach(Stage stage);

}  // namespace hvd::elastic
