# SPDX-License-Identifier: BSD-3-Clause
"""Changes to the recipe of pytorch that make a rehearsal of torch cheap.

Parts of torch are switched off, and only the HIP files that DEVICE_CODE names are compiled. Each of
the other HIP files becomes an object that has an empty code object and no functions. When
libtorch_hip.so or libtorch_python.so is linked, every missing function is defined as a function
that throws an exception. The overlay prints the changes.
"""

Edits = list[tuple[str, str, str]]

FOLDER = "recipes/pytorch"
OPTIONS = f"{FOLDER}/options.sh"
CHECK = f"{FOLDER}/check_configuration.py"
# CMake options that are switched off, in addition to USE_KINETO and USE_MKLDNN.
OFF = ["USE_FBGEMM", "USE_XNNPACK", "USE_NNPACK", "USE_PYTORCH_QNNPACK", "USE_MIMALLOC"]
NO_AVX = (
    "C_AVX_FOUND=OFF C_AVX2_FOUND=OFF C_AVX512_FOUND=OFF "
    "CXX_AVX_FOUND=OFF CXX_AVX2_FOUND=OFF CXX_AVX512_FOUND=OFF"
)
COMPILER_LAUNCHER = '"$RECIPE_DIR/thin.sh;ccache"'
LINKER_LAUNCHER = 'CMAKE_CXX_LINKER_LAUNCHER="$RECIPE_DIR/thin.sh"'
# Edits of the recipe's files: the file, a pattern, and its replacement.
EDITS: Edits = [
    (OPTIONS, "USE_KINETO=ON", "USE_KINETO=OFF"),
    (OPTIONS, "USE_MKLDNN=ON", "USE_MKLDNN=OFF"),
    (
        OPTIONS,
        r"\n    BLAS=OpenBLAS\n",
        rf"\n    {' '.join(f'{name}=OFF' for name in OFF)} USE_PRECOMPILED_HEADERS=ON\g<0>",
    ),
    (
        OPTIONS,
        r"(?<=\n    CMAKE_CXX_COMPILER_LAUNCHER=)ccache\n",
        f"{COMPILER_LAUNCHER}\n    {LINKER_LAUNCHER}\n",
    ),
    (
        OPTIONS,
        r"(?<=\n    CMAKE_HIP_COMPILER_LAUNCHER=)ccache\n",
        f"{COMPILER_LAUNCHER}\n    {NO_AVX}\n",
    ),
    # Without these settings, ccache does not cache what uses clang's precompiled headers.
    (
        OPTIONS,
        r"\n# Set MAX_JOBS for build\.sh",
        "\nexport CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_PCH_EXTSUM=1"
        r'\nCXXFLAGS+=" -Xclang -fno-pch-timestamp"\n\g<0>',
    ),
    *[
        (CHECK, rf'"USE_{part}": "ON"', f'"USE_{part}": "OFF"')
        for part in ("MKLDNN", "KINETO", "FBGEMM", "NNPACK")
    ],
    (CHECK, r'    if "Using Kineto with(.*\n){2}', ""),
]
# Names of HIP files without their suffixes. Kernels of the files before the empty line are launched
# by package tests (including those of bitsandbytes), by `strix-validate backend` and
# `strix-validate libraries`, by a training step, and by simple arithmetic. TensorFactories makes
# every tensor. Kernels of the files after the empty line are launched by vLLM when it serves.
DEVICE_CODE = """
AbsKernel BLASConstants BinaryDivTrueKernel BinaryMulKernel CompareEQKernel CompareKernels
ConvolutionMM2d Copy DepthwiseConv2d DistributionNormal Dropout FillKernel ForeachBinaryOpScalar
ForeachBinaryOpScalarTensor ForeachReduceOp FusedAdamWKernel HIPScalar IndexKernel Indexing
NaiveDilatedConvolution Nonzero RecordStream ReduceLogicKernel ReduceMaxValuesKernel
ReduceMomentKernel ReduceSumProdKernel Shape SoftMax TensorCompare TensorFactories TriangularOps
UfuncCUDA_add UnaryFractionKernels UnarySignKernels attention attention_backward
fused_adamw_amsgrad_impl fused_adamw_impl mha_all_aot

ActivationGeluKernel ActivationSiluKernel ActivationSoftplusKernel BinaryBitwiseOpsKernels
BinaryDivFloorKernel BinaryDivTruncKernel BinaryLogicalOpsKernels BinaryRemainderKernel
BinaryShiftOpsKernels CumsumKernel DistributionExponentialKernel DistributionRandomKernel
DistributionUniform Distributions Embedding HIPGraph IndexKernelUtils IndexUtils LinearAlgebra
LogAddExpKernel MaxMinElementwiseKernel PointwiseOpsKernel PowKernel RangeFactories
ReduceArgMaxKernel ReduceMinValuesKernel ReduceNormKernel Repeat ScatterGatherKernel Sort SortStable
Sorting TensorTopK UnaryGeometricCosKernel UnaryGeometricSinKernel UnaryGeometricTanhKernel
UnaryLogKernels UnaryOpsKernel UnarySpecialOpsKernel cub cub-RadixSortPairs-scalars
layer_norm_kernel
"""
LAUNCHER = """\
#!/usr/bin/env bash
# Runs the compilers, as in `thin.sh ccache COMPILER ... -c FILE`, and the linker.
set -euo pipefail
words=()
while (($#)); do
    # torch passes `-mllvm -openmp-opt-disable` to clang. ccache takes the second word for -o.
    if [[ $1 == -mllvm ]]; then
        shift
        words+=("-mllvm=$1")
    else
        words+=("$1")
    fi
    shift
done
set -- "${words[@]}"
name=${!#}
name=${name##*/}
output=$(sed -n 's/.* -o \\([^ ]*\\).*/\\1/p' <<< " $*")

# Makes an object that registers an empty code object and has no other content.
make_empty_object() {
    local empty=empty.hipfb target="--offload-arch=$PYTORCH_ROCM_ARCH"
    if [[ ! -e $empty ]]; then
        "$1" -x hip "$target" --offload-device-only --gpu-bundle-output -nogpuinc -nogpulib \\
            -c /dev/null -o "$empty.$$"
        mv "$empty.$$" "$empty"
    fi
    "$1" -x hip "$target" --offload-host-only -nogpuinc -nogpulib -fPIC -O0 \\
        -D"ABSENT=absent_$(cksum <<< "$output" | cut -d ' ' -f 1)" \\
        -Xclang -fcuda-include-gpubinary -Xclang "$empty" \\
        -MD -MT "$output" -MF "$output.d" -o "$output" -c "${0%/*}/absent.hip"
}

# Prints a C++ file that defines torch's symbols that the library needs and no library has.
define_missing() {
    local word='[^[:space:]]*' names
    local name="_Z$word(2at|3c10|4c10d|5torch)$word"
    names=$(ldd -r "$output" 2>&1 |
        sed -nE "s/^undefined symbol: ($name).*${output##*/}.*/\\1/p" | sort -u)
    [[ $names ]] || return 0
    echo '#include <stdexcept>'
    echo '#define SAYS "left out of this rehearsal of torch"'
    echo 'extern "C" { void absent() { throw std::runtime_error(SAYS); } char no_data[4096]; }'
    sed -E 's/.*/asm(".globl &; .set &, absent");/; s/(\\.globl _ZT.*)absent"/\\1no_data"/' \\
        <<< "$names"
}

case " $* " in
    *" -emit-pch "*)
        # This runs without ccache: a precompiled header names the folder of its build, and cannot
        # be used in another. The checksum of its headers identifies it for the objects that use it.
        shift
        "$@"
        for output; do [[ $output == *.pch ]] && break; done
        sed 's/^[^:]*://; s/\\\\$//' "$output.d" | xargs cat | sha256sum > "$output.sum"
        ;;
    *"torch_hip.dir/"*" -x hip "*)
        grep -qxF "${name%.*}" "${0%/*}/device_code.txt" && exec "$@"
        make_empty_object "$2"
        ;;
    *" -shared "*)
        "$@"
        case ${output##*/} in
            libtorch_hip.so | libtorch_python.so) define_missing > "$output.absent.cpp" ;;
            *) exit ;;
        esac
        [[ ! -s $output.absent.cpp ]] || "$@" "$output.absent.cpp"
        ;;
    *) exec "$@" ;;
esac
"""
ABSENT = """\
// These declarations of the HIP runtime are needed to compile the kernel, which is never called.
struct dim3 { unsigned x, y, z; };
typedef struct ihipStream_t *hipStream_t;
extern "C" int __hipPopCallConfiguration(dim3 *, dim3 *, unsigned long *, hipStream_t *);
extern "C" int hipLaunchKernel(const void *, dim3, dim3, void **, unsigned long, hipStream_t);
__attribute__((global)) void ABSENT() {}
"""

FILES = {"thin.sh": LAUNCHER, "absent.hip": ABSENT}
