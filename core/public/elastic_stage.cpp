#include "public/elastic_stage.h"

#include <utility>

namespace hvd::elastic {
namespace {

std::function<void(Stage)>& observer_of_stages() {
  static std::function<void(Stage)> observer;
  return observer;
}

}  // namespace

void observe_stages(std::function<void(Stage)> observer) {
  observer_of_stages() = std::move(observer);
}

void reach(Stage stage) {
  if (const auto& observer = observer_of_stages()) observer(stage);
}

}  // namespace hvd::elastic
