#!/usr/bin/env bash
set -euo pipefail
. "$RECIPE_DIR/kernels.sh"

# an archive has no git history for CMake to ask
export AOTRITON_CI_SUPPLIED_SHA1=$AOTRITON_COMMIT AOTRITON_GIT_TREESHA1=$AOTRITON_TREE
export ROCM_PATH=$PREFIX/opt/rocm
# newer linkers (binutils 2.47) take the version string in .comment for garbage
export LDFLAGS="${LDFLAGS:-} -Wl,--no-gc-sections"
# half a CPU hour of objects outlives a killed build
# shellcheck source=recipes/checks/ccache.sh
. checks/ccache.sh
# Upstream's CMake makes a virtual environment and runs `pip install -r requirements.txt` in it. What
# the library's generator imports is installed here, and AOTRITON_INHERIT_SYSTEM_SITE_TRITON lets the
# environment see it. The list has more names: pip fails on those without an index, and CMake goes on.
export PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=
# AOTRITON_NOIMAGE_MODE: no clone of ROCm/aiter.
# shellcheck disable=SC2086
cmake -G Ninja -S . -B build ${CMAKE_ARGS:-} \
    -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER_LAUNCHER=ccache \
    -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
    -DCMAKE_INSTALL_PREFIX="$PREFIX" \
    -DCMAKE_INSTALL_LIBDIR=lib \
    -DCMAKE_PREFIX_PATH="$ROCM_PATH;$PREFIX" \
    -DHIP_PLATFORM=amd \
    -DAOTRITON_TARGET_ARCH="$GPU_ARCH" \
    -DAOTRITON_ENABLE_FP32_INPUTS=$AOTRITON_ENABLE_FP32 \
    -DAOTRITON_NOIMAGE_MODE=ON \
    -DAOTRITON_INHERIT_SYSTEM_SITE_TRITON=ON \
    -DAOTRITON_NO_PYTHON=ON \
    -DAOTRITON_USE_TORCH=OFF
# upstream's CMake also looks in /opt/rocm
grep "^hip_DIR:PATH=$PREFIX/" build/CMakeCache.txt
ninja -C build -j"$CPU_COUNT" install
# not install/strip: CMake may choose llvm-strip, which removes the version string in .comment
"${STRIP:-strip}" --strip-unneeded "$PREFIX"/lib/libaotriton_v2.so.*.*

# which kernel the library's own dispatch code asks for; functions never called stay unresolved
objects=build/v3src/CMakeFiles/aotriton_v2.dir
${CXX:-g++} -std=c++20 -no-pie -D__HIP_PLATFORM_AMD__ -Iinclude -Ibuild/include -Ibuild/v3src \
    -I"$ROCM_PATH/include" "$RECIPE_DIR/check_dispatch.cc" \
    $objects/flash/shim.attn_fwd.cc.o $objects/util.cc.o \
    -Wl,--unresolved-symbols=ignore-all -o check_dispatch
./check_dispatch "$AOTRITON_KERNELS"

# PyTorch's CMake copies the whole prefix it is given: this one holds nothing but AOTriton
mkdir -p "$PREFIX/opt/aotriton/lib" "$PREFIX/opt/aotriton/include"
for library in "$PREFIX"/lib/libaotriton_v2.so*; do
    ln -s "../../../lib/${library##*/}" "$PREFIX/opt/aotriton/lib/"
done
ln -s ../../../include/aotriton "$PREFIX/opt/aotriton/include/aotriton"

# rattler-build copies this folder for each output
rm -r build
