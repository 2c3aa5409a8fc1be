"""The programs of docs/python_frameworks.md: under torchrun and `python -m hvd` over hvd they print what they print over gloo."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python_frameworks.md"
LIMIT = 300  # seconds
LAUNCHERS = {"torchrun": ["torch.distributed.run", "--nproc-per-node", "2"], "hvdrun": ["hvd", "-np", "2"]}
RESTARTED = """
import os, torch, torch.distributed as dist
dist.init_process_group("hvd")
dist.all_reduce(total := torch.ones(1))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("a mistake of rank 1")
dist.barrier()
dist.destroy_process_group()
print("attempt", attempt, "total", total.item())
"""


def programs():
    """The programs of the page by the title of their section."""
    found, title = {}, ""
    for line in re.split(r"(?ms)^(```python\n.*?^```$|##+ .*?$)", PAGE.read_text(encoding="utf-8")):
        if line.startswith("##"):
            title = line.lstrip("# ")
        elif line.startswith("```python"):
            found[title] = line.removeprefix("```python\n").removesuffix("```")
    return found


def run(program, path, launcher, *options):
    """The lines that the program prints to stdout. Fails the test when the program does."""
    file = path / "program.py"
    file.write_text(program)
    words = [sys.executable, "-m", *LAUNCHERS[launcher], *options, str(file)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}, cwd=path,
                          capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]


def figures(lines):
    """The lines with losses: frameworks print times, too."""
    return [line for line in lines if re.match(r"loss|total|gradient|\[[\d.]", line)]


@pytest.mark.parametrize("title", programs())
def test_a_program_of_the_page(tmp_path, title):
    program = programs()[title]
    for module in re.findall(r"^(?:import|from) (accelerate|lightning|transformers)", program, re.MULTILINE):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a broken package fails in any way
            pytest.skip(f"{module} cannot be imported: {error}")
    printed = figures(run(program, tmp_path, "torchrun"))
    assert printed
    assert figures(run(program, tmp_path, "hvdrun")) == printed
    if '"hvd"' in program:
        assert figures(run(program.replace('"hvd"', '"gloo"'), tmp_path, "torchrun")) == printed
    else:
        assert printed == ["gradient 6.0"]  # 4 samples of 1 and of 2: their mean


def test_torchrun_starts_ranks_again(tmp_path):
    assert run(RESTARTED, tmp_path, "torchrun", "--max-restarts", "1") == ["attempt 1 total 2.0"] * 2
