# SPDX-License-Identifier: BSD-3-Clause
"""Compiles AOTriton's kernels and packs them, by upstream's own code, without its build graph.

Upstream's CMake starts one Python per kernel: importing Triton then costs a third of the build.
It also clones a repository that gfx1151 has no use for, and its images wait for HIP, which they
do not contain. Here the same compiler (v3python/compile.py) runs with the same arguments in a few
long-lived processes, and kernels of the same MLIR share it. The object files are byte for byte
those of upstream's path.

Finished kernels stay in Triton's own cache, TRITON_CACHE_DIR: a killed build goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

COMPILE_ENVIRONMENT = {
    # what upstream's CMake sets
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_STORE_BINARY_ONLY": "1",
    # Debug sections hold the path of the build folder: no two builds would be alike, and a third
    # of each file is theirs. Code, descriptors and metadata are the same without them.
    "TRITON_DISABLE_LINE_INFO": "1",
}
# LLVM's arenas grow with every kernel; a fresh process from time to time bounds the memory.
GROUPS_PER_PROCESS = 100
PROGRESS_SECONDS = 30


class Done(NamedTuple):
    """One finished kernel: what it cost, and whether Triton's cache already held it."""

    cpu_seconds: float
    cached: bool


def generate(source: Path, build: Path, arch: str) -> None:
    """Upstream's generator: Bare.compile (one rule a kernel), Bare.cluster (one an image)."""
    for archive in sorted((source / "v3python/database").rglob("*.sqlite3.tar.xz")):
        folder = build / "database" / archive.parent.relative_to(source / "v3python/database")
        shutil.unpack_archive(archive, folder)
    database = build / "database"
    _module(source, "database_compose", "--database_file", database / "tuning_database.sqlite3",
            "--decomposed", database)  # fmt: skip
    _module(source, "generate", "--target_gpus", f"{arch}_mod0", "--build_dir", build)


def require_triton() -> None:
    """Raises SystemExit with the reason if Triton cannot be imported, before any process needs it.

    A worker that cannot start looks like one that ran out of memory.
    """
    done = subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"triton cannot be imported: {done.stderr.strip().rpartition(chr(10))[2]}")


def choose(build: Path, patterns: list[str]) -> None:
    """Leaves of Bare.cluster the images FAMILY/NAME that begin like a pattern, and their kernels.

    Raises SystemExit for a pattern that no image begins like.
    """
    images = (build / "Bare.cluster").read_text().splitlines()
    kept = [[rule for rule in images if re.match(p, _image(rule))] for p in patterns]
    if lost := [pattern for pattern, rules in zip(patterns, kept, strict=True) if not rules]:
        raise SystemExit(f"no image of AOTriton's begins like {' or '.join(lost)}")
    images = [rule for rules in kept for rule in rules]
    kernels = {out for rule in images for out in rule.split(";")[4:]}
    rules = (build / "Bare.compile").read_text().splitlines()
    rules = [rule for rule in rules if rule.split(";")[2] in kernels]
    for name, lines in (("Bare.cluster", images), ("Bare.compile", rules)):
        (build / name).write_text("".join(f"{line}\n" for line in lines))


def _image(rule: str) -> str:
    """FAMILY/NAME of one line of Bare.cluster."""
    return "/".join(rule.split(";")[2:4])


def _module(source: Path, name: str, *arguments: object) -> None:
    command = [sys.executable, "-X", "utf8", "-m", f"v3python.{name}", *map(str, arguments)]
    subprocess.run(command, cwd=source, check=True)


def compile_arguments(rule: str) -> list[str]:
    """The command line that upstream's CMake makes of one line of Bare.compile."""
    _, _, out, path, name, warps, stages, waves, target, signature = rule.split(";")
    return [
        path, "--kernel_name", name, "-o", out, "-g", "1,1,1", "--num_warps", warps,
        "--num_stages", stages, "--waves_per_eu", waves, "--target", target,
        "--signature", signature, "--timeout", "0",
    ]  # fmt: skip


def start_worker(source: str) -> None:
    """Makes upstream's modules importable and lets Triton tell what its cache held."""
    os.environ.update(COMPILE_ENVIRONMENT)
    sys.path.insert(0, source)
    from triton import knobs

    def listener(*, cache_hit: bool, **_: object) -> None:
        global _cache_hit
        _cache_hit = cache_hit

    knobs.compilation.listener = listener
    share_mlir()


def share_mlir() -> None:
    """Lets a kernel that differs from the last one in waves_per_eu alone start from its MLIR.

    19,187 kernels have 7,803 sets of MLIR: LLVM is the first to read that value, as an attribute of
    the function that the LLVM dialect is translated into. The translation leaves the module as it
    is, so the next kernel takes it past all passes.
    """
    from triton._C.libtriton import ir
    from triton.backends.amd.compiler import HIPBackend
    from triton.compiler import ASTSource

    make_ir, make_ttgir = ASTSource.make_ir, HIPBackend.make_ttgir
    # `whole` once all passes have run; the module lives in its context
    last = SimpleNamespace(key=None, module=None, context=None, descriptors=None, whole=False)
    shared = False

    class PassManager(ir.pass_manager):
        def run(self, module: object, name: str) -> None:
            if not shared:
                super().run(module, name)
                last.whole = name == "make_llir"

    def make_ir_once(source: Any, target: object, options: Any, *rest: Any) -> object:
        nonlocal shared
        key = source.hash(), str(target), replace(options, waves_per_eu=0).hash()
        shared = last.whole and key == last.key
        if not shared:
            last.whole, last.key = False, key
            last.module, last.context = make_ir(source, target, options, *rest), rest[-1]
        return last.module

    def make_ttgir_once(module: object, metadata: dict[str, Any], options: object) -> object:
        if not shared:
            make_ttgir(module, metadata, options)
            last.descriptors = metadata["tensordesc_meta"]
        metadata["tensordesc_meta"] = last.descriptors  # cannot be asked of the LLVM dialect
        return module

    ir.pass_manager, ASTSource.make_ir = PassManager, make_ir_once
    HIPBackend.make_ttgir = staticmethod(make_ttgir_once)


def mlir_of(rule: str) -> list[str]:
    """What a rule has in common with those that share its MLIR: all but name and waves_per_eu."""
    fields = rule.split(";")
    return [*fields[3:7], *fields[8:]]


def compile_kernels(rules: list[str]) -> list[Done]:
    """Compiles rules of the same MLIR. Raises RuntimeError that names the kernel."""
    return [compile_kernel(rule) for rule in rules]


def compile_kernel(rule: str) -> Done:
    """Runs upstream's compiler on one rule. Raises RuntimeError that names the kernel."""
    from v3python import compile as compiler

    arguments = compile_arguments(rule)
    sys.argv = ["compile.py", *arguments]
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        compiler.main()
    except BaseException as error:
        raise RuntimeError(f"{arguments[4]} does not compile: {error!r}") from None
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Done(cpu, _cache_hit)


def pack(rules: list[str], images: str) -> list[Done]:
    """Packs the kernels of one line of Bare.cluster into one image file (AKS2)."""
    from v3python import aks2

    (rule,) = rules
    *folders, stem = rule.split(";", 4)[:4]
    out = Path(images, *folders, f"{stem}.aks2")
    out.parent.mkdir(parents=True, exist_ok=True)
    kernels = rule.split(";")[4:]
    aks2.do_create(argparse.Namespace(o=out, ignore_json=False, hsaco_files=kernels))
    return [Done(0.0, False)]


def in_processes(
    jobs: int,
    source: Path,
    what: str,
    work: Callable[..., list[Done]],
    groups: list[list[str]],
    *rest: str,
) -> Iterator[Done]:
    """Yields each result as it comes, with a line of progress now and then.

    `work` is done on whole groups of rules.

    Stops at the first failure and names it: an image without one of its kernels fails on the GPU
    only when that kernel is asked for.
    """
    count, total, said = 0, sum(map(len, groups)), time.monotonic()
    # rounds, because max_tasks_per_child hangs in CPython before 3.12.3 (gh-115634)
    for start in range(0, len(groups), jobs * GROUPS_PER_PROCESS):
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), start_worker, (str(source),))
        part = groups[start : start + jobs * GROUPS_PER_PROCESS]
        try:
            for future in as_completed([pool.submit(work, rules, *rest) for rules in part]):
                done = future.result()
                yield from done
                count += len(done)
                if time.monotonic() - said > PROGRESS_SECONDS or count == total:
                    said = time.monotonic()
                    print(f"{what}: {count} of {total}", flush=True)
        except BrokenProcessPool:
            raise SystemExit(
                f"{what}: a process died (out of memory?); what is finished stays in "
                f"{os.environ.get('TRITON_CACHE_DIR')}, so run the build again, with fewer jobs"
            ) from None
        except RuntimeError as error:
            raise SystemExit(f"{what}: {error}") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def compile_all(source: Path, build: Path, jobs: int) -> None:
    """Compiles every rule of Bare.compile and says what it cost."""
    rules = sorted((build / "Bare.compile").read_text().splitlines(), key=mlir_of)
    groups = [list(group) for _, group in groupby(rules, mlir_of)]
    done = list(in_processes(jobs, source, "kernels", compile_kernels, groups))
    fresh = [kernel.cpu_seconds for kernel in done if not kernel.cached]
    mean = f", {sum(fresh) / len(fresh):.2f} CPU seconds each" if fresh else ""
    print(f"kernels: {len(fresh)} compiled{mean}, {len(done) - len(fresh)} from the cache")


def pack_all(source: Path, build: Path, images: Path, jobs: int) -> None:
    """Packs every image of Bare.cluster."""
    groups = [[rule] for rule in (build / "Bare.cluster").read_text().splitlines()]
    for _ in in_processes(jobs, source, "images", pack, groups, str(images)):
        pass


def sign(source: Path, build: Path, images: Path, arch: str, commit: str, tree: str) -> None:
    """Upstream's signature beside the images: commit, tuning database and Triton version."""
    (folder,) = images.iterdir()
    _module(source, "write_image_signature", "--build_dir", build, "--git_sha1", commit,
            "--git_treesha1", tree, "--target_arch", arch,
            "--output_file", folder / "__signature__")  # fmt: skip
    json.loads((folder / "__signature__").read_text())


def main() -> None:
    """The command line: SOURCE and IMAGES folders, and what upstream would ask git."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="AOTriton's source tree")
    parser.add_argument("images", type=Path, help="becomes aotriton.images")
    parser.add_argument("--build", type=Path, required=True, help="folder for what is in between")
    parser.add_argument("--arch", default="gfx1151")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--only", nargs="*", help="images FAMILY/NAME that begin like one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    source, build = options.source.resolve(), options.build.resolve()
    images = options.images.resolve()
    require_triton()
    generate(source, build, options.arch)
    if options.only:
        choose(build, options.only)
    compile_all(source, build, options.jobs)
    pack_all(source, build, images, options.jobs)
    sign(source, build, images, options.arch, options.commit, options.tree)


if __name__ == "__main__":
    main()
