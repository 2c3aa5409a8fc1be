#include "public/elastic_state.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "public/elastic_stage.h"
#include "public/process.h"

namespace hvd::elastic {
namespace {

void add(State::Impl& state, Item item) {
  if (item.name.empty()) throw UsageError("hvd::elastic::State::track: expected a name");
  if (state.running) {
    throw UsageError(text("hvd::elastic::State::track('", item.name,
                          "'): called in the function of run(); track everything before run()"));
  }
  const bool known = std::any_of(state.items.begin(), state.items.end(),
                                 [&](const Item& other) { return other.name == item.name; });
  if (known) {
    throw UsageError(text("hvd::elastic::State::track('", item.name,
                          "'): the name is tracked already; expected one name per variable"));
  }
  state.items.push_back(std::move(item));
}

}  // namespace

void State::Impl::prepare(bool goes_on) const {
  try {
    Preparation next{.commit = commits + 1, .leaving = {}};
    if (!goes_on) next.leaving = link->leaving();
    for (const Item& item : items)
      if (item.prepare) item.prepare(next);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    if (goes_on) throw;
    HVD_LOG(kInfo) << "this rank has not committed, because the members of the elastic job change: "
                   << error.what();
    throw GenerationOver("the members of the elastic job change");
  }
}

void State::Impl::save_commit() {
  save(items, spare.replicated, is_copied);
  save(items, spare.own, is_own);
  // Copies from a GPU have waited for its work. If the job has failed, aborted collectives may have
  // left undefined results.
  const auto runtime = runtime::runtime_or_null();
  if (runtime && runtime->device() && runtime->failed()) runtime->failure().raise_if_error();
  std::swap(committed, spare);
  known_hash.reset();
  has_state = true;
}

void State::Impl::reserve() {
  save(items, spare.replicated, is_copied);
  save(items, spare.own, is_own);
}

void State::Impl::lose() {
  committed = {};
  known_hash.reset();
  has_state = false;
  for (const Item& item : items)
    if (item.lost) item.lost();
}

std::uint64_t State::Impl::committed_hash() const {
  if (!known_hash) known_hash = hash_of(committed.replicated);
  return *known_hash;
}

void State::Impl::restore_commit() const {
  load(items, committed.replicated, is_copied);
  load(items, committed.own, is_own);
}

void State::Impl::confirm() const {
  for (const Item& item : items)
    if (item.committed) item.committed(commits);
}

member::StateSummary State::Impl::summary() const {
  if (!has_state) return {};
  const bool touched = std::any_of(items.begin(), items.end(),
                                   [](const Item& item) { return item.touched && item.touched(); });
  return {.commit = commits,
          .kind = touched ? member::StateKind::kTouched : member::StateKind::kWhole,
          .hash = committed_hash() ^ hash_of(items, is_live)};
}

bool State::Impl::divided() const {
  return has_state && std::any_of(items.begin(), items.end(),
                                  [](const Item& item) { return item.divided && item.divided(); });
}

State::State() : impl_(std::make_unique<Impl>()) {}
State::~State() = default;

State& State::track(std::string_view name, std::string& text) {
  return track_resizable(
      name, 1, [&text] { return std::as_bytes(std::span(text)); },
      [&text](std::size_t count) {
        text.resize(count);
        return std::as_writable_bytes(std::span(text));
      });
}

State& State::track_memory(std::string_view name, std::string_view kind,
                           std::span<std::byte> memory) {
  const std::string title(name);
  add(*impl_, {.name = title,
               .type = text(kind, "[", memory.size(), "]"),
               .view = [memory] { return std::span<const std::byte>(memory); },
               .room =
                   [memory, title](std::size_t bytes) {
                     if (bytes == memory.size()) return memory;
                     throw Error(text("hvd::elastic: '", title, "' has ", memory.size(),
                                      " bytes here, and ", bytes,
                                      " in the received state; start the same program "
                                      "everywhere"));
                   }});
  return *this;
}

State& State::track_resizable(std::string_view name, std::size_t element,
                              std::function<std::span<const std::byte>()> view,
                              std::function<std::span<std::byte>(std::size_t count)> resize) {
  const std::string title(name);
  add(*impl_, {.name = title,
               .type = text("elements of ", element),
               .view = std::move(view),
               .room = [element, title, resize = std::move(resize)](std::size_t bytes) {
                 if (bytes % element == 0) return resize(bytes / element);
                 throw Error(text("hvd::elastic: '", title, "' has elements of ", element,
                                  " bytes here, and ", bytes,
                                  " bytes in the received state; start the same "
                                  "program everywhere"));
               }});
  return *this;
}

State& State::track(Part part) {
  if (!part.view || !part.room) {
    throw UsageError(text("hvd::elastic::State::track('", part.name,
                          "'): expected the functions view and room of the part"));
  }
  add(*impl_, std::move(part));
  return *this;
}

void State::commit() {
  if (!impl_->running) {
    throw UsageError(
        "hvd::elastic::State::commit: called outside the function of hvd::elastic::run()");
  }
  const bool goes_on = impl_->link == nullptr || impl_->link->commit();
  // Outside an elastic job the state is never restored from a commit.
  if (impl_->link != nullptr) {
    reach(Stage::kCommitting);
    impl_->prepare(goes_on);
    impl_->save_commit();
  }
  ++impl_->commits;
  impl_->confirm();
  if (!goes_on) throw GenerationOver("the members of the elastic job change");
}

std::uint64_t State::commits() const noexcept { return impl_->commits; }

State& State::on_change(std::function<void(const Change&)> callback) {
  if (!callback) throw UsageError("hvd::elastic::State::on_change: expected a function");
  impl_->callbacks.push_back(std::move(callback));
  return *this;
}

}  // namespace hvd::elastic
