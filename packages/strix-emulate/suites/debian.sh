#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Run test programs from Debian's packages on the emulated device: debian.sh ggml|rocblas|rocprim|rocthrust.
# This needs root in Debian sid with `experimental` among its sources (docs/suites.md). The last line of the
# output has the number of cases by outcome.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${STRIX_EMULATE_BUILD:-$PWD/build/suites}
export PYTHONPATH=$here/../src STRIX_EMULATE_HIP=$build/hip STRIX_EMULATE_NATIVE=$build/native

install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        gcc libc6-dev libllvm22 python3-pyelftools python3-msgpack python3-numpy python3-rich \
        python3-typer "$@" >/dev/null
    mkdir -p "$build"
    [ -e "$build/native" ] || CC=gcc python3 -m strix_emulate.native.generate "$build/native" >/dev/null
    [ -e "$build/hip" ] || CC=gcc python3 "$here/../hip/build.py" "$build/hip" >/dev/null
}

run() { python3 "$here/programs.py" "$@"; }

case ${1:-} in
ggml) # Its code is for gfx1100. It uses HIP 6, but only functions that HIP 7 has as well.
    install libggml0-backend-hip llama.cpp-tests
    ln -sf libamdhip64.so.7 "$build/hip/libamdhip64.so.6"
    run --target gfx1100 ggml /usr/libexec/x86_64-linux-gnu/llama.cpp-tests/test-backend-ops test \
        -b ROCm0 -o "${2:-SOFT_MAX,NORM,RMS_NORM,SUM_ROWS,CONCAT,ARGSORT}"
    ;;
rocblas)
    install librocblas5-tests
    run rocblas /usr/libexec/rocm/librocblas5-tests/rocblas-test --gtest_filter="${2:-*quick_trsv_small_f64_c_UCN_128_128_1*:*quick_trsv_small_f32_r_*_1:*quick_axpy*f32_r_1*:*quick_gemv_small_f32_r_N_*}"
    ;;
rocprim)
    install librocprim-tests
    run rocprim "/usr/libexec/rocm/librocprim-tests/${2:-test_warp_scan}"
    ;;
rocthrust)
    install librocthrust-tests
    run rocthrust "/usr/libexec/rocm/librocthrust-tests/${2:-test_thrust_copy}" --sizes=tiny --verbose
    ;;
*)
    echo "usage: $0 ggml|rocblas|rocprim|rocthrust [WHICH]" >&2
    exit 2
    ;;
esac
