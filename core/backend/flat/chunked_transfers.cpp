#include "backend/flat/chunked_transfers.h"

#include <algorithm>

namespace hvd::flat {

int ChunkedTransfers::add_send(int peer, std::span<const std::byte> bytes) {
  transfers_.push_back({.kind = Kind::kSend,
                        .peer = peer,
                        .source = bytes.data(),
                        .bytes = bytes.size(),
                        .limit = bytes.size()});
  return static_cast<int>(transfers_.size()) - 1;
}

int ChunkedTransfers::add_receive(int peer, std::span<std::byte> bytes) {
  transfers_.push_back({.kind = Kind::kReceive,
                        .peer = peer,
                        .destination = bytes.data(),
                        .bytes = bytes.size(),
                        .limit = bytes.size()});
  return static_cast<int>(transfers_.size()) - 1;
}

int ChunkedTransfers::add_ring_receive(int peer, std::byte* ring, std::size_t bytes) {
  transfers_.push_back(
      {.kind = Kind::kRingReceive, .peer = peer, .destination = ring, .bytes = bytes, .limit = 0});
  return static_cast<int>(transfers_.size()) - 1;
}

std::size_t ChunkedTransfers::ring_bytes() const noexcept { return outstanding() * chunk(); }

void ChunkedTransfers::start() { context_.requests().reset(transfers_.size() * outstanding()); }

std::size_t ChunkedTransfers::done(int transfer) const noexcept {
  const Transfer& one = transfer_at(transfer);
  return std::min(one.bytes, one.finished * chunk());
}

const std::byte* ChunkedTransfers::ring_at(int transfer, std::size_t offset) const noexcept {
  return transfer_at(transfer).destination + offset / chunk() % outstanding() * chunk();
}

bool ChunkedTransfers::may_post(const Transfer& transfer) const noexcept {
  if (transfer.posted == chunks(transfer) || transfer.posted - transfer.finished == outstanding())
    return false;
  switch (transfer.kind) {
    case Kind::kSend:
      return std::min(transfer.bytes, (transfer.posted + 1) * chunk()) <= transfer.limit;
    case Kind::kRingReceive:
      return (transfer.posted + 1) * chunk() <= transfer.limit + ring_bytes();
    case Kind::kReceive:
      break;
  }
  return true;
}

void ChunkedTransfers::post(std::size_t index) {
  Transfer& transfer = transfers_[index];
  const std::size_t offset = transfer.posted * chunk();
  const std::size_t bytes = std::min(chunk(), transfer.bytes - offset);
  const std::size_t place = transfer.posted % outstanding();
  const std::size_t slot = index * outstanding() + place;
  switch (transfer.kind) {
    case Kind::kSend:
      context_.send(slot, {transfer.source + offset, bytes}, transfer.peer, kFlowKind);
      break;
    case Kind::kReceive:
      context_.receive(slot, {transfer.destination + offset, bytes}, transfer.peer, kFlowKind);
      break;
    case Kind::kRingReceive:
      context_.receive(slot, {transfer.destination + place * chunk(), bytes}, transfer.peer,
                       kFlowKind);
      break;
  }
  ++transfer.posted;
}

bool ChunkedTransfers::advance() {
  bool complete = true;
  for (std::size_t index = 0; index < transfers_.size(); ++index) {
    Transfer& transfer = transfers_[index];
    while (transfer.finished < transfer.posted &&
           context_.requests().idle(index * outstanding() + transfer.finished % outstanding()))
      ++transfer.finished;
    while (may_post(transfer)) post(index);
    complete = complete && transfer.finished == chunks(transfer);
  }
  return complete;
}

bool ChunkedTransfers::step() {
  if (advance()) return true;
  if (context_.test().empty()) return false;
  return advance();
}

}  // namespace hvd::flat
