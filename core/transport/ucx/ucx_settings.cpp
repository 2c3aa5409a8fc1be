#include "transport/ucx/ucx_settings.h"

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

// Note [UCX's settings]
// hvd changes the configuration that UCX has read from the environment, except settings that the
// environment contains. Processes that the program starts do not inherit these changes.
//
//   UCX_TCP_CONN_NB=y           connect() does not block: an unreachable host blocked a rank for
//                               more than 12 s
//   UCX_TLS=^sm                 no transport that uses shared memory or reads another process's
//                               memory: with these, a live process may end when its peer does, and
//                               a peer that reads from this process cannot be stopped when a
//                               message is cancelled. On a host, tensors go through hvd's own
//                               shared memory
//   UCX_MM_ERROR_HANDLING=y     if the user enables such a transport, it reports errors
//   UCX_RNDV_THRESH=2m          with TCP only, no process reads from another, so a rendezvous with
//                               the receiver saves no copy. A channel's messages (up to 1 MiB) have
//                               their receives posted, and skip it. An allreduce of 16 MiB between
//                               two hosts takes 0.8 to 0.9 times as long as with 256k
//   UCX_TCP_RX_SEG_SIZE=256k    with TCP only, a channel's message arrives in one piece instead of
//                               several of 64 KiB: the same allreduce takes 0.75 times as long
//   UCX_RX_MPOOL_SIZES=64,...   with TCP only, a message that arrives before its receive is stored
//                               in memory of about its size. UCX allocates that for many messages
//                               when the first one arrives; if each took as much as the largest,
//                               the first negotiation of 161 tensors would take 0.5 ms longer
//   UCX_NET_DEVICES=eth0        with TCP only, the interface that reached the rendezvous, if other
//                               hosts can reach it: UCX would choose another one by its speed, for
//                               example a bridge of containers, and listen on all
//   UCX_RNDV_SCHEME=get_zcopy   if the user enables such a transport, the receiver fetches a large
//                               message, so that no peer writes into this process
//
// UCX reads two more while it is loaded, so they are in the environment for that moment:
//
//   UCX_ERROR_SIGNALS=          leaves signals to the program: UCX would catch SIGSEGV and print
//   UCX_MEM_EVENTS=n            UCX does not replace malloc(), mmap() and munmap()

namespace hvd::ucx {
namespace {

constexpr const char* kTransports = "^sm";

constexpr std::pair<const char*, const char*> kReadWhileLoading[] = {{"UCX_ERROR_SIGNALS", ""},
                                                                     {"UCX_MEM_EVENTS", "n"}};

/// A setting of one transport. In a configuration, UCX 1.13 uses the setting's name without the
/// transport's prefix, and newer versions use the whole name; each ignores the other name.
struct Setting {
  const char* prefix;
  const char* name;
  const char* value;
};
constexpr Setting kAlways[] = {{"TCP_", "CONN_NB", "y"},
                               {"", "TLS", kTransports},
                               {"MM_", "ERROR_HANDLING", "y"},
                               {"", "RNDV_SCHEME", "get_zcopy"}};
constexpr Setting kWithTcpOnly[] = {{"", "RNDV_THRESH", "2m"},
                                    {"TCP_", "RX_SEG_SIZE", "256k"},
                                    {"", "RX_MPOOL_SIZES", "64,256,1k,2k,4k,8k,16k,64k"}};

}  // namespace

LoadVariables::LoadVariables() {
  for (const auto& [name, value] : kReadWhileLoading) {
    if (std::getenv(name) != nullptr || ::setenv(name, value, 0) != 0) continue;
    set_.push_back(name);
  }
}

LoadVariables::~LoadVariables() {
  for (const char* const name : set_) ::unsetenv(name);
}

bool only_tcp() {
  const char* const setting = std::getenv("UCX_TLS");
  const std::string transports = setting == nullptr ? kTransports : setting;
  if (transports == kTransports) {
    std::error_code unreadable;
    const std::filesystem::directory_iterator adapters("/sys/class/infiniband", unreadable);
    return unreadable || adapters == std::filesystem::directory_iterator();
  }
  return transports == "tcp" || transports == "tcp,self" || transports == "self,tcp";
}

std::vector<std::pair<std::string, std::string>> settings_to_change(const std::string& interface) {
  std::vector<std::pair<std::string, std::string>> changes;
  const auto change = [&](const Setting& setting) {
    const std::string name = std::string(setting.prefix) + setting.name;
    if (std::getenv(("UCX_" + name).c_str()) != nullptr) return;
    changes.emplace_back(name, setting.value);
    if (name != setting.name) changes.emplace_back(setting.name, setting.value);
  };
  for (const Setting& setting : kAlways) change(setting);
  if (!only_tcp()) return changes;
  for (const Setting& setting : kWithTcpOnly) change(setting);
  if (!interface.empty()) change({"", "NET_DEVICES", interface.c_str()});
  return changes;
}

std::string interface_in_use(const std::string& interface) {
  const char* const own = std::getenv("UCX_NET_DEVICES");
  if (own == nullptr) return only_tcp() ? interface : std::string();
  const std::string_view name = own;
  return name == "all" || name.find(',') != std::string_view::npos ? std::string() : own;
}

}  // namespace hvd::ucx
