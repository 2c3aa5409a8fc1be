#include "device/context.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {

Context::Context(std::shared_ptr<Api> api, int device, Surroundings surroundings)
    : api_(std::move(api)),
      device_(device),
      events_(EventPool::create(api_, device)),
      memory_(
          std::make_shared<MemorySource>(api_, device, events_, std::move(surroundings.memory))),
      run_aside_(std::move(surroundings.run_aside)) {}

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

void Context::run_aside(std::function<void()> function) {
  run_aside_ ? run_aside_(std::move(function)) : function();
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
