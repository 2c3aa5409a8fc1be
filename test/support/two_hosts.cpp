#include "support/two_hosts.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <sstream>

namespace hvd::testing {

std::string shell(const std::string& command, int& code) {
  std::string output;
  std::FILE* const pipe = ::popen(("exec 2>&1; " + command).c_str(), "r");
  if (pipe == nullptr) {
    code = -1;
    return output;
  }
  std::array<char, 512> buffer{};
  while (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe) != nullptr)
    output += buffer.data();
  code = ::pclose(pipe);
  return output;
}

TwoHosts::TwoHosts() {
  const std::string id = std::to_string(::getpid());
  switch_ = "hvdt" + id + "s";
  names_ = {"hvdt" + id + "a", "hvdt" + id + "b"};
  if (::geteuid() != 0) {
    missing_ = "network namespaces need root";
    return;
  }
  begun_ = true;
  std::string known = "127.0.0.1 localhost\\n";
  for (int host : {0, 1}) known += address(host) + " " + name(host) + "\\n";
  std::string script = "set -e; ip netns add " + switch_ + "; ip -n " + switch_ +
                       " link add br0 type bridge; ip -n " + switch_ + " link set br0 up; ";
  for (int i : {0, 1}) {
    const std::string& host = name(i);
    const std::string port = "p" + std::to_string(i);
    script += "ip netns add " + host + "; ip -n " + host +
              " link set lo up; ip link add eth0 netns " + host + " type veth peer name " + port +
              " netns " + switch_ + "; ip -n " + host + " addr add " + address(i) +
              "/24 dev eth0; ip -n " + host + " link set eth0 up; ip -n " + switch_ + " link set " +
              port + " master br0 up; mkdir -p /etc/netns/" + host + "; printf '" + known +
              "' > /etc/netns/" + host + "/hosts; ip netns exec " + host +
              " unshare --uts hostname " + host + "; ";
  }
  int code = 0;
  const std::string output = shell(script, code);
  if (code != 0) missing_ = "network namespaces cannot be made here: " + output;
}

TwoHosts::~TwoHosts() {
  if (!begun_) return;
  int code = 0;
  for (int host : {0, 1}) {
    kill(host);
    // Also removes the files that a killed daemon of Open MPI has left.
    shell("ip netns del " + name(host) + "; rm -rf /etc/netns/" + name(host) + " /tmp/ompi." +
              name(host) + ".*",
          code);
  }
  shell("ip netns del " + switch_, code);
}

std::vector<std::string> TwoHosts::prefix(int host) const {
  return {"ip",       "netns",   "exec",
          name(host), "unshare", "--uts",
          "sh",       "-c",      R"(hostname "$0"; exec "$@")",
          name(host)};
}

bool TwoHosts::cut(int host) const {
  int code = 0;
  shell("ip -n " + switch_ + " link set p" + std::to_string(host) + " down", code);
  return code == 0;
}

bool TwoHosts::mend(int host) const {
  int code = 0;
  shell("ip -n " + switch_ + " link set p" + std::to_string(host) + " up", code);
  return code == 0;
}

bool TwoHosts::slow(int host, int megabits) const {
  int code = 0;
  shell("tc -n " + name(host) + " qdisc add dev eth0 root tbf rate " + std::to_string(megabits) +
            "mbit burst 64kb latency 50ms",
        code);
  return code == 0;
}

std::vector<int> TwoHosts::processes(int host) const {
  int code = 0;
  std::istringstream text(shell("ip netns pids " + name(host), code));
  std::vector<int> pids;
  for (int pid = 0; text >> pid;) pids.push_back(pid);
  return pids;
}

void TwoHosts::kill(int host) const {
  for (const int pid : processes(host)) ::kill(pid, SIGKILL);
}

}  // namespace hvd::testing
