"""The programs of examples/python, as their first lines and examples/README.md run them."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "python"
RANKS = {"hvdrun": [shutil.which("hvdrun") or "hvdrun", "-np", "2", sys.executable],
         "three": [shutil.which("hvdrun") or "hvdrun", "-np", "3", sys.executable],
         "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], "alone": [sys.executable]}
# The start, the program with its arguments, and what it prints.
PROGRAMS = (
    ("hvdrun", "horovod_sample.py", "2 ranks, step 100: loss 0.0"), ("hvdrun", "horovod_sample.py --dist", "2 ranks, step 100: loss 0.0"),
    ("alone", "ddp_init.py data_parallel", "1 process: loss 0."), ("hvdrun", "ddp_init.py env", "2 ranks: loss 0."),
    ("torchrun", "ddp_init.py env", "2 ranks: loss 0."), ("alone", "ddp_init.py tcp", "2 ranks: loss 0."),
    ("alone", "ddp_init.py file", "2 ranks: loss 0."), ("alone", "ddp_init.py store", "2 ranks: loss 0."),
    ("hvdrun", "launch_query.py", "rank 1 of 2, local 1 of 2, host 0 of 1"), ("torchrun", "launch_query.py", "rank 1 of 2, local 1 of 2"),
    ("three", "uneven_gathers.py", "rows of the ranks: [0, 1, 1, 2, 2, 2]"), ("hvdrun", "mnist_ddp.py", "accuracy 0.9"),
    ("torchrun", "mnist_ddp.py", "accuracy 0.9"), ("alone", "mnist_notebook.py", "accuracy 0.9"),
    ("torchrun", "mnist_accelerate.py", "accuracy 0.9"), ("torchrun", "mnist_trainer.py", "loss 0."),
)
PACKAGES = {"mnist_accelerate.py": ("accelerate",), "mnist_trainer.py": ("accelerate", "transformers")}


def run(start, words):
    done = subprocess.run([*RANKS[start], *words.split()], cwd=FOLDER, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    return done, "\n".join(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())


def missing(program):
    for package in PACKAGES.get(program.split()[0], ()):
        try:
            importlib.import_module(package)
        except Exception:  # noqa: BLE001  a broken package fails in any way
            return package
    return None


@pytest.mark.parametrize(("start", "program", "expected"), PROGRAMS)
def test_an_example(start, program, expected):
    package = missing(program)
    if package:
        pytest.skip(f"{package} is not installed")
    done, printed = run(start, program)
    assert done.returncode == 0 and expected in printed, done.stdout + done.stderr


@pytest.mark.parametrize("program", PACKAGES)
def test_a_missing_package_is_named(program):
    package = missing(program)
    if package is None:
        pytest.skip("the package is installed")
    done, _ = run("alone", program)
    assert done.returncode == 1 and f"this example needs the package {package}" in done.stderr, done.stderr


def test_both_samples_compute_the_same():
    assert run("hvdrun", "horovod_sample.py")[1] == run("hvdrun", "horovod_sample.py --dist")[1]


def test_every_example_is_run_and_in_the_table():
    table = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    programs = {path.name for path in FOLDER.glob("*.py")} - {"mnist_data.py"}
    assert programs == {program.split()[0] for _, program, _ in PROGRAMS}
    assert not [name for name in programs if f"(python/{name})" not in table]
