#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# The build is divided into stages. If it is stopped, the next run continues at the same stage, and ninja at the same
# file. A build in a new folder finds its objects in ccache.
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
    # Link AOTriton into the source tree, because CMake would write the folder of a library elsewhere into RPATH. It has
    # a separate prefix, because torch installs everything in that prefix's lib and include.
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
    # Run this twice, because one of torch's globs matches a header that the build makes. The second run configures
    # again, compiles a few files and links three libraries.
    for _ in 1 2; do
        cmake --build build --target install --parallel "$MAX_JOBS"
    done
}

prune() {
    # setup.py would build again, and then copies the installed files three times. With this build.ninja there is nothing
    # to build, so object files and the submodules' sources can be removed. That frees some 5 GB for the copies.
    echo 'build install: phony' > build/build.ninja
    find build -type f ! -name build.ninja ! -name CMakeCache.txt ! -name '*compile_commands.json' \
        ! -path '*/proto/*.py' -delete
    # Keep the files of submodules that setup.py needs: CMakeLists.txt and licences.
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
    # rattler-build copies this folder five times (for itself and for each output), and it has several GB. The outputs
    # need only licence texts and checks. Links are removed too: one of ittapi's licences is a link, and packages with
    # a link in `info` are refused.
    find . -mindepth 2 ! -type d \( -type l -o ! -path '*/LICENSE*' ! -path './checks/*' \) -delete
    find . -mindepth 1 -type d -empty -delete
}

run_stages prepare configure compile prune
install
end_stages
clean
