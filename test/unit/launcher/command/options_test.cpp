#include "command/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "base/text.h"
#include "mpirun/job_folder.h"
#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Environment = std::map<std::string, std::string>;

LaunchOptions parse(const Words& arguments, const Environment& environment = {}) {
  return parse_options(arguments, [&](const char* name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    return found != environment.end() ? std::optional(found->second) : std::nullopt;
  });
}

LaunchError error_of(const Words& arguments, const Environment& environment = {}) {
  try {
    parse(arguments, environment);
  } catch (const LaunchError& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ExitCode::kInternal, ""};
}

TEST(LaunchOptions, RestartsAreForJobsWithAndWithoutTorchrunsOptions) {
  EXPECT_EQ(parse({"-np", "2", "./train"}).max_restarts, 0);
  const LaunchOptions options = parse({"-np", "2", "--max-restarts", "3", "./train"});
  EXPECT_EQ(options.max_restarts, 3);
  EXPECT_FALSE(options.node);
  EXPECT_EQ(parse({"--nproc-per-node", "2", "--max_restarts=4", "./train"}).max_restarts, 4);
}

TEST(LaunchOptions, AScriptNamesTheHostsOfAnElasticJob) {
  const LaunchOptions options =
      parse({"--min-np", "2", "--max-np", "4", "--host-discovery-script", "./hosts --zone 'a b'",
             "--slots", "3", "--blacklist-cooldown-range", "5", "50", "./train", "x"});
  ASSERT_TRUE(options.elastic);
  EXPECT_EQ(options.np, 2) << "the least number, as with Horovod";
  EXPECT_EQ(options.elastic->max_np, 4);
  EXPECT_EQ(options.elastic->discovery, (Words{"./hosts", "--zone", "a b"}));
  EXPECT_EQ(options.elastic->slots, 3);
  EXPECT_EQ(options.elastic->max_failures, 10);
  EXPECT_EQ(options.elastic->cooldown_s, std::pair(5.0, 50.0));
  EXPECT_EQ(options.program, (Words{"./train", "x"}));
  const LaunchOptions plain = parse({"-np", "2", "--host-discovery-script", "hosts", "./train"},
                                    {{"OMPI_MCA_orte_default_hostfile", "/none"}});
  ASSERT_TRUE(plain.elastic) << "it selects an elastic job";
  EXPECT_EQ(plain.elastic->cooldown_s, std::pair(10.0, 3600.0));
  EXPECT_TRUE(plain.hosts.empty()) << "mpirun's default hostfile is not read";
}

TEST(LaunchOptions, ARangeOfNodesIsAnElasticJob) {
  const Words line = {"--nnodes",       "2:4",  "--nproc_per_node", "3",
                      "--rdzv_backend", "c10d", "--rdzv_endpoint",  "h:7"};
  const auto with = [&line](const Words& more) {
    Words words = line;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const LaunchOptions options =
      parse(with({"--reset-limit", "9", "--failure-limit", "4", "--join-window", "2.5",
                  "--change-patience", "0", "./train"}));
  ASSERT_TRUE(options.elastic);
  EXPECT_EQ(options.np, 6);
  EXPECT_EQ(options.elastic->min_np, 6);
  EXPECT_EQ(options.elastic->max_np, 12);
  EXPECT_EQ(options.elastic->max_resets, 9);
  EXPECT_EQ(options.elastic->max_failures, 4);
  EXPECT_EQ(options.elastic->window_s, 2.5);
  EXPECT_EQ(options.elastic->change_s, 0);
  EXPECT_EQ(options.elastic->replacements, std::nullopt) << "without --max-restarts";
  EXPECT_EQ(parse(with({"--max-restarts", "3", "./train"})).elastic->replacements, 3);
  EXPECT_EQ(
      parse({"./train"},
            {{"PET_NNODES", "1:2"}, {"PET_RDZV_BACKEND", "c10d"}, {"PET_RDZV_ENDPOINT", "h:7"}})
          .elastic->max_np,
      2);
  for (const char* const option : {"--min-np", "--max-np", "--spares", "--slots"}) {
    EXPECT_THAT(error_of(with({option, "1", "./train"})).what(),
                HasSubstr("the nodes join by themselves; remove " + std::string(option)));
  }
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
  EXPECT_THAT(error_of({"p", "-np", "2"}).what(), HasSubstr("options go before PROGRAM"));
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
  const Environment missing = {{"OMPI_MCA_orte_default_hostfile", "/no/such/hostfile"}};
  EXPECT_THROW(parse({"-np", "1", "p"}, missing), LaunchError);
  EXPECT_EQ(parse({"-np", "1", "-H", "h", "p"}, missing).hosts, (std::vector<Host>{{"h", 1}}));
  EXPECT_TRUE(parse({"--nproc-per-node", "1", "p"}, missing).hosts.empty());
  EXPECT_TRUE(parse({"-np", "1", "p"}, {{"OMPI_MCA_orte_default_hostfile", ""}}).hosts.empty());
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

TEST(TorchrunOptions, BothSpellingsOfNames) {
  for (const Words& words : {Words{"--nnodes", "2", "--nproc-per-node", "3", "--node-rank", "1",
                                   "--master-addr", "h", "--master-port", "7", "p"},
                             Words{"--nnodes=2", "--nproc_per_node=3", "--node_rank=1",
                                   "--master_addr=h", "--master_port=7", "p"}}) {
    const LaunchOptions options = parse(words);
    ASSERT_TRUE(options.node);
    EXPECT_EQ(options.node->nodes, 2);
    EXPECT_EQ(options.node->rank, 1);
    EXPECT_EQ(options.node->first_rank(), 3);
    EXPECT_EQ(options.node->world_size(), 6);
    EXPECT_EQ(options.node->master_address, "h");
    EXPECT_EQ(options.node->master_port, 7);
    EXPECT_EQ(options.np, 3);
    EXPECT_EQ(options.program, Words{"p"});
  }
  EXPECT_EQ(parse({"--standalone", "p", "--node_rank", "x"}).program,
            (Words{"p", "--node_rank", "x"}));
}

TEST(TorchrunOptions, AreNotMixedWithHvdrunsOwn) {
  for (const Words& own : {Words{"-np", "2"}, Words{"-H", "h:2"}}) {
    Words words = {"--nproc-per-node", "2"};
    words.insert(words.end(), own.begin(), own.end());
    words.emplace_back("p");
    EXPECT_THAT(error_of(words).what(), HasSubstr("remove one of them"));
  }
  EXPECT_THAT(error_of({"--nnodes", "2", "--node-rank", "0", "--master-addr", "h", "--controller",
                        "mpi", "p"})
                  .what(),
              HasSubstr("without mpirun"));
  EXPECT_FALSE(parse({"-np", "2", "p"}).node);
}

TEST(TorchrunOptions, VariablesOfTorchrunYieldToEverythingElse) {
  const Environment environment = {{"PET_NNODES", "2"},
                                   {"PET_NPROC_PER_NODE", "4"},
                                   {"PET_NODE_RANK", "1"},
                                   {"PET_MASTER_ADDR", "h"}};
  const LaunchOptions options = parse({"--nproc-per-node", "3", "p"}, environment);
  ASSERT_TRUE(options.node);
  EXPECT_EQ(options.node->nodes, 2);
  EXPECT_EQ(options.np, 3);
  EXPECT_FALSE(parse({"-np", "2", "p"}, environment).node);
  EXPECT_THAT(error_of({"p"}, {{"PET_NNODES", "some"}}).what(), HasSubstr("got 'some'"));
}

TEST(TorchrunOptions, PythonScriptsGetAnInterpreter) {
  EXPECT_EQ(parse({"--standalone", "train.py", "-x"}).program,
            (Words{"python3", "-u", "train.py", "-x"}));
  EXPECT_EQ(parse({"--standalone", "--no-python", "./train.py"}).program, Words{"./train.py"});
  EXPECT_EQ(parse({"--standalone", "./train"}).program, Words{"./train"});
  EXPECT_EQ(parse({"-np", "1", "./train.py"}).program, Words{"./train.py"})
      << "as mpirun does: the script's first line names the interpreter";
  const Environment named = {{"PYTHON_EXEC", "/bin/python"}};
  EXPECT_EQ(parse({"-np", "1", "./train.py"}, named).program,
            (Words{"/bin/python", "-u", "./train.py"}));
  EXPECT_EQ(parse({"-np", "1", "--no-python", "./train.py"}, named).program, Words{"./train.py"});
  EXPECT_EQ(parse({"-np", "1", "python", "train.py"}, named).program,
            (Words{"python", "train.py"}));
  EXPECT_EQ(parse({"--standalone", "-m", "package.train"}, named).program,
            (Words{"/bin/python", "-u", "-m", "package.train"}));
  EXPECT_THAT(error_of({"--standalone", "-m", "--no-python", "p"}).what(), HasSubstr("-m"));
}

TEST(TorchrunOptions, Logs) {
  const LaunchOptions options = parse({"--standalone", "--log-dir", "d", "-r", "3", "--tee", "0:1",
                                       "--local-ranks-filter", "0,2", "p"});
  EXPECT_EQ(options.logs.folder, "d");
  EXPECT_EQ(options.logs.redirects, (std::map<int, Streams>{{-1, {true, true}}}));
  EXPECT_EQ(options.logs.tee, (std::map<int, Streams>{{0, {true, false}}}));
  EXPECT_EQ(options.logs.shown_ranks, (std::set<int>{0, 2}));
  EXPECT_THAT(error_of({"-np", "1", "-H", "h", "--tee", "3", "p"}).what(),
              HasSubstr("use --output-filename"));
}

class ConfigFile : public ::testing::Test {
 protected:
  std::string write(const std::string& content) const {
    const std::string file = folder_.path() / "job.yaml";
    std::ofstream(file) << content;
    return file;
  }
  LaunchOptions read(const std::string& content, Words arguments = {"p"},
                     const Environment& environment = {}) const {
    arguments.insert(arguments.begin(), {"--config-file", write(content)});
    return parse(arguments, environment);
  }
  std::string error(const std::string& content) const {
    return error_of({"--config-file", write(content), "p"}).what();
  }
  const TemporaryFolder folder_;
};

TEST_F(ConfigFile, HasTheOptionsNames) {
  const LaunchOptions options = read(
      "# a job\nnp: 4\nhost: h1:2,h2:2\nno-tag: true\ntimeout: 1.5\nstart_timeout: 9\n"
      "x: {A: 1, B: }\nmpi-args: --mca x 'y z'\nhostfile: ~\n");
  EXPECT_EQ(options.np, 4);
  EXPECT_EQ(options.hosts, (std::vector<Host>{{"h1", 2}, {"h2", 2}}));
  EXPECT_FALSE(options.tag);
  EXPECT_EQ(options.timeout_s, 1.5);
  EXPECT_EQ(options.start_timeout_s, 9);
  ASSERT_EQ(options.exports.size(), 2U);
  EXPECT_EQ(options.exports[0], std::pair(std::string("A"), std::optional<std::string>("1")));
  EXPECT_EQ(options.exports[1], std::pair(std::string("B"), std::optional<std::string>()));
  EXPECT_EQ(options.mpi_args, (Words{"--mca", "x", "y z"}));
  EXPECT_EQ(read("np: 1\nx: [A=1, C]\n").exports.size(), 2U);
  EXPECT_EQ(read("", {"-np", "1", "p"}).np, 1);
  EXPECT_EQ(read("np: 1\nhost-discovery-script: h\nblacklist-cooldown-range: [5, 50]\n")
                .elastic->cooldown_s,
            std::pair(5.0, 50.0));
}

TEST_F(ConfigFile, YieldsToTheCommandLineAndNotToTheEnvironment) {
  EXPECT_EQ(read("np: 4\n", {"-np", "2", "p"}).np, 2);
  EXPECT_EQ(read("np: 1\nhostfile: /no/such/file\n", {"-H", "h", "p"}).hosts,
            (std::vector<Host>{{"h", 1}}));
  const LaunchOptions options = read("nproc-per-node: 3\n", {"p"}, {{"PET_NPROC_PER_NODE", "5"}});
  EXPECT_EQ(options.np, 3);
  EXPECT_TRUE(read("no-tag: false\nnp: 1\n").tag);
}

TEST_F(ConfigFile, OptionsThatExcludeEachOtherAreNamedWithTheirSources) {
  EXPECT_THAT(error("host: a:2\nnp: 2\nhostfile: f\n"),
              AllOf(HasSubstr("job.yaml, line 3: 'hostfile' excludes 'host'"),
                    HasSubstr("job.yaml, line 1)")));
  EXPECT_THAT(error_of({"--config-file", write("nproc-per-node: 2\n"), "-np", "2", "p"}).what(),
              AllOf(HasSubstr("--np (command line)"), HasSubstr("--nproc-per-node ("),
                    HasSubstr("job.yaml, line 1)")));
}

TEST_F(ConfigFile, ErrorsNameTheLine) {
  EXPECT_THAT(error("np: 4\nnumber: 2\n"), HasSubstr("job.yaml, line 2: expected the name of an "
                                                     "option that 'hvdrun --help' lists, got "
                                                     "'number'"));
  for (const char* action : {"help", "config-file", "version", "dry-run"})
    EXPECT_THAT(error(text(action, ": x\n")), HasSubstr("line 1: expected the name")) << action;
  EXPECT_THAT(error("np: 4\n\ntimeout: soon\n"), HasSubstr("line 3"));
  EXPECT_THAT(error("np: 4\n\ntimeout: soon\n"), HasSubstr("got 'soon'"));
  EXPECT_THAT(error("np: [1, 2]\n"), HasSubstr("line 1: np: expected a value"));
  EXPECT_THAT(error("np: 1\nnp: 2\n"), HasSubstr("line 2: 'np' is set twice"));
  EXPECT_THAT(error("start-timeout: 1\nstart_timeout: 2\n"), HasSubstr("set twice"));
  EXPECT_THAT(error("- np\n"), HasSubstr("expected lines such as 'np: 4'"));
  EXPECT_THAT(error("np: 1\nhost: [h1\n"), HasSubstr("expected YAML"));
  EXPECT_THAT(error_of({"--config-file", "/no/such/file", "p"}).what(),
              HasSubstr("got /no/such/file: No such file"));
}

TEST_F(ConfigFile, PrintConfigGivesTheSourceOfEachValue) {
  const std::string file = write("np: 4\nx: [A=1, 'B=a b']\n");
  const LaunchOptions options =
      parse({"--config-file", file, "--print-config", "--timeout", "3", "--no-tag"},
            {{"PET_RDZV_ID", "job"}, {"PET_ROLE", "worker"}});
  EXPECT_EQ(options.action, Action::kPrint);
  EXPECT_THAT(options.text, ::testing::ContainsRegex("np: 4 +# .*job.yaml, line 1\n"));
  EXPECT_THAT(options.text, ::testing::ContainsRegex("timeout: 3 +# command line\n"));
  EXPECT_THAT(options.text, ::testing::ContainsRegex("no-tag: true +# command line\n"));
  EXPECT_THAT(options.text, ::testing::ContainsRegex("bind: auto +# default\n"));
  for (const char* const ignored : {"role", "rdzv-id"}) {
    EXPECT_THAT(options.text, ::testing::ContainsRegex(std::string(ignored) + ": ~ +# default\n"))
        << "the file gives the number of ranks in hvdrun's own way";
  }
  EXPECT_THAT(parse({"--nproc-per-node", "2", "--print-config"}, {{"PET_ROLE", "worker"}}).text,
              ::testing::ContainsRegex("role: worker +# PET_ROLE\n"));
  EXPECT_THAT(options.text, ::testing::Not(HasSubstr("help:")));
  // The output is a configuration file.
  const LaunchOptions again = read(options.text);
  EXPECT_EQ(again.np, 4);
  EXPECT_EQ(again.timeout_s, 3);
  EXPECT_FALSE(again.tag);
  ASSERT_EQ(again.exports.size(), 2U);
  EXPECT_EQ(again.exports[1].second, "a b");
}

}  // namespace
}  // namespace hvd::launcher
