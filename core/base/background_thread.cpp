#include "hvd/background.h"

namespace hvd {
namespace {

thread_local int depth = 0;

}  // namespace

BackgroundThread::BackgroundThread() noexcept { ++depth; }
BackgroundThread::~BackgroundThread() { --depth; }
bool BackgroundThread::here() noexcept { return depth > 0; }

}  // namespace hvd
