# SPDX-License-Identifier: BSD-3-Clause
"""Test branches, calls, barriers and MODE by the numbers that small kernels store."""

from collections.abc import Iterator

import selftest
from strix_emulate.errors import EmulatorError
from test_checks import EXCHANGE, LOAD, STORE, execute

#: For each condition, an instruction that makes it true, and one that makes it false.
_CONDITIONS = {
    "scc0": ("s_cmp_lg_u32 s4, s4", "s_cmp_eq_u32 s4, s4"),
    "scc1": ("s_cmp_eq_u32 s4, s4", "s_cmp_lg_u32 s4, s4"),
    "vccz": ("s_mov_b32 vcc_lo, 0", "s_mov_b32 vcc_lo, 4"),
    "vccnz": ("s_mov_b32 vcc_lo, 4", "s_mov_b32 vcc_lo, 0"),
    "execz": ("s_mov_b32 exec_lo, 0", "s_mov_b32 exec_lo, 4"),
    "execnz": ("s_mov_b32 exec_lo, 4", "s_mov_b32 exec_lo, 0"),
}
_SKIP = "s_mov_b32 s8, 1\n{0}\n{1} skip\ns_mov_b32 s8, 5\nskip:\ns_mov_b32 exec_lo, -1\n"
_SCALAR = "v_mov_b32 v2, s8\n" + STORE
_DENORMAL = "v_mov_b32 v3, 3\n{}\nv_add_f32 v2, v3, v3\n" + STORE
_MODE = "{}\ns_getreg_b32 s8, hwreg(HW_REG_MODE, {}, 4)\n" + _SCALAR
#: S_GETPC sets s[8:9] to the address of the next instruction. The function begins 20 bytes after
#: this address, and S_BRANCH skips it.
_CALL = """s_getpc_b64 s[8:9]
s_add_u32 s8, s8, 20
s_addc_u32 s9, s9, 0
s_swappc_b64 s[30:31], s[8:9]
s_branch 3
s_nop 0
v_add_nc_u32 v2, 3, v0
s_setpc_b64 s[30:31]
"""


def cases() -> Iterator[tuple[str, str, list[int]]]:
    """Yield the cases.

    Each case is a tuple: the mnemonics that it tests, the code that follows LOAD in the kernel, and
    the numbers that the 64 threads must store.
    """
    for name, conditions in _CONDITIONS.items():
        for setting, expected in zip(conditions, (1, 5), strict=True):
            body = _SKIP.format(setting, f"s_cbranch_{name}") + _SCALAR
            yield f"s_cbranch_{name}", body, [expected] * 64
    yield "s_branch", _SKIP.format("", "s_branch") + _SCALAR, [1] * 64
    yield "s_endpgm", "v_mov_b32 v2, 7\n" + STORE + "v_mov_b32 v2, 9\n" + STORE, [7] * 64
    yield "s_barrier", EXCHANGE.removeprefix(LOAD), [i ^ 32 for i in range(64)]
    yield ("s_getpc_b64 s_swappc_b64 s_setpc_b64", _CALL + STORE, [i + 3 for i in range(64)])
    yield (
        "s_call_b64",
        "s_call_b64 s[30:31], function\n"
        + STORE
        + "function:\nv_add_nc_u32 v2, 9, v0\ns_setpc_b64 s[30:31]\n",
        [i + 9 for i in range(64)],
    )
    for setting, expected in (("s_denorm_mode 0", 0), ("s_denorm_mode 15", 6)):
        yield "s_denorm_mode", _DENORMAL.format(setting), [expected] * 64
    for value, expected in ((0, 0), (15, 6)):
        setting = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), {value}"
        yield "s_setreg_imm32_b32", _DENORMAL.format(setting), [expected] * 64
        yield "s_getreg_b32", _MODE.format(setting, 4), [value] * 64
    # LLVM uses these instructions to restore a mode that it has changed.
    body = "s_getreg_b32 s9, hwreg(HW_REG_MODE, 4, 4)\ns_denorm_mode 0\n"
    body += "v_add_f32 v4, v3, v3\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s9"
    yield "s_setreg_b32", _DENORMAL.format(body), [6] * 64
    yield "s_round_mode", _MODE.format("s_round_mode 0", 0), [0] * 64


def run() -> selftest.Report:
    report = selftest.Report()
    for names, body, expected in cases():
        report.compared += 1
        report.covered |= set(names.split())
        try:
            stored = execute(LOAD + body).tolist()
        except EmulatorError as error:
            report.disagreements.append(f"{names}: {error}")
            continue
        if stored != expected:
            report.disagreements.append(f"{names}: {stored[:4]} ..., expected {expected[:4]} ...")
    return report
