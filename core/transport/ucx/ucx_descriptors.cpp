#include "transport/ucx/ucx_descriptors.h"

#include <fcntl.h>
#include <link.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "base/log.h"
#include "transport/ucx/ucx_shortage.h"

// Note [UCX's descriptors]
// UCX opens its sockets without SOCK_CLOEXEC, and has no setting for it. A program that a rank
// starts would keep the rank's connections open, so other hosts would not detect the end of the
// rank. A later fcntl() does not help: UCX's own thread accepts connections at any time, and
// another thread may start a program between the two calls. Therefore the calls of UCX's libraries
// to functions that open descriptors are redirected to the functions below, by changing entries of
// the libraries' global offset tables. UCX itself uses this method on other libraries for
// UCX_MEM_EVENTS. Calls of other libraries are not affected.

namespace hvd::ucx {
namespace {

/// Passes on the result of a system call, and records a failure.
int recorded(int result) noexcept {
  const int error = errno;
  if (result < 0) record_failed_call(error);
  errno = error;
  return result;
}

int open_socket(int domain, int type, int protocol) {
  return recorded(::socket(domain, type | SOCK_CLOEXEC, protocol));
}
int accept_socket(int listener, sockaddr* address, socklen_t* length) {
  return recorded(::accept4(listener, address, length, SOCK_CLOEXEC));
}
int open_epoll(int /*size*/) { return recorded(::epoll_create1(EPOLL_CLOEXEC)); }
int open_pipe(int* ends) { return recorded(::pipe2(ends, O_CLOEXEC)); }
int open_eventfd(unsigned value, int flags) {
  return recorded(::eventfd(value, flags | EFD_CLOEXEC));
}
int open_timer(int clock, int flags) {
  return recorded(::timerfd_create(clock, flags | TFD_CLOEXEC));
}
int open_file(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return recorded(::open(path, flags | O_CLOEXEC, mode));
}
std::FILE* open_stream(const char* path, const char* mode) {
  return std::fopen(path, (std::string(mode) + "e").c_str());
}

void* address_of(auto* function) noexcept { return reinterpret_cast<void*>(function); }

/// The replacement of the function with this name; null if it is not replaced.
void* replacement_of(std::string_view name) noexcept {
  if (name == "socket") return address_of(open_socket);
  if (name == "accept") return address_of(accept_socket);
  if (name == "epoll_create") return address_of(open_epoll);
  if (name == "pipe") return address_of(open_pipe);
  if (name == "eventfd") return address_of(open_eventfd);
  if (name == "timerfd_create") return address_of(open_timer);
  if (name == "open" || name == "open64") return address_of(open_file);
  if (name == "fopen" || name == "fopen64") return address_of(open_stream);
  return nullptr;
}

/// A loaded library, as described by the loader's tables.
class Library {
 public:
  explicit Library(const dl_phdr_info& info) noexcept : base_(info.dlpi_addr) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = info.dlpi_phdr[i];
      if (part.p_type == PT_DYNAMIC) read(reinterpret_cast<const ElfW(Dyn)*>(base_ + part.p_vaddr));
      if (part.p_type != PT_GNU_RELRO) continue;
      // The loader protects whole pages only.
      protected_begin_ = base_ + part.p_vaddr;
      protected_end_ = page_of(protected_begin_ + part.p_memsz);
    }
  }

  void replace_functions() noexcept {
    if (symbols_ == nullptr || names_ == nullptr) return;
    replace_in(calls_, calls_bytes_);
    replace_in(others_, others_bytes_);
  }

 private:
  static std::size_t page_bytes() noexcept {
    return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  }
  static ElfW(Addr) page_of(ElfW(Addr) at) noexcept { return at & ~(page_bytes() - 1); }

  void read(const ElfW(Dyn) * entry) noexcept {
    for (; entry->d_tag != DT_NULL; ++entry) {
      const ElfW(Addr) value = entry->d_un.d_ptr;
      const ElfW(Addr) at = value < base_ ? base_ + value : value;
      if (entry->d_tag == DT_SYMTAB) symbols_ = reinterpret_cast<const ElfW(Sym)*>(at);
      if (entry->d_tag == DT_STRTAB) names_ = reinterpret_cast<const char*>(at);
      if (entry->d_tag == DT_JMPREL) calls_ = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_RELA) others_ = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_PLTRELSZ) calls_bytes_ = value;
      if (entry->d_tag == DT_RELASZ) others_bytes_ = value;
    }
  }

  void replace_in(const ElfW(Rela) * table, std::size_t bytes) noexcept {
    for (std::size_t i = 0; table != nullptr && i < bytes / sizeof *table; ++i) {
      const auto symbol = table[i].r_info >> 32;
      if (symbol == 0 || table[i].r_addend != 0) continue;
      void* const function = replacement_of(names_ + symbols_[symbol].st_name);
      if (function != nullptr) write(base_ + table[i].r_offset, function);
    }
  }

  void write(ElfW(Addr) at, void* function) noexcept {
    auto& entry = *reinterpret_cast<void* volatile*>(at);
    if (entry == function) return;
    void* const page = reinterpret_cast<void*>(page_of(at));
    const bool read_only = at >= protected_begin_ && at < protected_end_;
    if (read_only && ::mprotect(page, page_bytes(), PROT_READ | PROT_WRITE) != 0) {
      HVD_LOG(kInfo) << "ucx: programs that this process starts may inherit its connections: "
                     << std::strerror(errno);
      return;
    }
    entry = function;
    if (read_only) ::mprotect(page, page_bytes(), PROT_READ);
  }

  const ElfW(Addr) base_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  const ElfW(Rela) * calls_ = nullptr;   ///< relocations of functions that are called
  const ElfW(Rela) * others_ = nullptr;  ///< the other relocations
  std::size_t calls_bytes_ = 0;
  std::size_t others_bytes_ = 0;
  ElfW(Addr) protected_begin_ = 0;  ///< of the part that the loader has made read-only
  ElfW(Addr) protected_end_ = 0;
};

bool belongs_to_ucx(const char* path) noexcept {
  const char* const slash = path == nullptr ? nullptr : std::strrchr(path, '/');
  const std::string_view file = slash == nullptr ? std::string_view() : slash + 1;
  return file.starts_with("libucs") || file.starts_with("libuct") || file.starts_with("libucp");
}

}  // namespace

void close_descriptors_on_exec() noexcept {
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void*) {
        if (belongs_to_ucx(info->dlpi_name)) Library(*info).replace_functions();
        return 0;
      },
      nullptr);
}

}  // namespace hvd::ucx
