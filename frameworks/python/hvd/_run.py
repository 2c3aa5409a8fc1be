"""run(): a function on several ranks, each in a process that hvdrun starts."""

from __future__ import annotations

import collections.abc
import os
import pathlib
import pickle
import sys
import typing

from .errors import UsageError

_ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script", "min_np", "max_np")


def dumps(obj: typing.Any) -> bytes:
    """Pickles an object. With cloudpickle installed, also pickles functions that have no name in a module."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return cloudpickle.dumps(obj)


class RemoteTraceback(Exception):
    """The traceback of a rank's exception, as text. It is the cause of the exception that run() raises."""

    def __str__(self) -> str:
        return str(self.args[0])


def run(func: typing.Callable[..., typing.Any], args: collections.abc.Sequence[typing.Any] = (),
        kwargs: dict[str, typing.Any] | None = None, num_proc: int = 1, min_num_proc: int | None = None,
        max_num_proc: int | None = None, slots: int | None = None, reset_limit: int | None = None,
        cooldown_range: typing.Any = None, hosts: str | None = None, hostfile: str | None = None,
        host_discovery_script: str | None = None, start_timeout: int | None = None, ssh_port: int | None = None,
        ssh_identity_file: str | None = None, disable_cache: bool | None = None, output_filename: str | None = None,
        verbose: typing.Any = None, use_gloo: bool | None = None, use_mpi: bool | None = None, mpi_args: str | None = None,
        network_interface: str | None = None, network_interfaces: str | None = None, executable: str | None = None,
        np: int | None = None, min_np: int | None = None, max_np: int | None = None) -> list[typing.Any]:
    """Runs func(*args, **kwargs) on `num_proc` ranks and returns their results in rank order.

    Raises the exception of the first rank that has failed, with its traceback as the cause. The function and the results are
    pickled. With other hosts the folder for temporary files must be the same on all of them. Arguments of elastic jobs raise
    UsageError; `disable_cache`, `use_gloo` and the network interfaces change nothing.
    """
    import subprocess  # not for programs that only import hvd
    import tempfile

    given = locals()
    elastic = [name for name in _ELASTIC if given[name] is not None]
    if elastic:
        raise UsageError(f"run: {', '.join(elastic)}: expected None, because the number of ranks cannot change")
    ranks = num_proc if np is None else np
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"run: num_proc: expected at least 1, got {ranks!r}")
    words = launcher_words(ranks, hosts, hostfile, start_timeout, ssh_port, ssh_identity_file, output_filename, bool(verbose),
                           use_mpi, mpi_args)
    with tempfile.TemporaryDirectory(prefix="hvd-run-") as name:
        folder = pathlib.Path(name)
        (folder / "call").write_bytes(dumps((func, tuple(args), dict(kwargs or {}))))
        (folder / "main").write_bytes(pickle.dumps((_main_file(), sys.path)))
        python = executable or sys.executable
        done = subprocess.run([sys.executable, "-m", "hvd", *words, python, "-m", "hvd._run_rank", name],
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=False)
        return _results(folder, ranks, done.returncode)


def launcher_words(ranks: int, hosts: str | None = None, hostfile: str | None = None, start_timeout: int | None = None,
                   ssh_port: int | None = None, ssh_identity_file: str | None = None, output_filename: str | None = None,
                   verbose: bool = False, use_mpi: bool | None = None, mpi_args: str | None = None) -> list[str]:
    """Arguments of hvdrun for these options of Horovod's launcher."""
    words = ["-np", str(ranks)]
    options = (("-H", hosts), ("--hostfile", hostfile), ("--start-timeout", start_timeout),
               ("--output-filename", output_filename), ("--mpi-args", mpi_args))
    for option, value in options:
        if value is not None:
            words += [option, str(value)]
    shell = [*(["-p", str(ssh_port)] if ssh_port else []), *(["-i", ssh_identity_file] if ssh_identity_file else [])]
    if shell:
        words += ["--rsh", " ".join(["ssh", *shell])]
    return words + (["--verbose"] if verbose else []) + (["--controller", "mpi"] if use_mpi else [])


def _main_file() -> str | None:
    """The file of the program, from which the ranks import functions of its module __main__."""
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None


def _results(folder: pathlib.Path, ranks: int, status: int) -> list[typing.Any]:
    """Each rank has written whether it has succeeded, when, its result or exception, and a traceback."""
    records: dict[int, typing.Any] = {}
    for rank in range(ranks):
        file = folder / f"rank{rank}"
        if file.exists():
            records[rank] = pickle.loads(file.read_bytes())
    failed = [record for record in records.values() if not record[0]]
    if failed:
        _, _, error, trace = min(failed, key=lambda record: record[1])
        raise error from RemoteTraceback(trace)
    if len(records) < ranks or status:
        missing = [rank for rank in range(ranks) if rank not in records]
        raise RuntimeError(f"run: hvdrun ended with status {status}; without a result: ranks {missing}")
    return [records[rank][2] for rank in range(ranks)]
