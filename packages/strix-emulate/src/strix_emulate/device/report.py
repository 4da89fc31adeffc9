# SPDX-License-Identifier: BSD-3-Clause
"""Output of the device's checks: notes when they occur, and a summary at the end."""

import re
import sys
import threading
from collections import Counter

from strix_emulate.memory.findings import Note

#: Matches the libraries of ROCm, torch, vLLM and llama.cpp that contain kernels.
_UPSTREAM = re.compile(
    r"lib(rocblas|hipblaslt|hipsparselt|rocsolver|rocsparse|rocrand|hiprand|rocfft|rocalution|rccl"
    r"|torch_hip|MIOpen|hiptensor|rpp|composable_kernel|rocwmma|ggml-hip)[^/]*\.so[.\d]*$"
    r"|/vllm/_(C|moe_C|rocm_C)[^/]*\.so$"
)
#: Matches the mangled names of kernels from ROCm's header-only libraries, by their namespace.
_HEADERS = re.compile(r"_ZN(7rocprim|6hipcub|6thrust|2ck|7ck_tile|7rocwmma)")


def is_of_headers(kernel: str) -> bool:
    """Return whether a kernel comes from a header-only library of ROCm."""
    return _HEADERS.match(kernel) is not None


def is_upstream(path: str) -> bool:
    """Return whether a library is upstream's, so that by default its findings are only noted."""
    return _UPSTREAM.search(path) is not None


class Tally:
    """Counts launches and notes.

    Args:
        disabled_checks: Checks that are not made.
    """

    def __init__(self, disabled_checks: frozenset[str]) -> None:
        self._disabled_checks = disabled_checks
        self._launches = 0
        self._lock = threading.Lock()
        self._notes: Counter[tuple[str, str, str]] = Counter()

    def add(self, kernel: str, notes: list[Note]) -> None:
        """Count a launch, and print its notes.

        If a check has already noted something at the same place of the kernel, only count the note.
        """
        self._launches += 1
        for note in notes:
            key = (note.check, kernel, note.place)
            if key not in self._notes:
                place = f"noted in {kernel} at {note.place}"
                print(f"strix-emulate: {place}: {note.check}: {note.message}", file=sys.stderr)
            self._notes[key] += note.count

    def report(self) -> None:
        """Print the disabled checks, and the number of notes of each check.

        Print nothing without a launch, or in a second call.
        """
        with self._lock:
            launches = self._launches
            self._launches = 0
            parts = []
            if launches and self._disabled_checks:
                parts.append(f"not checked: {', '.join(sorted(self._disabled_checks))}")
            for check in sorted({key[0] for key in self._notes}):
                counts = [count for key, count in self._notes.items() if key[0] == check]
                parts.append(f"{check} noted {sum(counts)} times in {len(counts)} places")
            if launches and parts:
                print(f"strix-emulate: {launches} launches; {'; '.join(parts)}", file=sys.stderr)
