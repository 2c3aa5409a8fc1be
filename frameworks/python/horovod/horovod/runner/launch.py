"""horovodrun: Horovod's command line for hvdrun."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from hvd._run import launcher_words

# Horovod's variables, and those that hvdrun sets for each rank.
VARIABLES = {"HOROVOD_RANK": "RANK", "HOROVOD_SIZE": "WORLD_SIZE", "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
             "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE", "HOROVOD_CROSS_RANK": "GROUP_RANK",
             "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE"}
# Options that set a variable of hvd: the factor converts Horovod's unit.
SETTINGS = {"--fusion-threshold-mb": ("HVD_FUSION_THRESHOLD", 1 << 20), "--cache-capacity": ("HVD_CACHE_CAPACITY", 1),
            "--stall-check-warning-time-seconds": ("HVD_STALL_WARNING", 1),
            "--stall-check-shutdown-time-seconds": ("HVD_STALL_SHUTDOWN", 1)}
# Options without an effect: those without a value, and those with one.
FLAGS = ("--disable-cache", "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
         "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--no-autotune", "--timeline-mark-cycles",
         "--no-timeline-mark-cycles", "--stall-check", "--mpi-threads-disable", "--no-mpi-threads-disable", "--tcp", "--gloo",
         "--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp",
         "--prefix-output-with-timestamp")
VALUES = ("--network-interfaces", "--network-interface", "--cycle-time-ms", "--binding-args", "--num-nccl-streams",
          "--thread-affinity", "--gloo-timeout-seconds")
REFUSED = ("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host", "--elastic-timeout", "--reset-limit",
           "--blacklist-cooldown-range", "--host-discovery-script")
REFUSED_FLAGS = ("--autotune", "--jsrun")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="horovodrun", description="Runs a program on several ranks, through hvdrun.",
                                     allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version="0.28.1+hvd")
    parser.add_argument("-np", "--num-proc", type=int, dest="ranks")
    parser.add_argument("-cb", "--check-build", action="store_true")
    parser.add_argument("-H", "--hosts")
    parser.add_argument("-hostfile", "--hostfile")
    parser.add_argument("--start-timeout", type=int)
    parser.add_argument("-p", "--ssh-port", type=int)
    parser.add_argument("-i", "--ssh-identity-file")
    parser.add_argument("--output-filename")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--config-file")
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--mpi-args")
    parser.add_argument("--timeline-filename")
    parser.add_argument("--no-stall-check", action="store_true")
    parser.add_argument("--log-level")
    for option in SETTINGS:
        parser.add_argument(option, type=float)
    for option in (*FLAGS, *REFUSED_FLAGS):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    for option in (*VALUES, *REFUSED):
        parser.add_argument(option, nargs="+" if option.startswith("--blacklist") else None, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The variables of the environment that stand for options."""
    chosen: dict[str, str] = {}
    for option, (variable, factor) in SETTINGS.items():
        value = getattr(options, option[2:].replace("-", "_"))
        if value is not None:
            chosen[variable] = str(int(value * factor))
    if options.timeline_filename:
        chosen["HVD_TIMELINE"] = options.timeline_filename
    if options.no_stall_check:
        chosen["HVD_STALL_WARNING"] = "0"
    if options.log_level:
        level = options.log_level.lower()
        chosen["HVD_LOG_LEVEL"] = {"warning": "warn", "fatal": "error"}.get(level, level)
    return chosen


def parse(words: list[str]) -> argparse.Namespace:
    """Ends the program with a message and status 2 for options that are not supported."""
    parser = make_parser()
    options = parser.parse_args(words)
    for option in (*REFUSED, *REFUSED_FLAGS, "--config-file"):
        if getattr(options, option[2:].replace("-", "_")):
            parser.error(f"{option} is not supported: horovodrun has neither elastic jobs nor autotuning nor files of options")
    if not options.check_build and (options.ranks is None or not options.command):
        parser.error("expected -np N and a command")
    return options


def run_commandline() -> None:
    options = parse(sys.argv[1:])
    launcher = [sys.executable, "-m", "hvd"]
    if options.check_build:
        raise SystemExit(subprocess.call([*launcher, "--check-build"]))
    command = options.command[1:] if options.command[0] == "--" else options.command
    words = launcher_words(options.ranks, options.hosts, options.hostfile, options.start_timeout, options.ssh_port,
                           options.ssh_identity_file, options.output_filename, options.verbose, options.mpi, options.mpi_args)
    settings = settings_of(options)
    passed = [word for variable in settings for word in ("-x", variable)]
    os.environ.update(settings)
    os.execv(sys.executable, [*launcher, *words, *passed, sys.executable, "-m", "horovod.runner.rank", *command])


if __name__ == "__main__":
    run_commandline()
