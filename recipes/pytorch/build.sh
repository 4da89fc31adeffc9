#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# The build is divided into stages. If the build is stopped, the next run continues at the same stage, and ninja
# continues at the same file. A build in a new folder finds the objects of earlier builds in ccache.
set -euo pipefail
# shellcheck source=recipes/pytorch/options.sh
source "$RECIPE_DIR/options.sh"
# shellcheck source=recipes/checks/stages.sh
source checks/stages.sh

prepare() {
    python "$RECIPE_DIR/check_aotriton_pin.py" cmake/External/aotriton.cmake "$AOTRITON_COMMIT"
    # If this file exists, CMake requires every submodule to be complete, even unused ones.
    rm -f .gitmodules
    # NNPACK would download the package six, which the host environment already has.
    : > third_party/NNPACK/cmake/DownloadSix.cmake
    # Link AOTriton's prefix into the source tree. Otherwise CMake would write the library's folder into RPATH. AOTriton
    # has a prefix of its own, opt/aotriton, because torch installs everything that is in lib and include of the prefix
    # that it gets for AOTriton.
    ln -sfn "$PREFIX/opt/aotriton" "$AOTRITON_INSTALLED_PREFIX"
    make_gcc_view
    python tools/amd_build/build_amd.py
}

configure() {
    # shellcheck disable=SC2086  # conda's CMAKE_ARGS are words
    cmake -S . -B build -G Ninja $CMAKE_ARGS "${options[@]/#/-D}" 2>&1 | tee configure.log
    python "$RECIPE_DIR/check_configuration.py" build configure.log "$PREFIX" "$PYTORCH_ROCM_ARCH"
}

compile() {
    # Run the command twice, because one of the globs in torch's CMake files matches a header that the build makes. The
    # second run configures again, compiles a few files and links three libraries.
    for _ in 1 2; do
        cmake --build build --target install --parallel "$MAX_JOBS"
    done
}

prune() {
    # setup.py runs ninja again, and then copies the installed files three times. With the build.ninja written here,
    # ninja has nothing to build. So the object files and the submodules' sources can be removed, which frees about 5 GB
    # of disk for the copies.
    echo 'build install: phony' > build/build.ninja
    find build -type f ! -name build.ninja ! -name CMakeCache.txt ! -name '*compile_commands.json' \
        ! -path '*/proto/*.py' -delete
    # Keep the files of third_party that setup.py needs: valgrind-headers, Python files, CMakeLists.txt and licences.
    find third_party -type f ! -path '*/valgrind-headers/*' ! -name '*.py' ! -name CMakeLists.txt \
        ! -ipath '*licen[cs]e*' ! -iname 'copying*' ! -iname 'notice*' -delete
}

install() {
    # Use $PYTHON, the same path that CMake was given. With another Python_EXECUTABLE, setup.py would configure again,
    # without our -D options.
    "$PYTHON" -m pip install . --no-deps --no-index --no-build-isolation --no-compile -v
    python "$RECIPE_DIR/lay_out.py" "$SP_DIR/torch" "$PREFIX" "$SRC_DIR"
    python -m compileall -q -j0 -s "$PREFIX" --invalidation-mode unchecked-hash \
        "$SP_DIR/torch" "$SP_DIR/torchgen" "$SP_DIR/functorch"
}

clean() {
    # rattler-build copies the work folder, which has several GB, five times (for itself and for each output). The
    # outputs need only licence texts and checks, so everything else is removed. Symbolic links are removed too, because
    # one of ittapi's licence texts is a link, and the driver refuses packages with a link in `info`.
    find . -mindepth 2 ! -type d \( -type l -o ! -path '*/LICENSE*' ! -path './checks/*' \) -delete
    find . -mindepth 1 -type d -empty -delete
}

run_stages prepare configure compile prune
install
end_stages
clean
