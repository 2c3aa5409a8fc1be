#!/usr/bin/env bash
# Installs what hvd is built from: Debian packages, LibTorch in .venv, NCCL where there is a CUDA toolkit; for tests MPICH in .venv/mpich.
# Usage: bash third_party/setup.sh [--clang | --packages | --bundle DIR | --from DIR] [--without-mpi]
#   --clang adds Clang, which the sanitizers, the fuzz target and the checks of style need, clang-format and doxygen. --packages installs the
#   Debian packages only, for a build against another LibTorch. --bundle DIR gathers what a host without a network lacks, --from DIR sets
#   such a host up from it, without root: into .deps of the checkout.
#   --without-mpi leaves Open MPI out: jobs then go over UCX.
# Safe to run again: what is there is left alone. third_party/README.md says what each dependency is for.
set -euo pipefail

torch_version=2.13.0
nccl_version=2.32.3
clang_format_version=18.1.8
safetensors_version=0.8.0
torchvision_version=0.28.0 # the one for torch_version
tensorboard_version=2.21.0
pytest_version=9.2.0
expecttest_version=0.3.0
scikit_build_core_version=1.1.2
mpich_version=5.0.2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
# Present while .venv is being filled. A .venv that holds it is the remains of an interrupted run.
incomplete=$venv/.hvd-incomplete

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}
# Runs a command quietly; when it fails, shows the end of what it said.
quietly() {
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    return 1
  fi
}

with_clang=no
with_mpi=yes
packages_only=no
bundle=
from=
while (($# > 0)); do
  case $1 in
    --clang) with_clang=yes ;;
    --without-mpi) with_mpi=no ;;
    --packages) packages_only=yes ;;
    --bundle | --from)
      (($# > 1)) || die "$1 needs a folder"
      [[ $1 == --bundle ]] && bundle=$2 || from=$2
      shift
      ;;
    -h | --help) sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) die "unknown option '$1' (known: --clang, --packages, --bundle DIR, --from DIR, --without-mpi)" ;;
  esac
  shift
done

# Two runs in one checkout would write the same .venv: the second waits for the first.
exec 9<"$root/third_party"
flock --nonblock 9 || {
  say "waiting for another run in this checkout"
  flock 9
}

log=$(mktemp)
bundle_tree=
on_exit() {
  rm -f "$log"
  [[ -z $bundle_tree ]] || rm -rf "$bundle_tree"
  [[ ! -e $incomplete ]] || rm -rf "$venv"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# --- Packages -------------------------------------------------------------------------------------------------------
package_installed() {
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# LibTorch's wheels need Python 3.10 or newer; the standard library of some systems leaves out venv or ensurepip.
find_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
      >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

find_clang() {
  compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -n 1 | grep .
}

missing_packages() {
  command -v g++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  local package mpi=(libopenmpi-dev openmpi-bin)
  [[ $with_mpi == yes ]] || mpi=()
  for package in "${mpi[@]}" libucx-dev libasio-dev libspdlog-dev libgtest-dev libgmock-dev libcli11-dev libyaml-cpp-dev zlib1g-dev libhwloc-dev \
    python3-dev nlohmann-json3-dev spin dataset-fashion-mnist; do
    package_installed "$package" || echo "$package"
  done
  find_python >/dev/null || printf '%s\n' python3 python3-venv
  if [[ $with_clang == yes ]] && ! find_clang >/dev/null; then
    printf '%s\n' clang libclang-rt-dev
  fi
  if [[ $with_clang == yes ]] && ! compgen -c clang-tidy | grep -qE '^clang-tidy(-[0-9]+)?$'; then
    printf '%s\n' clang-tidy
  fi
  if [[ $with_clang == yes ]] && ! command -v doxygen >/dev/null; then
    printf '%s\n' doxygen
  fi
}

install_packages() {
  local missing sudo=()
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]} == 0)); then
    say "packages: all installed"
    return
  fi
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "packages are missing and neither root nor sudo is at hand; install them and run this again: ${missing[*]}"
    sudo=(sudo)
    [[ -t 0 ]] || sudo=(sudo -n)
    "${sudo[@]}" true 2>/dev/null ||
      die "packages are missing and sudo was refused; install them and run this again: ${missing[*]}"
  fi
  say "packages: installing ${missing[*]}"
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  quietly "${apt[@]}" update || die "apt-get update failed; its last lines are above"
  quietly "${apt[@]}" install --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}; its last lines are above"
}

check_commands() {
  local command mpi=(mpirun)
  [[ $with_mpi == yes ]] || mpi=()
  for command in g++ cmake ninja "${mpi[@]}"; do
    command -v "$command" >/dev/null || die "'$command' is not on PATH"
  done
  local gcc cmake
  gcc=$(g++ -dumpversion)
  ((${gcc%%.*} >= 12)) || die "g++ is version $gcc; hvd needs 12 or newer (C++20)"
  cmake=$(cmake --version | sed -n '1s/[^0-9]*//p')
  printf '3.25\n%s\n' "$cmake" | sort -CV || die "cmake is version $cmake; hvd needs 3.25 or newer"
}

# --- The virtual environment ----------------------------------------------------------------------------------------
remove_unfinished_venv() {
  if [[ -e $incomplete ]]; then
    say ".venv: removing what an interrupted run left"
    rm -rf "$venv"
  fi
}

ensure_venv() {
  if [[ -d $venv ]] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    # A virtual environment holds absolute paths: one from a moved checkout or a removed Python is of no use.
    say ".venv: removing it, its Python does not run"
    rm -rf "$venv"
  fi
  [[ ! -d $venv ]] || return 0
  local python
  python=$(find_python) || die "no Python 3.10 to 3.14 with the modules venv and ensurepip was found"
  mkdir "$venv"
  touch "$incomplete"
  quietly "$python" -m venv "$venv" || die "'$python -m venv' failed; its last lines are above"
}

pip_install() {
  quietly "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --progress-bar off "$@" &&
    rm -f "$incomplete"
}

site_packages() { printf '%s\n' "$venv"/lib/python3*/site-packages; }

# The major version of the CUDA toolkit; fails when there is none.
cuda_major() {
  local nvcc
  for nvcc in "${CUDACXX:-}" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" nvcc; do
    if [[ -n $nvcc ]] && command -v "$nvcc" >/dev/null; then
      "$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' | grep .
      return
    fi
  done
  return 1
}

# Where the environment's Torch_DIR or CMAKE_PREFIX_PATH holds a LibTorch; fails when neither does.
named_libtorch() {
  local prefix prefixes suffix
  IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${Torch_DIR:-}" "${prefixes[@]}"; do
    for suffix in '' /share/cmake/Torch /lib/cmake/Torch; do
      if [[ -n $prefix && -e $prefix$suffix/TorchConfig.cmake ]]; then
        printf '%s\n' "$prefix$suffix"
        return
      fi
    done
  done
  return 1
}

install_torch() {
  local named found
  if named=$(named_libtorch); then
    say "LibTorch: skipped, the environment names one in $named"
    return
  fi
  # pip writes a wheel's RECORD last, after the files of the wheel and of all that it depends on.
  found=$(compgen -G "$(site_packages)/torch-$torch_version*.dist-info/RECORD" || true)
  if [[ -n $found && -e $(site_packages)/torch/share/cmake/Torch/TorchConfig.cmake ]]; then
    say "LibTorch: $torch_version is in .venv"
    return
  fi
  say "LibTorch: installing torch==$torch_version into .venv (this downloads some hundred megabytes)"
  ensure_venv
  pip_install "torch==$torch_version" || die "pip could not install torch==$torch_version; its last lines are above"
  [[ -e $(site_packages)/torch/share/cmake/Torch/TorchConfig.cmake ]] ||
    die "torch==$torch_version was installed but holds no TorchConfig.cmake"
  if grep -qE "^cuda\b.*= '" "$(site_packages)/torch/version.py" && ! cuda_major >/dev/null; then
    # CMake would refuse it later, with a message that does not say what to do.
    quietly "$venv/bin/python" -m pip uninstall -y torch || true
    die "pip's index served a LibTorch built for CUDA, and there is no CUDA toolkit (nvcc) to build against it;" \
      "install one, or let PIP_INDEX_URL name an index of CPU builds, or set Torch_DIR"
  fi
}

install_nccl() {
  local major
  if ! major=$(cuda_major); then
    say "NCCL: skipped, no CUDA toolkit (nvcc) is installed"
  elif [[ -n ${NCCL_HOME:-} ]]; then
    say "NCCL: skipped, NCCL_HOME names one in $NCCL_HOME"
  elif ((major != 13)); then
    say "NCCL: skipped, the wheel is for CUDA 13 and the toolkit is CUDA $major; set NCCL_HOME to use another NCCL"
  elif compgen -G "$(site_packages)/nvidia_nccl_cu13-*.dist-info/RECORD" >/dev/null; then
    # A LibTorch built for CUDA brings the version that it needs.
    say "NCCL: nvidia-nccl-cu13 is in .venv"
  else
    say "NCCL: installing nvidia-nccl-cu13==$nccl_version into .venv"
    ensure_venv
    pip_install "nvidia-nccl-cu13==$nccl_version" ||
      die "pip could not install nvidia-nccl-cu13==$nccl_version; its last lines are above"
  fi
}

# Packages that tests compare hvd with. Without them those tests are skipped. --no-deps keeps pip from replacing LibTorch.
install_test_packages() {
  if named_libtorch >/dev/null; then
    say "safetensors, torchvision, tensorboard: skipped, LibTorch is not in .venv"
    return
  fi
  if [[ -n $(compgen -G "$(site_packages)/safetensors-$safetensors_version.dist-info/RECORD") &&
    -n $(compgen -G "$(site_packages)/torchvision-$torchvision_version*.dist-info/RECORD") &&
    -n $(compgen -G "$(site_packages)/tensorboard-$tensorboard_version.dist-info/RECORD") ]]; then
    say "safetensors, torchvision, tensorboard: in .venv"
    return
  fi
  say "safetensors, torchvision, tensorboard: installing $safetensors_version, $torchvision_version and $tensorboard_version into .venv"
  # numpy and those after it are what these three need of their dependencies.
  pip_install --no-deps "safetensors==$safetensors_version" "torchvision==$torchvision_version" \
    "tensorboard==$tensorboard_version" numpy pillow protobuf absl-py packaging typing_extensions ||
    say "safetensors, torchvision, tensorboard: pip could not install them; tests that need them will be skipped"
}

# The tests of the Python package, PyTorch's own tests (expecttest), and what builds the package's wheel. Without them those tests are left out.
install_python_packages() {
  if named_libtorch >/dev/null; then
    say "pytest, expecttest, scikit-build-core: skipped, LibTorch is not in .venv"
    return
  fi
  if [[ -n $(compgen -G "$(site_packages)/pytest-$pytest_version.dist-info/RECORD") &&
    -n $(compgen -G "$(site_packages)/expecttest-$expecttest_version.dist-info/RECORD") &&
    -n $(compgen -G "$(site_packages)/scikit_build_core-$scikit_build_core_version.dist-info/RECORD") ]]; then
    say "pytest, expecttest, scikit-build-core: in .venv"
    return
  fi
  say "pytest, expecttest, scikit-build-core: installing $pytest_version, $expecttest_version and $scikit_build_core_version into .venv"
  pip_install "pytest==$pytest_version" "expecttest==$expecttest_version" "scikit-build-core==$scikit_build_core_version" ||
    say "pytest, expecttest, scikit-build-core: pip could not install them; the tests of the Python package will be left out"
}

# An MPI with the ABI of MPI 5, for tests. In a folder of its own, so that an activated .venv does not change which mpirun and mpicc are found.
install_mpich() {
  if [[ -e $venv/mpich/bin/mpiexec ]] && compgen -G "$venv/mpich/lib/python3*/site-packages/mpich-$mpich_version.dist-info/RECORD" >/dev/null; then
    say "MPICH: $mpich_version is in .venv/mpich"
    return
  fi
  say "MPICH: installing mpich==$mpich_version into .venv/mpich"
  ensure_venv
  pip_install --no-deps --ignore-installed --prefix "$venv/mpich" "mpich==$mpich_version" ||
    say "MPICH: pip could not install it; tests under an MPI with the ABI of MPI 5 will be skipped"
}

install_clang_format() {
  if [[ $("$venv/bin/clang-format" --version 2>/dev/null) == *"version $clang_format_version"* ]]; then
    say "clang-format: $clang_format_version is in .venv"
    return
  fi
  say "clang-format: installing clang-format==$clang_format_version into .venv"
  ensure_venv
  pip_install "clang-format==$clang_format_version" ||
    die "pip could not install clang-format==$clang_format_version; its last lines are above"
}

# shellcheck source=third_party/bundle.sh
source "$root/third_party/bundle.sh"
if [[ -n $from ]]; then
  set_up_from "$from"
  exit 0
fi
if [[ -n $bundle ]]; then
  bundle_tree=$(mktemp -d)
  make_bundle "$bundle"
  exit 0
fi

if grep -qsE '^(ID|ID_LIKE)=.*(debian|ubuntu)' /etc/os-release && command -v apt-get >/dev/null; then
  install_packages
else
  say "packages: skipped, this is neither Debian nor Ubuntu; third_party/README.md lists what must be installed"
fi
check_commands
if [[ $packages_only == yes ]]; then
  say "done"
  exit 0
fi
remove_unfinished_venv
install_torch
install_test_packages
install_python_packages
install_nccl
install_mpich
[[ $with_clang == no ]] || install_clang_format
say "done"
