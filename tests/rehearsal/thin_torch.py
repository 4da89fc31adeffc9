# SPDX-License-Identifier: BSD-3-Clause
"""What makes torch cheap in a rehearsal: parts switched off, and device code for a few files alone.

Edits of the copy's recipes/pytorch, which the overlay prints. A HIP file of torch that DEVICE_CODE
does not name becomes an object with an empty code object in it and nothing that the file defines.
The link defines what is then missing, by a function that throws.
"""

Edits = list[tuple[str, str, str]]

FOLDER = "recipes/pytorch"
OPTIONS, CHECK = f"{FOLDER}/options.sh", f"{FOLDER}/check_configuration.py"
OFF = ["USE_FBGEMM", "USE_XNNPACK", "USE_NNPACK", "USE_PYTORCH_QNNPACK", "USE_MIMALLOC"]
VECTORS = [f"{lang}_{unit}_FOUND" for lang in ("C", "CXX") for unit in ("AVX", "AVX2", "AVX512")]
LAUNCH = '"$RECIPE_DIR/thin.sh;ccache"'
LINK = '\n    CMAKE_CXX_LINKER_LAUNCHER="$RECIPE_DIR/thin.sh"'
EDITS: Edits = [
    (OPTIONS, "USE_KINETO=ON", "USE_KINETO=OFF"),
    (OPTIONS, "USE_MKLDNN=ON", "USE_MKLDNN=OFF"),
    (
        OPTIONS,
        r"\n    BLAS=OpenBLAS\n",
        rf"\n    {' '.join(f'{name}=OFF' for name in OFF)} USE_PRECOMPILED_HEADERS=ON\g<0>",
    ),
    *[
        (OPTIONS, rf"(?<=\n    CMAKE_{lang}_COMPILER_LAUNCHER=)ccache\n", f"{LAUNCH}{more}\n")
        for lang, more in (("CXX", LINK), ("HIP", "\n    " + " ".join(f"{n}=OFF" for n in VECTORS)))
    ],
    # ccache refuses precompiled headers of clang without these
    (
        OPTIONS,
        r"\n# setup\.py runs ninja again",
        "\nexport CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_PCH_EXTSUM=1"
        r'\nCXXFLAGS+=" -Xclang -fno-pch-timestamp"\n\g<0>',
    ),
    *[
        (CHECK, rf'"USE_{part}": "ON"', f'"USE_{part}": "OFF"')
        for part in ("MKLDNN", "KINETO", "FBGEMM", "NNPACK")
    ],
    (CHECK, r'    if "Using Kineto with(.*\n){2}', ""),
]
# What the package tests, bitsandbytes' among them, `strix-validate backend` and `libraries`, a step
# of training and simple arithmetic call; every tensor is made in TensorFactories. The second half
# is what vLLM calls when it serves.
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
# The launcher of the compilers, for `ccache COMPILER ... -c FILE`, and of the linker.
set -euo pipefail
words=()
while (($#)); do
    # torch passes -mllvm -openmp-opt-disable to clang, and ccache takes that for -o
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
made=$(sed -n 's/.* -o \\([^ ]*\\).*/\\1/p' <<< " $*")

# An object in which the compiler registers an empty code object, and nothing else.
without_code() {
    local empty=empty.hipfb target="--offload-arch=$PYTORCH_ROCM_ARCH"
    if [[ ! -e $empty ]]; then
        "$1" -x hip "$target" --offload-device-only --gpu-bundle-output -nogpuinc -nogpulib \\
            -c /dev/null -o "$empty.$$"
        mv "$empty.$$" "$empty"
    fi
    "$1" -x hip "$target" --offload-host-only -nogpuinc -nogpulib -fPIC -O0 \\
        -D"ABSENT=absent_$(cksum <<< "$made" | cut -d ' ' -f 1)" \\
        -Xclang -fcuda-include-gpubinary -Xclang "$empty" \\
        -MD -MT "$made" -MF "$made.d" -o "$made" -c "${0%/*}/absent.hip"
}

# A C++ file that defines the names of torch that the library needs and no library has.
absent() {
    local word='[^[:space:]]*' names
    local name="_Z$word(2at|3c10|4c10d|5torch)$word"
    names=$(ldd -r "$made" 2>&1 |
        sed -nE "s/^undefined symbol: ($name).*${made##*/}.*/\\1/p" | sort -u)
    [[ $names ]] || return 0
    echo '#include <stdexcept>'
    echo '#define SAYS "left out of this rehearsal of torch"'
    echo 'extern "C" { void absent() { throw std::runtime_error(SAYS); } char no_data[4096]; }'
    sed -E 's/.*/asm(".globl &; .set &, absent");/; s/(\\.globl _ZT.*)absent"/\\1no_data"/' \\
        <<< "$names"
}

case " $* " in
    *" -emit-pch "*)
        # Not from ccache: a precompiled header names the folder of its build, and is of no use in
        # another. What uses it is known by the bytes of its headers.
        shift
        "$@"
        for made; do [[ $made == *.pch ]] && break; done
        sed 's/^[^:]*://; s/\\\\$//' "$made.d" | xargs cat | sha256sum > "$made.sum"
        ;;
    *"torch_hip.dir/"*" -x hip "*)
        grep -qxF "${name%.*}" "${0%/*}/device_code.txt" && exec "$@"
        without_code "$2"
        ;;
    *" -shared "*)
        "$@"
        case ${made##*/} in
            libtorch_hip.so | libtorch_python.so) absent > "$made.absent.cpp" ;;
            *) exit ;;
        esac
        [[ ! -s $made.absent.cpp ]] || "$@" "$made.absent.cpp"
        ;;
    *) exec "$@" ;;
esac
"""
ABSENT = """\
// What of the HIP runtime a kernel needs that is never called.
struct dim3 { unsigned x, y, z; };
typedef struct ihipStream_t *hipStream_t;
extern "C" int __hipPopCallConfiguration(dim3 *, dim3 *, unsigned long *, hipStream_t *);
extern "C" int hipLaunchKernel(const void *, dim3, dim3, void **, unsigned long, hipStream_t);
__attribute__((global)) void ABSENT() {}
"""

FILES = {"thin.sh": LAUNCHER, "absent.hip": ABSENT}
