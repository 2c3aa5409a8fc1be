#include "command/controller.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <link.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/needed_libraries.h"
#include "command/probes.h"
#include "mpirun/job_folder.h"
#include "system/children.h"

namespace hvd::launcher {
namespace {

using ::testing::HasSubstr;

/// The bytes of an ELF program that only names these shared libraries.
std::string program_that_needs(const std::vector<std::string>& libraries) {
  constexpr std::size_t kAddress = 0x10000;  // where the file's first byte is mapped
  const std::size_t entries_at = sizeof(ElfW(Ehdr)) + 2 * sizeof(ElfW(Phdr));
  const std::size_t names_at = entries_at + (libraries.size() + 2) * sizeof(ElfW(Dyn));
  std::string names(1, '\0'), entries;
  const auto add_entry = [&](auto tag, std::size_t value) {
    ElfW(Dyn) entry{};
    entry.d_tag = tag;
    entry.d_un.d_val = value;
    entries.append(reinterpret_cast<const char*>(&entry), sizeof entry);
  };
  for (const std::string& library : libraries) {
    add_entry(DT_NEEDED, names.size());
    names += library + '\0';
  }
  add_entry(DT_STRTAB, kAddress + names_at);
  add_entry(DT_NULL, 0);

  ElfW(Ehdr) header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_phoff = sizeof header;
  header.e_phentsize = sizeof(ElfW(Phdr));
  header.e_phnum = 2;
  ElfW(Phdr) segments[2] = {};
  segments[0].p_type = PT_LOAD;
  segments[0].p_vaddr = kAddress;
  segments[0].p_filesz = names_at + names.size();
  segments[1].p_type = PT_DYNAMIC;
  segments[1].p_offset = entries_at;
  segments[1].p_filesz = entries.size();
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.append(reinterpret_cast<const char*>(segments), sizeof segments);
  return bytes + entries + names;
}

std::string write_program(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

ControllerFacts facts(bool mpirun, bool ucx) {
  ControllerFacts facts;
  facts.has_mpirun = mpirun;
  facts.ucx_problem = [ucx] { return std::string(ucx ? "" : "UCX 1.12.0 is too old"); };
  return facts;
}

TEST(Controller, AnExplicitChoiceIsUsed) {
  for (const Controller asked : {Controller::kMpi, Controller::kUcx}) {
    ControllerFacts against = facts(false, false);
    against.batch_system = "SLURM_JOB_ID";
    against.needs_mpi = "./solver needs libmpi.so.40";
    EXPECT_EQ(choose_controller(asked, against).controller, asked);
  }
}

TEST(Controller, MpiWhereSomethingIsMeantForIt) {
  ControllerFacts allocation = facts(true, true), arguments = allocation, named = allocation,
                  program = allocation;
  allocation.batch_system = "SLURM_JOB_ID";
  arguments.mpi_args = true;
  named.names_mpirun = true;
  program.needs_mpi = "./solver needs libmpi.so.40";
  for (const ControllerFacts& given : {allocation, arguments, named, program}) {
    EXPECT_EQ(choose_controller(Controller::kAuto, given).controller, Controller::kMpi);
  }
  EXPECT_THAT(choose_controller(Controller::kAuto, allocation).reason, HasSubstr("SLURM_JOB_ID"));
  EXPECT_EQ(choose_controller(Controller::kAuto, program).reason, "./solver needs libmpi.so.40");
}

TEST(Controller, ElseUcxIfItIsThere) {
  const auto choose = [](bool mpirun, bool ucx) {
    return choose_controller(Controller::kAuto, facts(mpirun, ucx)).controller;
  };
  EXPECT_EQ(choose(true, true), Controller::kUcx);
  EXPECT_EQ(choose(false, true), Controller::kUcx);
  EXPECT_EQ(choose(true, false), Controller::kMpi);
  EXPECT_EQ(choose(false, false), Controller::kMpi) << "its error names the package to install";
  EXPECT_EQ(choose_controller(Controller::kAuto, facts(true, false)).reason,
            "UCX 1.12.0 is too old; an mpirun is found");
}

TEST(Controller, UcxMustBeNewEnough) {
  for (const char* version : {"1.13.0", "1.13.1", "1.20.0", "2.0.0"})
    EXPECT_EQ(problem_of_ucx_version(version), "") << version;
  EXPECT_EQ(problem_of_ucx_version("1.12.1"), "UCX 1.12.1 is too old (hvd needs 1.13)");
  EXPECT_THAT(problem_of_ucx_version("0.99.0"), HasSubstr("too old"));
  EXPECT_THAT(problem_of_ucx_version(std::nullopt), HasSubstr("cannot be loaded"));
}

TEST(Probes, AChildThatCrashesOrHangsHasNoOutput) {
  const auto output = [](void (*function)(int)) {
    return run_children({{.function = function}}, 0.2).front().out;
  };
  EXPECT_EQ(output([](int fd) { EXPECT_EQ(::write(fd, "text", 4), 4); }), "text");
  EXPECT_EQ(output([](int) { std::abort(); }), "");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(output([](int fd) {
              EXPECT_EQ(::write(fd, "a", 1), 1);
              ::pause();
            }),
            "a");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Controller, UcxIsNotLookedForInVain) {
  ControllerFacts given = facts(true, true);
  given.mpi_args = true;
  given.ucx_problem = []() -> std::string { throw std::logic_error("asked"); };
  EXPECT_NO_THROW(choose_controller(Controller::kAuto, given));
  EXPECT_NO_THROW(choose_controller(Controller::kUcx, given));
}

TEST(Controller, AProgramThatNeedsMpiIsFoundInACommand) {
  const TemporaryFolder folder;
  const auto program = [&](const std::string& name, const std::vector<std::string>& libraries) {
    return write_program(folder.path() / name, program_that_needs(libraries));
  };
  const std::string solver = program("solver", {"libm.so.6", "libmpi.so.40"});
  const std::string other = program("other", {"libmpir.so.23", "libc.so.6"});
  const std::string needs = solver + " needs libmpi.so.40";
  EXPECT_EQ(program_that_needs_mpi({solver}), needs);
  EXPECT_EQ(program_that_needs_mpi({"env", "A=1", solver, "-n"}), needs);
  EXPECT_EQ(program_that_needs_mpi({other, "solver"}), "")
      << "an argument without a slash is not a program";
  EXPECT_EQ(program_that_needs_mpi({folder.path() / "none", folder.path()}), "");
  for (const std::string library : {"libmpi_cxx.so.40", "libmpi_mpifh.so.40", "libmpich.so.12"})
    EXPECT_NE(program_that_needs_mpi({program("named", {library})}), "") << library;
  std::filesystem::permissions(solver, std::filesystem::perms::owner_read);
  EXPECT_EQ(program_that_needs_mpi({"cat", solver}), "") << "it is not run";
}

TEST(Controller, Names) {
  for (const Controller controller : {Controller::kAuto, Controller::kMpi, Controller::kUcx})
    EXPECT_EQ(parse_controller(to_string(controller)), controller);
  EXPECT_EQ(parse_controller("tcp"), std::nullopt);
}

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NeededLibraries : public ::testing::Test {
 protected:
  std::vector<std::string> of(const std::string& bytes) const {
    return needed_libraries(write_program(folder_.path() / "program", bytes));
  }
  const TemporaryFolder folder_;
};

TEST_F(NeededLibraries, OfAProgram) {
  EXPECT_THAT(of(program_that_needs({"libmpi.so.40", "libc.so.6"})),
              ElementsAre("libmpi.so.40", "libc.so.6"));
  EXPECT_THAT(of(program_that_needs({})), IsEmpty());
  EXPECT_THAT(needed_libraries("/proc/self/exe"), Contains("libc.so.6"));
}

TEST_F(NeededLibraries, OfAFileThatIsNoProgram) {
  EXPECT_THAT(of(""), IsEmpty());
  EXPECT_THAT(of("#!/bin/sh\nexec ./program libmpi.so.40\n"), IsEmpty());
  EXPECT_THAT(needed_libraries("/no/such/file"), IsEmpty());
  EXPECT_THAT(needed_libraries("/"), IsEmpty());
}

TEST_F(NeededLibraries, OfOneThatEndsAnywhere) {
  const std::string whole = program_that_needs({"libmpi.so.40"});
  for (std::size_t size = 0; size + 20 < whole.size(); ++size)
    EXPECT_THAT(of(whole.substr(0, size)), IsEmpty()) << size;
}

// Overwrites one byte at a time, which gives offsets, counts and sizes beyond the end of the file.
TEST_F(NeededLibraries, OfAMalformedProgram) {
  const std::string whole = program_that_needs({"libmpi.so.40"});
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(0xff);
    EXPECT_LE(of(changed).size(), 2U) << at;
  }
}

}  // namespace

}  // namespace hvd::launcher
