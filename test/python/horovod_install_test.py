"""The distribution horovod as pip installs it, beside the package hvd of the build tree, in an environment whose path has a space."""

import os
import shutil
import sys
import zipfile

import pytest
from install_test import ROOT, Environment, run

import hvd

SOURCES = ROOT / "frameworks/python/horovod"
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(hvd.__file__)))

PROGRAM = """
import os
import torch
import horovod
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(2) * (hvd.rank() + 1), name="total", op=hvd.Sum)
assert total.tolist() == [3.0, 3.0] and int(os.environ["HOROVOD_RANK"]) == hvd.rank()
assert horovod.__file__.startswith(os.path.realpath(os.environ["EXPECTED"])), horovod.__file__
print("total", total[0].item())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(SOURCES, folder / "sources", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, folder / "sources")
    made, = folder.glob("horovod-*.whl")
    return made


def test_the_wheel_has_every_module(wheel):
    modules = {str(path.relative_to(SOURCES)) for path in (SOURCES / "horovod").rglob("*.py")}
    assert modules == {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}


def test_install_and_uninstall(wheel, tmp_path):
    environment = Environment(tmp_path / "an environment")
    before = environment.files()
    environment.pip("install", "--no-index", "--no-deps", wheel)
    program = tmp_path / "a program.py"
    program.write_text(PROGRAM)
    with_hvd = {"PYTHONPATH": PACKAGES, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    horovodrun = environment.folder / "bin/horovodrun"
    output = run(horovodrun, "-np", 2, environment.python, program, EXPECTED=str(environment.folder), **with_hvd)
    assert output.count("total 3.0") == 2, output
    for name in ("tensorflow", "keras", "mxnet", "spark", "ray"):
        output = run(environment.python, "-c", f"import horovod.{name}", fails=True, **with_hvd)
        assert f"ImportError: horovod.{name} is not provided" in output, output
    environment.pip("uninstall", "--yes", "horovod")
    assert environment.files() == before
    output = run(environment.python, "-c", "import horovod", fails=True, **with_hvd)
    assert "No module named 'horovod'" in output, output
