# SPDX-License-Identifier: BSD-3-Clause
"""What a device has to say of checks: notes with a place, and in the end what was not checked."""

import re
import sys
import threading
from collections import Counter

from strix_emulate.memory.findings import Note

#: Libraries of ROCm, torch, vLLM and llama.cpp with kernels, which others wrote.
_UPSTREAM = re.compile(
    r"lib(rocblas|hipblaslt|hipsparselt|rocsolver|rocsparse|rocrand|hiprand|rocfft|rocalution|rccl"
    r"|torch_hip|MIOpen|hiptensor|rpp|composable_kernel|rocwmma|ggml-hip)[^/]*\.so[.\d]*$"
    r"|/vllm/_(C|moe_C|rocm_C)[^/]*\.so$"
)


#: Kernels that headers of ROCm compile into a program, by the namespace in the mangled name.
_HEADERS = re.compile(r"_ZN(7rocprim|6hipcub|6thrust|2ck|7ck_tile|7rocwmma)")


def is_of_headers(kernel: str) -> bool:
    """Return whether a kernel is one of a header-only library, which others wrote too."""
    return _HEADERS.match(kernel) is not None


def is_upstream(path: str) -> bool:
    """Return whether a library's checks only note what they find: not ours, nor the program's."""
    return _UPSTREAM.search(path) is not None


class Tally:
    """Counts launches and notes; off: the checks that are not made."""

    def __init__(self, off: frozenset[str]) -> None:
        self._off, self._launches, self._lock = off, 0, threading.Lock()
        self._notes: Counter[tuple[str, str, str]] = Counter()

    def add(self, kernel: str, notes: list[Note]) -> None:
        """Print a line for each note of a launch that has a new place."""
        self._launches += 1
        for note in notes:
            key = (note.check, kernel, note.place)
            if key not in self._notes:
                print(f"strix-emulate: noted in {kernel} at {note.place}: {note.check}: "
                      f"{note.message}", file=sys.stderr)  # fmt: skip
            self._notes[key] += note.count

    def report(self) -> None:
        """Say once, at the end, what was not checked, and how much was noted."""
        with self._lock:
            launches, self._launches = self._launches, 0
            parts = []
            if launches and self._off:
                parts.append(f"not checked: {', '.join(sorted(self._off))}")
            for check in sorted({key[0] for key in self._notes}):
                counts = [count for key, count in self._notes.items() if key[0] == check]
                parts.append(f"{check} noted {sum(counts)} times in {len(counts)} places")
            if launches and parts:
                print(f"strix-emulate: {launches} launches; {'; '.join(parts)}", file=sys.stderr)
