#include "command/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;
using ::testing::HasSubstr;

LaunchOptions parse(const Words& arguments) { return parse_options(arguments, std::nullopt); }

LaunchError error_of(const Words& arguments) {
  try {
    parse(arguments);
  } catch (const LaunchError& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ExitCode::kInternal, ""};
}

TEST(LaunchOptions, Defaults) {
  const LaunchOptions options = parse({"-np", "2", "./train"});
  EXPECT_EQ(options.action, Action::kRun);
  EXPECT_EQ(options.np, 2);
  EXPECT_EQ(options.program, Words{"./train"});
  EXPECT_EQ(options.bind, Bind::kAuto);
  EXPECT_TRUE(options.tag);
  EXPECT_FALSE(options.verbose);
  EXPECT_EQ(options.tail_lines, 20);
  EXPECT_EQ(options.grace_s, 5);
  EXPECT_EQ(options.timeout_s, 0);
  EXPECT_TRUE(options.hosts.empty());
}

TEST(LaunchOptions, TheProgramsArgumentsAreItsOwn) {
  EXPECT_EQ(parse({"-np", "2", "./train", "-np", "5", "--verbose", "-x", "--", "-H"}).program,
            (Words{"./train", "-np", "5", "--verbose", "-x", "--", "-H"}));
  EXPECT_EQ(parse({"-np", "2", "--", "./train", "--dry-run"}).program,
            (Words{"./train", "--dry-run"}));
  EXPECT_EQ(parse({"-np", "2", "--", "-odd-name"}).program, Words{"-odd-name"});
  EXPECT_FALSE(parse({"-np", "2", "./train", "--verbose"}).verbose);
}

TEST(LaunchOptions, SpellingsOfNp) {
  for (const Words& words : {Words{"-np", "3", "p"}, Words{"--np", "3", "p"}, Words{"-n", "3", "p"},
                             Words{"--np=3", "p"}}) {
    EXPECT_EQ(parse(words).np, 3);
    EXPECT_EQ(parse(words).program, Words{"p"});
  }
}

TEST(LaunchOptions, Everything) {
  const LaunchOptions options = parse(shell_split(
      "-np 4 -H h1:2,h2:2 --bind numa -v --no-tag --output-filename d --timeline t -x A -x B=1=2 "
      "--mpi-args \"--mca x 'y z'\" --timeout 1.5 --start-timeout 9 --grace 0 --fail-grace 2 "
      "--tail 0 p q"));
  EXPECT_EQ(options.hosts, (std::vector<Host>{{"h1", 2}, {"h2", 2}}));
  EXPECT_EQ(options.bind, Bind::kNuma);
  EXPECT_TRUE(options.verbose);
  EXPECT_FALSE(options.tag);
  EXPECT_EQ(options.output_folder, "d");
  EXPECT_EQ(options.timeline, "t");
  ASSERT_EQ(options.exports.size(), 2U);
  EXPECT_EQ(options.exports[0].first, "A");
  EXPECT_EQ(options.exports[0].second, std::nullopt);
  EXPECT_EQ(options.exports[1].second, "1=2");
  EXPECT_EQ(options.mpi_args, (Words{"--mca", "x", "y z"}));
  EXPECT_EQ(options.timeout_s, 1.5);
  EXPECT_EQ(options.start_timeout_s, 9);
  EXPECT_EQ(options.grace_s, 0);
  EXPECT_EQ(options.fail_grace_s, 2);
  EXPECT_EQ(options.tail_lines, 0);
  EXPECT_EQ(options.program, (Words{"p", "q"}));
}

TEST(LaunchOptions, Actions) {
  EXPECT_EQ(parse({"--check-build"}).action, Action::kCheckBuild);
  EXPECT_EQ(parse({"-np", "1", "--dry-run", "p"}).action, Action::kDryRun);
  EXPECT_THAT(parse({"--version"}).text, HasSubstr("hvdrun"));
  EXPECT_THAT(parse({"--help"}).text, HasSubstr("Usage: hvdrun -np N"));
}

TEST(LaunchOptions, ErrorsStateTheExpectation) {
  EXPECT_THAT(error_of({}).what(), HasSubstr("got no -np"));
  EXPECT_THAT(error_of({"p"}).what(), HasSubstr("got no -np"));
  EXPECT_THAT(error_of({"-np", "2"}).what(), HasSubstr("expected a program"));
  EXPECT_THAT(error_of({"-np", "-1", "p"}).what(), HasSubstr("at least 1"));
  for (const char* np : {"0", "-1", "two", "2x", "", "99999999999"}) {
    EXPECT_THAT(error_of({"-np", np, "p"}).what(), HasSubstr("at least 1")) << np;
  }
  EXPECT_THAT(error_of({"-np", "two", "p"}).what(), HasSubstr("got 'two'"));
  EXPECT_THAT(error_of({"-np", "2", "--typo", "p"}).what(), HasSubstr("got '--typo'"));
  EXPECT_THAT(error_of({"p", "-np", "2"}).what(), HasSubstr("options stand before PROGRAM"));
  for (const char* seconds : {"soon", "0", "-1", "1e300", "nan", ""}) {
    const std::string text = error_of({"-np", "2", "--timeout", seconds, "p"}).what();
    EXPECT_THAT(text, HasSubstr("expected a number of seconds above 0, got '" +
                                std::string(seconds) + "'"));
    EXPECT_LT(text.size(), 200U);
  }
  EXPECT_THAT(error_of({"-np", "2", "--grace", "x", "p"}).what(), HasSubstr("0 or more"));
  EXPECT_THAT(error_of({"-np", "2", "--bind", "socket", "p"}).what(),
              HasSubstr("none, core or numa; got 'socket'"));
  EXPECT_THAT(error_of({"-np", "2", "-x", "1A=2", "p"}).what(), HasSubstr("got '1A=2'"));
  for (const char* given : {"HVD_SIZE=3", "HVD_RANK", "WORLD_SIZE=2", "HVD_LAUNCHER_PORT=1"}) {
    const LaunchError error = error_of({"-np", "2", "-x", given, "p"});
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kUsage));
    EXPECT_THAT(error.what(), HasSubstr("-x " + std::string(given) + ": hvdrun sets "));
  }
  EXPECT_EQ(parse({"-np", "2", "-x", "MASTER_PORT=1", "p"}).exports.size(), 1U);
  for (const Words& words :
       {Words{"-np", "two", "p"}, Words{"-np", "2", "-H", "a:2", "--hostfile", "f", "p"},
        Words{"-np", "2", "--timeout", "-1", "p"}, Words{"-np", "2", "--tail", "-3", "p"},
        Words{"-np", "2", "--mpi-args", "'open", "p"}, Words{"-np"}}) {
    EXPECT_EQ(error_of(words).exit_code(), 2);
  }
}

TEST(LaunchOptions, TooFewSlotsIsNotAUsageError) {
  const LaunchError error = error_of({"-np", "5", "-H", "h1:2,h2:2", "p"});
  EXPECT_EQ(error.exit_code(), 69);
  EXPECT_THAT(error.what(), HasSubstr("-np 5 needs as many, got 4 (h1:2,h2:2)"));
}

TEST(LaunchOptions, TheDefaultHostfileYieldsToAnExplicitOne) {
  EXPECT_THROW(parse_options({"-np", "1", "p"}, "/no/such/hostfile"), LaunchError);
  EXPECT_EQ(parse_options({"-np", "1", "-H", "h", "p"}, "/no/such/hostfile").hosts,
            (std::vector<Host>{{"h", 1}}));
  EXPECT_TRUE(parse_options({"-np", "1", "p"}, "").hosts.empty());
}

TEST(LaunchOptions, Controller) {
  EXPECT_EQ(parse({"-np", "1", "p"}).controller, Controller::kAuto);
  EXPECT_EQ(parse({"-np", "1", "--controller", "ucx", "p"}).controller, Controller::kUcx);
  EXPECT_EQ(parse({"-np", "1", "--controller", "mpi", "p"}).controller, Controller::kMpi);
  const LaunchError unknown = error_of({"-np", "1", "--controller", "gloo", "p"});
  EXPECT_EQ(unknown.exit_code(), 2);
  EXPECT_THAT(unknown.what(), HasSubstr("expected auto, mpi or ucx; got 'gloo'"));
  const LaunchError both =
      error_of({"-np", "1", "--controller", "ucx", "--mpi-args", "--mca x y", "p"});
  EXPECT_EQ(both.exit_code(), 2);
  EXPECT_THAT(both.what(), HasSubstr("--mpi-args"));
}

TEST(LaunchOptions, RemoteShell) {
  EXPECT_TRUE(parse({"-np", "1", "p"}).remote_shell.empty());
  EXPECT_EQ(parse({"-np", "1", "--rsh", "ssh -p 2222 -i 'a key'", "p"}).remote_shell,
            (Words{"ssh", "-p", "2222", "-i", "a key"}));
}

}  // namespace
}  // namespace hvd::launcher
