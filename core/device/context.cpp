#include "device/context.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {

Context::Context(std::shared_ptr<Api> api, int device)
    : api_(std::move(api)), device_(device), events_(EventPool::create(api_, device)) {}

void Context::copy_pieces(std::span<const Piece> pieces, const CopyForm& form, std::byte* buffer,
                          bool to_buffer, double factor, Stream stream) {
  CopyLaunch launch{.buffer = buffer, .form = form, .to_buffer = to_buffer, .factor = factor};
  PieceCutter cutter(pieces, form);
  while (cutter.next(launch.table)) api_->run(launch, stream);
}

void Context::wait(Stream stream, const EventPtr& event) {
  if (event == nullptr) return;
  void* const handle = event->native();
  if (handle == nullptr) {
    throw Error("device " + std::to_string(device_) +
                ": an input_ready event without a handle of the device; expected one whose "
                "native() is a CUDA event");
  }
  api_->wait(stream, {handle});
}

Allocator Context::plain_memory() {
  return {[this](std::size_t bytes) { return api_->allocate(bytes); },
          [this](std::byte* memory) { api_->release(memory); }};
}

OwnedStream::OwnedStream(Context& context) : context_(context) {
  const DeviceGuard guard(context_.api(), context_.device());
  stream_ = context_.api().create_stream();
}

OwnedStream::~OwnedStream() {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    context_.api().destroy_stream(stream_);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a stream of device " << context_.device()
                    << " was not freed: " << error.what();
  }
}

}  // namespace hvd::device
