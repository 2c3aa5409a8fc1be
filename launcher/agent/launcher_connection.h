#pragma once

#include <asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reports/frame_connection.h"
#include "reports/report.h"

namespace hvd::launcher {

struct LauncherAddress {
  std::vector<std::string> addresses;  ///< numeric, tried at the same time
  std::uint16_t port = 0;
  bool same_clock = false;  ///< hvdrun runs on this host
};

/// The functions that handle the events of an agent's connection to hvdrun.
struct LauncherHandlers {
  /// Called once, before the others. @param clock_offset_ns hvdrun's clock minus this host's
  std::function<void(std::shared_ptr<FrameConnection>, const Welcome&, long long clock_offset_ns)>
      on_welcome;
  FrameConnection::OnFrame on_frame;
  FrameConnection::OnEnd on_end;
  /// Whether the agent need not connect any more. Called after each event.
  std::function<bool()> gives_up = [] { return false; };
};

/// Connects to all addresses at the same time, and keeps the first connection over which both sides
/// have proved that they have the token. Sends only a random number to a peer that has not proved
/// this. Returns false if no hvdrun with the token answers in time, or the agent gives up. Runs the
/// event loop meanwhile.
/// @param hello without its proof
/// @param connect_timeout how long to wait for a connection
/// @param answer_timeout how long to wait for an answer once there is a connection
bool connect_to_launcher(asio::io_context& io, const LauncherAddress& address, const Hello& hello,
                         const std::string& token, int silence_limit_ms,
                         std::chrono::milliseconds connect_timeout,
                         std::chrono::milliseconds answer_timeout, LauncherHandlers handlers);

/// Connects to the hvdrun that the HVD_LAUNCHER_ variables name, in several attempts. If hvdrun is
/// out of reach, prints the reasons and returns false; also returns false if the agent gives up.
/// @param hello without its proof
/// @param who for example "rank 3"
bool reach_launcher(asio::io_context& io, const Hello& hello, const std::string& token,
                    const std::string& who, const LauncherHandlers& handlers);

}  // namespace hvd::launcher
