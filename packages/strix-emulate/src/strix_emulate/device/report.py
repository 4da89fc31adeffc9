# SPDX-License-Identifier: BSD-3-Clause
"""What the device prints about its checks: notes with a place, and a summary at the end."""

import re
import sys
import threading
from collections import Counter

from strix_emulate.memory.findings import Note

#: Libraries of ROCm, torch, vLLM and llama.cpp that have kernels.
_UPSTREAM = re.compile(
    r"lib(rocblas|hipblaslt|hipsparselt|rocsolver|rocsparse|rocrand|hiprand|rocfft|rocalution|rccl"
    r"|torch_hip|MIOpen|hiptensor|rpp|composable_kernel|rocwmma|ggml-hip)[^/]*\.so[.\d]*$"
    r"|/vllm/_(C|moe_C|rocm_C)[^/]*\.so$"
)
#: Kernels that headers of ROCm compile into a program, by the namespace in the mangled name.
_HEADERS = re.compile(r"_ZN(7rocprim|6hipcub|6thrust|2ck|7ck_tile|7rocwmma)")


def is_of_headers(kernel: str) -> bool:
    """Return whether a kernel comes from a header-only library of ROCm."""
    return _HEADERS.match(kernel) is not None


def is_upstream(path: str) -> bool:
    """Return whether a library is neither ours nor the program's, so that findings are notes."""
    return _UPSTREAM.search(path) is not None


class Tally:
    """Counts launches and notes."""

    def __init__(self, off: frozenset[str]) -> None:
        """Take the checks that are not made."""
        self._off = off
        self._launches = 0
        self._lock = threading.Lock()
        self._notes: Counter[tuple[str, str, str]] = Counter()

    def add(self, kernel: str, notes: list[Note]) -> None:
        """Count a launch, and print its notes that have a new place."""
        self._launches += 1
        for note in notes:
            key = (note.check, kernel, note.place)
            if key not in self._notes:
                place = f"noted in {kernel} at {note.place}"
                print(f"strix-emulate: {place}: {note.check}: {note.message}", file=sys.stderr)
            self._notes[key] += note.count

    def report(self) -> None:
        """Print once, at the end, what was not checked and how much was noted."""
        with self._lock:
            launches = self._launches
            self._launches = 0
            parts = []
            if launches and self._off:
                parts.append(f"not checked: {', '.join(sorted(self._off))}")
            for check in sorted({key[0] for key in self._notes}):
                counts = [count for key, count in self._notes.items() if key[0] == check]
                parts.append(f"{check} noted {sum(counts)} times in {len(counts)} places")
            if launches and parts:
                print(f"strix-emulate: {launches} launches; {'; '.join(parts)}", file=sys.stderr)
