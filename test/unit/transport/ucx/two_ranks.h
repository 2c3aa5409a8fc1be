#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "transport/carrier.h"
#include "transport/request_table.h"

namespace hvd::testing {

inline constexpr message::Tag kTag = 12345;
inline constexpr std::byte kByte{7};

/// Sends this rank's address through a socket, and returns the address of the other.
inline std::vector<std::byte> swap_addresses(int socket, const std::vector<std::byte>& own) {
  const auto bytes = static_cast<std::uint32_t>(own.size());
  if (::write(socket, &bytes, sizeof bytes) != sizeof bytes ||
      ::write(socket, own.data(), own.size()) != static_cast<ssize_t>(own.size()))
    throw std::runtime_error("the other end has closed the socket");
  const auto read_all = [socket](void* place, std::size_t wanted) {
    for (std::size_t got = 0; got < wanted;) {
      const ssize_t now = ::read(socket, static_cast<char*>(place) + got, wanted - got);
      if (now <= 0) throw std::runtime_error("the other end has closed the socket");
      got += static_cast<std::size_t>(now);
    }
  };
  std::uint32_t coming = 0;
  read_all(&coming, sizeof coming);
  std::vector<std::byte> other(coming);
  read_all(other.data(), coming);
  return other;
}

/// Exchanges a byte with the other rank, which establishes the connection.
inline void exchange(message::RequestTable& table, int other, std::byte& byte) {
  const std::byte own{1};
  table.reset(2);
  table.receive(0, {&byte, 1}, other, kTag + 1);
  table.send(1, {&own, 1}, other, kTag + 1);
  while (table.in_flight() > 0) table.test();
}

}  // namespace hvd::testing
