# SPDX-License-Identifier: BSD-3-Clause
"""What makes torch cheap in a rehearsal: parts switched off, and device code for a few files alone.

Edits of the copy's recipes/pytorch, which the overlay prints. A HIP file that DEVICE_CODE does not
name is compiled for the host and gets an empty code object: all that it defines is there, and a
call of one of its kernels fails.
"""

from __future__ import annotations

from pathlib import Path

Edits = list[tuple[str, str, str]]

FOLDER = "recipes/pytorch"
OPTIONS, CHECK = f"{FOLDER}/options.sh", f"{FOLDER}/check_configuration.py"
OFF = ["USE_FBGEMM", "USE_XNNPACK", "USE_NNPACK", "USE_PYTORCH_QNNPACK", "USE_MIMALLOC"]
VECTORS = [f"{lang}_{unit}_FOUND" for lang in ("C", "CXX") for unit in ("AVX", "AVX2", "AVX512")]
LAUNCH = '"$RECIPE_DIR/thin.sh;ccache"'
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
        for lang, more in (("CXX", ""), ("HIP", "\n    " + " ".join(f"{n}=OFF" for n in VECTORS)))
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
# What the package tests and simple arithmetic call.
DEVICE_CODE = """
AbsKernel BinaryDivTrueKernel BinaryMulKernel CompareEQKernel Copy DistributionNormal FillKernel
HIPScalar IndexKernel ReduceMaxValuesKernel ReduceSumProdKernel Shape UfuncCUDA_add attention
attention_backward mha_all_aot
"""
LAUNCHER = """\
#!/usr/bin/env bash
# The launcher of the compilers, for `ccache COMPILER ... -c FILE`.
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
case " $* " in
    *" -emit-pch "*)
        # Not from ccache: a precompiled header names the folder of its build, and is of no use in
        # another. What uses it is known by the bytes of its headers.
        shift
        "$@"
        for made; do [[ $made == *.pch ]] && break; done
        sed 's/^[^:]*://; s/\\\\$//' "$made.d" | xargs cat | sha256sum > "$made.sum"
        exit ;;
    *" -x hip "*) ;;
    *) exec "$@" ;;
esac
if grep -qxF "${name%.*}" "${0%/*}/device_code.txt"; then
    exec "$@"
fi
empty=empty.hipfb
if [[ ! -e $empty ]]; then
    "$2" -x hip --offload-arch="$PYTORCH_ROCM_ARCH" --offload-device-only --gpu-bundle-output \\
        -nogpuinc -nogpulib -c /dev/null -o "$empty.$$"
    mv "$empty.$$" "$empty"
fi
exec "$@" --offload-host-only -O0 -Xclang -fcuda-include-gpubinary -Xclang "$empty"
"""


def write(root: Path) -> str:
    """Writes the launcher and its list to a copy of the checkout; returns what to say of them."""
    launcher, names = root / FOLDER / "thin.sh", root / FOLDER / "device_code.txt"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    listed = DEVICE_CODE.split()
    names.write_text("".join(f"{name}\n" for name in listed))
    return f"overlay/{FOLDER}: device code for {len(listed)} HIP files alone ({names.name})\n"
