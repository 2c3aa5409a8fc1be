#include "backend/mpi/flow_set.h"

#include <algorithm>

namespace hvd::mpi {

int FlowSet::add_send(int peer, std::span<const std::byte> bytes) {
  flows_.push_back({.kind = Kind::kSend,
                    .peer = peer,
                    .source = bytes.data(),
                    .bytes = bytes.size(),
                    .limit = bytes.size()});
  return static_cast<int>(flows_.size()) - 1;
}

int FlowSet::add_receive(int peer, std::span<std::byte> bytes) {
  flows_.push_back({.kind = Kind::kReceive,
                    .peer = peer,
                    .destination = bytes.data(),
                    .bytes = bytes.size(),
                    .limit = bytes.size()});
  return static_cast<int>(flows_.size()) - 1;
}

int FlowSet::add_ring_receive(int peer, std::byte* ring, std::size_t bytes) {
  flows_.push_back(
      {.kind = Kind::kRingReceive, .peer = peer, .destination = ring, .bytes = bytes, .limit = 0});
  return static_cast<int>(flows_.size()) - 1;
}

std::size_t FlowSet::ring_bytes() const noexcept { return outstanding() * chunk(); }

void FlowSet::start() { lane_.requests().reset(flows_.size() * outstanding()); }

std::size_t FlowSet::done(int flow) const noexcept {
  const Flow& one = flow_at(flow);
  return std::min(one.bytes, one.finished * chunk());
}

const std::byte* FlowSet::ring_at(int flow, std::size_t offset) const noexcept {
  return flow_at(flow).destination + offset / chunk() % outstanding() * chunk();
}

bool FlowSet::may_post(const Flow& flow) const noexcept {
  if (flow.posted == chunks(flow) || flow.posted - flow.finished == outstanding()) return false;
  switch (flow.kind) {
    case Kind::kSend:
      return std::min(flow.bytes, (flow.posted + 1) * chunk()) <= flow.limit;
    case Kind::kRingReceive:
      return (flow.posted + 1) * chunk() <= flow.limit + ring_bytes();
    case Kind::kReceive:
      break;
  }
  return true;
}

void FlowSet::post(std::size_t index) {
  Flow& flow = flows_[index];
  const std::size_t offset = flow.posted * chunk();
  const std::size_t bytes = std::min(chunk(), flow.bytes - offset);
  const std::size_t place = flow.posted % outstanding();
  const std::size_t slot = index * outstanding() + place;
  switch (flow.kind) {
    case Kind::kSend:
      lane_.send(slot, {flow.source + offset, bytes}, flow.peer, kFlowKind);
      break;
    case Kind::kReceive:
      lane_.receive(slot, {flow.destination + offset, bytes}, flow.peer, kFlowKind);
      break;
    case Kind::kRingReceive:
      lane_.receive(slot, {flow.destination + place * chunk(), bytes}, flow.peer, kFlowKind);
      break;
  }
  ++flow.posted;
}

bool FlowSet::advance() {
  bool complete = true;
  for (std::size_t index = 0; index < flows_.size(); ++index) {
    Flow& flow = flows_[index];
    while (flow.finished < flow.posted &&
           lane_.requests().idle(index * outstanding() + flow.finished % outstanding()))
      ++flow.finished;
    while (may_post(flow)) post(index);
    complete = complete && flow.finished == chunks(flow);
  }
  return complete;
}

bool FlowSet::step() {
  if (advance()) return true;
  if (lane_.test().empty()) return false;
  return advance();
}

}  // namespace hvd::mpi
