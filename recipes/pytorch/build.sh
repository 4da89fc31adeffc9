#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# In stages: a run that was stopped goes on at the stage, and ninja at the file. A new build folder finds
# its objects in ccache.
set -euo pipefail
# shellcheck source=recipes/pytorch/options.sh
source "$RECIPE_DIR/options.sh"
# shellcheck source=recipes/checks/stages.sh
source checks/stages.sh

prepare() {
    python "$RECIPE_DIR/check_aotriton_pin.py" cmake/External/aotriton.cmake "$AOTRITON_COMMIT"
    # with this file CMake requires every submodule to be complete, even unused ones
    rm -f .gitmodules
    # NNPACK would download six, which the host environment has
    : > third_party/NNPACK/cmake/DownloadSix.cmake
    # Below the source tree, because CMake writes the folder of any other library into RPATH. A separate
    # prefix, because torch installs everything in its lib and include.
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
    # Twice: one of torch's globs lists a header that the build makes. So CMake runs again, and a few
    # files are compiled and three libraries linked again.
    for _ in 1 2; do
        cmake --build build --target install --parallel "$MAX_JOBS"
    done
}

prune() {
    # setup.py builds again, before it copies what is installed three times. With nothing to build it
    # needs no object, and of the submodules no source: their room, some 5 GB, is that of the copies.
    echo 'build install: phony' > build/build.ninja
    find build -type f ! -name build.ninja ! -name CMakeCache.txt ! -name '*compile_commands.json' \
        ! -path '*/proto/*.py' -delete
    # setup.py looks for submodules by their CMakeLists.txt, and bundles their licences
    find third_party -type f ! -path '*/valgrind-headers/*' ! -name '*.py' ! -name CMakeLists.txt \
        ! -ipath '*licen[cs]e*' ! -iname 'copying*' ! -iname 'notice*' -delete
}

install() {
    # By $PYTHON, as CMake was given it: with another Python_EXECUTABLE setup.py configures again,
    # without our -D.
    "$PYTHON" -m pip install . --no-deps --no-index --no-build-isolation --no-compile -v
    python "$RECIPE_DIR/lay_out.py" "$SP_DIR/torch" "$PREFIX" "$SRC_DIR"
    python -m compileall -q -j0 -s "$PREFIX" --invalidation-mode unchecked-hash \
        "$SP_DIR/torch" "$SP_DIR/torchgen" "$SP_DIR/functorch"
}

clean() {
    # rattler-build copies this folder once for itself and once for each output: without this, several
    # GB five times. Licence texts and checks are all that the outputs take from it. Links go too:
    # ittapi has one among its licences, and a package with a link in `info` is refused.
    find . -mindepth 2 ! -type d \( -type l -o ! -path '*/LICENSE*' ! -path './checks/*' \) -delete
    find . -mindepth 1 -type d -empty -delete
}

run_stages prepare configure compile prune
install
end_stages
clean
