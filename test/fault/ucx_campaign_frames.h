#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace hvd::ucx_campaign {

inline void write_frame(int socket, std::span<const std::byte> content) {
  const auto bytes = static_cast<std::uint32_t>(content.size());
  if (::send(socket, &bytes, sizeof bytes, MSG_NOSIGNAL) != sizeof bytes ||
      ::send(socket, content.data(), content.size(), MSG_NOSIGNAL) !=
          static_cast<ssize_t>(content.size()))
    throw std::runtime_error("the other end has closed the socket");
}

inline std::vector<std::byte> read_frame(int socket) {
  const auto read_all = [socket](void* place, std::size_t bytes) {
    if (bytes > 0 && ::recv(socket, place, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes))
      throw std::runtime_error("the other end has closed the socket");
  };
  std::uint32_t bytes = 0;
  read_all(&bytes, sizeof bytes);
  std::vector<std::byte> content(bytes);
  read_all(content.data(), bytes);
  return content;
}

}  // namespace hvd::ucx_campaign
