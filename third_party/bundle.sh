# For hosts without a network: collects what setup.sh would install there in one folder. Sourced by setup.sh, which defines say, die,
# quietly and root.
#
# The folder holds deps.tar.xz (the files of Debian packages of this machine and the libraries that they need, below one prefix) and
# MANIFEST. It also holds gpu.tar.xz, if 'test/gpu/run.sh --build-only' has built the tests and benchmarks that need a GPU, so that no
# time on a GPU is spent on compiling. The bundle does not contain LibTorch, CUDA or NCCL: the target has them or does not need them.
#
# The bundle and the checkout together must fit into 64 MiB, the limit of some services that copy files to a GPU host. Therefore the
# archives are compressed with xz and the programs are stripped.

bundle_packages=(libspdlog-dev libspdlog1.10 libfmt-dev libfmt9 libgtest-dev libgmock-dev libcli11-dev zlib1g-dev libhwloc-dev libhwloc15 nlohmann-json3-dev libasio-dev libyaml-cpp-dev libyaml-cpp0.7 libucx-dev libucx0
  libopenmpi-dev openmpi-bin openmpi-common libopenmpi3 libpmix2 cmake cmake-data ninja-build)
bundle_limit=$((56 << 20))
arch_lib=lib/x86_64-linux-gnu

# Prints the files of a package that a build or a run needs.
package_files() {
  dpkg -L "$1" | grep -vE '^/usr/share/(doc|man|lintian|locale|bash-completion|emacs|vim|aclocal|bug|icons|mime|applications)(/|$)' |
    grep -vE '^/(etc|var)/|openmpi/.*\.a$|^/usr/share/cmake-[^/]*/Help|openmpi/lib/.*\.mod$|libmpi_(usempi|mpifh|java|cxx)|/fortran'
}

# The programs of a build for test/gpu/run.sh, and the lists from which ctest knows them.
bundle_gpu_programs() {
  local build=$root/build/gpu commit programs
  [[ -x $build/test/gpu/gpu_kernels_test ]] || return 0
  [[ ! -e $build/PREBUILT ]] || die "--bundle: the programs in $build came with a bundle; remove it, and run 'bash test/gpu/run.sh --build-only'"
  commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
  programs=$(mktemp -d)
  (cd "$root" && find build/gpu -path build/gpu/torch -prune -o \( -type f \( -perm -u+x -o -name 'CTestTestfile.cmake' \) -o -type l -name '*.so*' \) \
    -not -path '*/CMakeFiles/*' -print0 | tar -cf - --null -T -) | tar -C "$programs" -xf -
  # The tests need no debug information. strip fails for scripts.
  find "$programs" -type f -perm -u+x -exec strip --strip-debug {} + 2>/dev/null || true
  tar -C "$programs" -cJf "$1/gpu.tar.xz" build
  rm -rf "$programs"
  printf 'gpu-programs %s %s\n' "$commit" "$root" >>"$1/MANIFEST"
  say "bundle: with the programs of build/gpu, from $commit"
}

# Unpacks an archive of a bundle. Python reads it on hosts without xz.
unpack() {
  if command -v xz >/dev/null; then
    tar -C "$2" -xJf "$1"
  else
    python3 -m tarfile -e "$1" "$2"
  fi
}

# Unpacks the programs below the checkout, and writes its paths and the target's mpirun into ctest's lists.
unpack_gpu_programs() {
  local source=$1 deps=$2 line commit built_in
  [[ -e $source/gpu.tar.xz ]] || return 0
  line=$(sed -n 's/^gpu-programs //p' "$source/MANIFEST")
  commit=${line%% *} built_in=${line#* }
  rm -rf "$root/build/gpu"
  unpack "$source/gpu.tar.xz" "$root" || die "--from: $source/gpu.tar.xz could not be unpacked"
  find "$root/build/gpu" -name CTestTestfile.cmake -exec \
    sed -i -E -e "s#/usr/bin/(mpirun|mpiexec)(\.openmpi)?\>#$deps/bin/mpirun#g" -e "s|$built_in/|$root/|g" {} +
  printf '%s\n' "$commit" >"$root/build/gpu/PREBUILT"
  say "from: programs for test/gpu/run.sh, built from $commit"
}

# Symbolic links stay what they are.
copy_packages() {
  local package path
  for package in "${bundle_packages[@]}"; do package_files "$package"; done |
    while read -r path; do
      [[ ! -f $path && ! -L $path ]] || printf '%s\n' "${path#/}"
    done | tar -C / --no-recursion -cf - -T - | tar -C "$1" -xf -
}

# The shared libraries that the files below a folder need and do not have, but for those of the compiler and the C library: the target
# has its own, and must not be older.
copy_needed_libraries() {
  local tree=$1 library
  # ldd fails for what is no dynamic executable.
  { find "$tree" -type f \( -perm -u+x -o -name '*.so*' \) -print0 | xargs -0 -n 64 ldd 2>/dev/null || true; } |
    sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | sort -u |
    grep -vE '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s|anl|nsl)\.so[^/]*)$' |
    while read -r library; do
      [[ -e $tree/$arch_lib/${library##*/} ]] || cp -L "$library" "$tree/$arch_lib/"
    done
}

make_bundle() {
  local target=$1 package tree version size
  command -v dpkg >/dev/null || die "--bundle works on Debian and systems like it"
  for package in "${bundle_packages[@]}"; do
    package_installed "$package" || die "--bundle: expected package '$package' to be installed; run 'bash third_party/setup.sh' first"
  done
  tree=$bundle_tree
  copy_packages "$tree"
  # /usr/bin/... becomes bin/...; what Debian chooses between with /etc/alternatives is Open MPI's here.
  mv "$tree/usr"/* "$tree/" && rmdir "$tree/usr"
  if [[ -d $tree/$arch_lib/openmpi ]]; then
    for program in mpicc mpirun mpiexec mpic++ orterun ompi_info; do
      [[ ! -e $tree/bin/$program.openmpi ]] || ln -sf "$program.openmpi" "$tree/bin/$program"
    done
  fi
  copy_needed_libraries "$tree"
  find "$tree" -xtype l -delete
  mkdir -p "$target"
  version=$(ldd --version | sed -n '1s/.* //p')
  {
    printf 'glibc %s\n' "$version"
    for package in "${bundle_packages[@]}"; do printf 'package %s %s\n' "$package" "$(dpkg-query -W -f='${Version}' "$package")"; done
  } >"$target/MANIFEST"
  tar -C "$tree" -cJf "$target/deps.tar.xz" .
  rm -f "$target/gpu.tar.xz"
  bundle_gpu_programs "$target"
  size=$(cat "$target"/MANIFEST "$target"/*.tar.xz | wc -c)
  ((size < bundle_limit)) || die "--bundle: $target has $size bytes, expected less than $bundle_limit, so that it fits into 64 MiB with the checkout"
  say "bundle: $target, $((size >> 20)) MiB; copy it with the checkout, and run 'bash third_party/setup.sh --from DIR' there"
}

# A folder of the Python that is there, or nothing.
python_folder() {
  python3 -c "$1" 2>/dev/null || true
}

write_environment() {
  local deps=$1 torch nccl
  torch=${Torch_DIR:-$(python_folder 'import os, torch; print(os.path.join(torch.utils.cmake_prefix_path, "Torch"))')}
  nccl=${NCCL_HOME:-$(python_folder 'import importlib.util as i; print(list(i.find_spec("nvidia.nccl").submodule_search_locations)[0])')}
  {
    printf '# Written by third_party/setup.sh --from. Source it before building and running.\n'
    printf 'export PATH=%q:$PATH\n' "$deps/bin"
    # NCCL is found by its name: where it was on the machine that the bundle's programs were built on, it is not here.
    printf 'export LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' "$deps/$arch_lib:$deps/$arch_lib/openmpi/lib${nccl:+:$nccl/lib}"
    printf 'export CMAKE_PREFIX_PATH=%q${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}\n' "$deps"
    # Also where CMake does not look into lib/x86_64-linux-gnu.
    for package in spdlog fmt GTest; do printf 'export %s_DIR=%q\n' "$package" "$deps/$arch_lib/cmake/$package"; done
    printf 'export ZLIB_ROOT=%q\n' "$deps"
    printf 'export OPAL_PREFIX=%q OPAL_LIBDIR=%q OPAL_PKGLIBDIR=%q OPAL_INCLUDEDIR=%q OPAL_DATADIR=%q OPAL_PKGDATADIR=%q\n' "$deps" \
      "$deps/$arch_lib/openmpi/lib" "$deps/$arch_lib/openmpi/lib/openmpi3" "$deps/$arch_lib/openmpi/include" "$deps/share" "$deps/share/openmpi"
    printf 'export PMIX_INSTALL_PREFIX=%q PMIX_LIBDIR=%q PMIX_PKGLIBDIR=%q PMIX_DATADIR=%q PMIX_PKGDATADIR=%q\n' "$deps" \
      "$deps/$arch_lib/pmix2/lib" "$deps/$arch_lib/pmix2/lib/pmix" "$deps/share" "$deps/share/pmix"
    [[ -z $torch ]] || printf 'export Torch_DIR=%q\n' "$torch"
    [[ -z $nccl ]] || printf 'export NCCL_HOME=%q\n' "$nccl"
  } >"$deps/env.sh"
  say "from: LibTorch ${torch:-not found (set Torch_DIR, or build with -DHVD_WITH_TORCH=OFF)}"
  say "from: NCCL ${nccl:-not found (set NCCL_HOME; without it GPU tensors are staged)}"
}

set_up_from() {
  local source=$1 deps=$root/.deps wanted found
  [[ -f $source/deps.tar.xz && -f $source/MANIFEST ]] || die "--from: $source is no bundle (expected deps.tar.xz and MANIFEST in it)"
  wanted=$(sed -n 's/^glibc //p' "$source/MANIFEST")
  found=$(ldd --version | sed -n '1s/.* //p')
  printf '%s\n%s\n' "$wanted" "$found" | sort -CV || die "--from: the bundle needs glibc $wanted or newer, this host has $found; make it on an older one"
  rm -rf "$deps"
  mkdir "$deps"
  unpack "$source/deps.tar.xz" "$deps" || die "--from: $source/deps.tar.xz could not be unpacked"
  # CMake's files name the prefix that they were installed under; Open MPI's are told by env.sh.
  write_environment "$deps"
  # shellcheck disable=SC1091
  source "$deps/env.sh"
  check_commands
  unpack_gpu_programs "$source" "$deps"
  say "from: everything is in $deps; 'source .deps/env.sh' before building and running"
}
