"""The package as pip installs it: a wheel of this checkout, in environments of its own. Building the wheel takes minutes."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile

import pytest

pytest.importorskip("scikit_build_core")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = pathlib.Path(sysconfig.get_path("purelib"))
BUILD = 3000  # seconds that a build of the wheel may take
TORCH_DIR = SITE / "torch/share/cmake/Torch"

PROGRAM = """
import sys
import hvd
import torch
import torch.distributed as dist
dist.init_process_group("hvd")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5] * 4], model.module.weight.grad
libraries = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "libhvd" in line}
assert libraries and all(path.startswith(sys.prefix + "/") for path in libraries), (sys.prefix, libraries)
assert hvd.size() == 2
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}\\n")  # at once, so that the ranks' lines do not mix
dist.destroy_process_group()
"""


def run(*command, fails=False, timeout=300, **environment):
    """The output of a command, without the tests' own paths. Fails the test unless the command does as expected."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "Torch_DIR", "PYTHON_EXEC")}
    done = subprocess.run(list(map(str, command)), env={**variables, **environment}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout, cwd="/")
    assert (done.returncode != 0) == fails, done.stdout[-8000:]
    return done.stdout


def build_wheel(python, folder, *options, **arguments):
    return run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, *options, ROOT, timeout=BUILD, **arguments)


class Environment:
    """A virtual environment whose packages are links to those of this one."""

    def __init__(self, folder, packages="*"):
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.folder, self.python = folder, folder / "bin/python"
        self.site = next(folder.glob("lib/python3*/site-packages"))
        for package in SITE.glob(packages):
            if not re.match("_?hvd|__pycache__", package.name):
                (self.site / package.name).symlink_to(package)

    def pip(self, *arguments, **options):
        # From the environment itself: build backends see its packages.
        return run(self.python, "-m", "pip", *arguments, timeout=BUILD, **options)

    def files(self):
        """All files but the bytecode of modules that are links."""
        return {path for path in self.folder.rglob("*")
                if not path.is_dir() and (path.parent != self.site / "__pycache__" or "hvd" in path.name)}

    def run_two_ranks(self, *launcher):
        program = self.folder / "a program.py"
        program.write_text(PROGRAM)
        output = run(*launcher, program, OMP_NUM_THREADS="1")
        assert "rank 0 of 2" in output and "rank 1 of 2" in output, output

    def torchrun(self):
        self.run_two_ranks(self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    start = time.monotonic()
    build_wheel(sys.executable, folder, "--no-build-isolation")
    made, = folder.glob("hvd-*.whl")
    print(f"built {made.name}, {made.stat().st_size} bytes, in {time.monotonic() - start:.0f} s")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("one") / "an environment")
    environment.pip("install", "--no-index", wheel)  # --no-index: torch is there, so pip needs to fetch no dependency
    return environment


def test_wheel_has_every_part_and_is_small(wheel, unpacked):
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    native = "hvd/_C" + sysconfig.get_config_var("EXT_SUFFIX")
    assert {native, "hvd/_C.pyi", "hvd/py.typed", "hvd/_build.py", "hvd/bin/hvdrun", "hvd/include/hvd/hvd.h",
            "hvd/include/hvd/torch.h", "hvd/lib/cmake/hvd/hvdConfig.cmake", "hvd/lib/libhvd_mpi_abi.so"} <= names
    # No MPI, no UCX, no second name of a library, no source of the build.
    assert {name for name in names if ".so" in name and "yaml" not in name} - {"hvd/lib/libhvd_mpi.so"} == {
        native, "hvd/lib/libhvd_core.so", "hvd/lib/libhvd_torch.so", "hvd/lib/libhvd_mpi_abi.so"}
    assert not [name for name in names if re.search(r"\.in$|\.cpp$|native|gtest|mpi\.h", name)]
    assert wheel.stat().st_size <= 10e6


def test_binaries_need_torch_and_the_system_only(unpacked):
    system = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|librt|ld-linux[-\w]*)\.so\.\d+$")
    torch = {"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so"}
    binaries = [path for path in unpacked.rglob("*") if path.is_file() and path.read_bytes().startswith(b"\x7fELF")]
    assert len(binaries) >= 8
    for path in binaries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic := run("readelf", "-d", path))
        inside = {other.name for other in unpacked.rglob("hvd/lib/*.so*")}
        foreign = {name for name in needed if not system.match(name)} - torch - inside
        if path.name.startswith("libhvd_mpi"):
            assert len(foreign) == 1 and foreign.pop().startswith("libmpi"), (path, needed)
        assert not foreign, (path, needed)
        for folders in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic):
            assert all(re.match(r"\$ORIGIN(/|$)", folder) for folder in folders.split(":")), (path, folders)
        assert not re.search(r"\.debug_|\.symtab", run("readelf", "-SW", path)), path


def test_no_file_names_a_folder_of_the_build(unpacked):
    for path in filter(pathlib.Path.is_file, unpacked.rglob("*")):
        content = path.read_bytes()
        for folder in {ROOT, SITE, SITE.resolve(), pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix)}:
            assert str(folder).encode() not in content, (path, folder)


def test_import_loads_no_library(installed):
    run(installed.python, "-c", "import sys, hvd; maps = open('/proc/self/maps').read()\n"
        "assert hvd.__file__.startswith(sys.prefix)\n"
        "assert not {'torch', 'numpy', 'hvd._C'} & set(sys.modules), sys.modules\n"
        "assert not [name for name in ('libhvd', 'libtorch', 'libmpi', 'libuc') if name in maps], maps\n"
        "assert not hvd.is_initialized(); maps = open('/proc/self/maps').read(); assert 'libhvd_torch' in maps\n"
        "assert not [name for name in ('libmpi', 'libhvd_mpi', 'libucp') if name in maps], maps\n")


def test_two_ranks_of_every_launcher(installed):
    installed.torchrun()
    installed.run_two_ranks(installed.python, "-m", "hvd", "-np", "2")
    installed.run_two_ranks(installed.folder / "bin/hvdrun", "-np", "2")
    installed.run_two_ranks(installed.folder / "bin/hvdrun", "-np", "2", installed.python)
    if shutil.which("mpirun") and (installed.site / "hvd/lib/libhvd_mpi.so").exists():
        installed.run_two_ranks(installed.folder / "bin/hvdrun", "--controller", "mpi", "-np", "2")


def test_hvdrun_finds_its_programs(installed):
    hvdrun = installed.folder / "bin/hvdrun"
    assert re.search(r"^hvd: ", run(hvdrun, "--check-build"), re.MULTILINE)  # of hvd-build-info
    assert "started by" in run(hvdrun, "doctor")


@pytest.mark.parametrize("consumer, options", [("core_consumer", ["-DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON"]),
                                               ("torch_consumer", [])])
def test_programs_in_cpp_find_the_package(installed, tmp_path, consumer, options):
    prefix = run(installed.python, "-c", "import hvd; print(hvd.cmake_prefix_path())").strip()
    run("cmake", "-S", ROOT / "test/install" / consumer, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", *options)
    run("cmake", "--build", tmp_path, timeout=600)
    run(installed.folder / "bin/hvdrun", "-np", "2", tmp_path / consumer, "2")


def test_two_environments_side_by_side(installed, wheel, tmp_path):
    other = Environment(tmp_path / "other")
    other.pip("install", "--no-index", "--no-deps", wheel)
    for environment in (installed, other):
        environment.torchrun()


def test_uninstall_leaves_no_file(wheel, tmp_path):
    environment = Environment(tmp_path / "environment")
    before = environment.files()
    environment.pip("install", "--no-index", "--no-deps", wheel)
    assert len(environment.files() - before) > 50
    run(environment.python, "-m", "hvd", "--version")
    environment.torchrun()
    (environment.folder / "a program.py").unlink()
    environment.pip("uninstall", "--yes", "hvd")
    assert environment.files() == before
    assert not (environment.site / "hvd").exists()


def test_another_torch_is_an_import_error(installed, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.12.1'")
    output = run(installed.python, "-c", "import hvd; hvd.init()", fails=True, PYTHONPATH=str(tmp_path))
    assert re.search(r"ImportError: hvd .* was built for torch 2\.13, and this is torch 2\.12\.1; .*pip install", output), output


def test_editable_install(tmp_path):
    environment = Environment(tmp_path / "an environment")
    before = environment.files()
    # Torch_DIR, or the links of this environment would be other paths to LibTorch's headers, and all sources compiled again.
    environment.pip("install", "--no-index", "--no-deps", "--no-build-isolation",
                    f"--config-settings=cmake.define.Torch_DIR={TORCH_DIR}", "--editable", ROOT)
    run(environment.python, "-c", f"import hvd, pathlib; assert hvd.__file__.startswith({str(ROOT)!r}), hvd.__file__\n"
        "assert (pathlib.Path(hvd.cmake_prefix_path()) / 'lib/cmake/hvd/hvdConfig.cmake').exists()\n")
    environment.torchrun()
    environment.run_two_ranks(environment.python, "-m", "hvd", "-np", "2")
    (environment.folder / "a program.py").unlink()
    environment.pip("uninstall", "--yes", "hvd")
    assert environment.files() == before


def test_isolated_build_finds_torch(wheel, tmp_path):
    probe = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", tmp_path, "scikit-build-core>=0.10"],
                           capture_output=True, text=True, timeout=300)
    if probe.returncode != 0:
        pytest.skip("pip cannot fetch scikit-build-core, which an isolated build needs: " + probe.stderr[-200:])
    build_wheel(sys.executable, tmp_path / "made")
    made, = (tmp_path / "made").glob("hvd-*.whl")
    assert sorted(zipfile.ZipFile(made).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def refused_build(environment):
    """The text of a build that ends with an error while CMake looks for the dependencies."""
    options = [f"build-dir={environment.folder / 'build'}", *(f"cmake.define.HVD_WITH_{part}=OFF" for part in ("CUDA", "MPI", "UCX"))]
    output = build_wheel(environment.python, environment.folder, "--no-build-isolation", *(f"--config-settings={o}" for o in options),
                         fails=True)
    return re.sub(r"\s+", " ", output)


def test_build_without_torch_names_the_remedy(tmp_path):
    environment = Environment(tmp_path / "environment", packages="[ps]*")  # pip, packaging, pathspec, scikit_build_core; not torch
    text = refused_build(environment)
    assert "torch is not installed in the environment of" in text and "--no-build-isolation" in text, text


def test_build_refuses_another_torch(tmp_path):
    environment = Environment(tmp_path / "environment", packages="[ps]*")
    config = environment.site / "torch/share/cmake/Torch"
    config.mkdir(parents=True)
    (environment.site / "torch/__init__.py").touch()
    (config / "TorchConfig.cmake").touch()
    (config / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.12.1")')
    text = refused_build(environment)
    assert re.search(r"is for torch 2\.13, and .* is torch 2\.12\.1; install", text), text
