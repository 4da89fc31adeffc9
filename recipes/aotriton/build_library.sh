#!/usr/bin/env bash
set -euo pipefail
. "$RECIPE_DIR/kernels.sh"

# Set the two hashes that CMake would read from git, because the source has no git history.
export AOTRITON_CI_SUPPLIED_SHA1=$AOTRITON_COMMIT AOTRITON_GIT_TREESHA1=$AOTRITON_TREE
export ROCM_PATH=$PREFIX/opt/rocm
# Without this option, newer linkers (binutils 2.47) remove the version string in .comment as unused.
export LDFLAGS="${LDFLAGS:-} -Wl,--no-gc-sections"
# With ccache, the next build after a killed one saves up to half a CPU hour.
# shellcheck source=recipes/checks/ccache.sh
. checks/ccache.sh
# Upstream's CMake makes a virtual environment and runs `pip install -r requirements.txt` in it. The packages that the
# library's generator imports are in the build environment, and AOTRITON_INHERIT_SYSTEM_SITE_TRITON makes them visible
# in the virtual environment. pip cannot install the other packages of requirements.txt, because it has no index here.
# CMake ignores the failure of pip.
export PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=
# AOTRITON_NOIMAGE_MODE avoids a clone of ROCm/aiter.
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
# Check that CMake has found HIP in the prefix, since CMake also looks in /opt/rocm.
grep "^hip_DIR:PATH=$PREFIX/" build/CMakeCache.txt
ninja -C build -j"$CPU_COUNT" install
# Do not use the target install/strip: CMake may choose llvm-strip, which removes the version string in .comment.
"${STRIP:-strip}" --strip-unneeded "$PREFIX"/lib/libaotriton_v2.so.*.*

# Check which kernels the library's dispatch code selects. Functions that are never called stay unresolved.
objects=build/v3src/CMakeFiles/aotriton_v2.dir
${CXX:-g++} -std=c++20 -no-pie -D__HIP_PLATFORM_AMD__ -Iinclude -Ibuild/include -Ibuild/v3src \
    -I"$ROCM_PATH/include" "$RECIPE_DIR/check_dispatch.cc" \
    $objects/flash/shim.attn_fwd.cc.o $objects/util.cc.o \
    -Wl,--unresolved-symbols=ignore-all -o check_dispatch
./check_dispatch "$AOTRITON_KERNELS"

# Make a prefix that contains only AOTriton, because PyTorch's CMake copies the complete prefix that it gets.
mkdir -p "$PREFIX/opt/aotriton/lib" "$PREFIX/opt/aotriton/include"
for library in "$PREFIX"/lib/libaotriton_v2.so*; do
    ln -s "../../../lib/${library##*/}" "$PREFIX/opt/aotriton/lib/"
done
ln -s ../../../include/aotriton "$PREFIX/opt/aotriton/include/aotriton"

# Remove this folder, because rattler-build would copy it for each output.
rm -r build
