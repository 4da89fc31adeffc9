# SPDX-License-Identifier: BSD-3-Clause
"""Compile AOTriton's kernels and pack them, by upstream's own code, without its build graph.

Upstream's CMake starts one Python per kernel: importing Triton then costs a third of the build.
It also clones a repository that gfx1151 has no use for, and its images wait for HIP, which they
do not contain. Here the same compiler (v3python/compile.py) runs with the same arguments in a few
long-lived processes, and kernels of the same MLIR share it. The object files are byte for byte
those of upstream's path.

Finished kernels stay in Triton's own cache, TRITON_CACHE_DIR: a killed build goes on from there.
"""

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
from dataclasses import dataclass, replace
from itertools import chain, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

COMPILE_ENVIRONMENT = {
    # what upstream's CMake sets
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_STORE_BINARY_ONLY": "1",
    # Debug sections hold the path of the build folder: no two builds would be alike. They are a
    # third of each file. Code, descriptors and metadata are the same without them.
    "TRITON_DISABLE_LINE_INFO": "1",
}
# LLVM's arenas grow with every kernel; a fresh process from time to time bounds the memory.
GROUPS_PER_PROCESS = 100
PROGRESS_SECONDS = 30


class Done(NamedTuple):
    """A finished kernel.

    Attributes:
        cpu_seconds: The CPU time that it took.
        cached: Triton's cache already had it.
    """

    cpu_seconds: float
    cached: bool


def generate(source: Path, build: Path, arch: str) -> None:
    """Run upstream's generator.

    It writes Bare.compile, with a rule for each kernel, and Bare.cluster, with one for each image.

    Args:
        source: AOTriton's source tree.
        build: The folder to write to.
        arch: The architecture of the GPU.
    """
    archives = source / "v3python/database"
    database = build / "database"
    for archive in sorted(archives.rglob("*.sqlite3.tar.xz")):
        folder = database / archive.parent.relative_to(archives)
        shutil.unpack_archive(archive, folder)
    _run_module(
        source,
        "database_compose",
        *("--database_file", database / "tuning_database.sqlite3"),
        *("--decomposed", database),
    )
    _run_module(
        source,
        "generate",
        *("--target_gpus", f"{arch}_mod0"),
        *("--build_dir", build),
    )


def require_triton() -> None:
    """Raise SystemExit with the reason if Triton cannot be imported.

    Without this check, a worker that cannot start looks like one that ran out of memory.
    """
    command = [sys.executable, "-c", "import triton"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise SystemExit(f"triton cannot be imported: {last_line}")


def choose(build: Path, patterns: list[str]) -> None:
    """Remove all but some images from Bare.cluster, and their kernels from Bare.compile.

    Args:
        build: The folder of both files.
        patterns: How the names FAMILY/NAME of the images begin.

    Raises:
        SystemExit: No image's name begins like a pattern.
    """
    cluster = build / "Bare.cluster"
    all_images = cluster.read_text().splitlines()
    images = []
    unmatched = []
    for pattern in patterns:
        matching = [rule for rule in all_images if re.match(pattern, _image_of(rule))]
        images += matching
        if not matching:
            unmatched.append(pattern)
    if unmatched:
        raise SystemExit(f"no image of AOTriton's begins like {' or '.join(unmatched)}")
    kernels = set()
    for rule in images:
        kernels.update(rule.split(";")[4:])
    compilation = build / "Bare.compile"
    all_rules = compilation.read_text().splitlines()
    rules = [rule for rule in all_rules if rule.split(";")[2] in kernels]
    _write_lines(cluster, images)
    _write_lines(compilation, rules)


def _image_of(rule: str) -> str:
    """Return FAMILY/NAME of a line of Bare.cluster."""
    return "/".join(rule.split(";")[2:4])


def _write_lines(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def _run_module(source: Path, name: str, *arguments: object) -> None:
    """Run a program of upstream's."""
    command = [sys.executable, "-X", "utf8", "-m", f"v3python.{name}", *map(str, arguments)]
    subprocess.run(command, cwd=source, check=True)


def compile_arguments(rule: str) -> list[str]:
    """Return the command line that upstream's CMake makes of a line of Bare.compile."""
    _, _, out, path, name, warps, stages, waves, target, signature = rule.split(";")
    options = {
        "--kernel_name": name,
        "-o": out,
        "-g": "1,1,1",
        "--num_warps": warps,
        "--num_stages": stages,
        "--waves_per_eu": waves,
        "--target": target,
        "--signature": signature,
        "--timeout": "0",
    }
    return [path, *chain.from_iterable(options.items())]


def start_worker(source: str) -> None:
    """Prepare a process: upstream's modules, Triton's cache hits, and shared MLIR.

    Args:
        source: AOTriton's source tree.
    """
    os.environ.update(COMPILE_ENVIRONMENT)
    sys.path.insert(0, source)
    from triton import knobs

    def listener(*, cache_hit: bool, **_: object) -> None:
        global _cache_hit
        _cache_hit = cache_hit

    knobs.compilation.listener = listener
    share_mlir()


def share_mlir() -> None:
    """Let a kernel that differs from the last one in waves_per_eu alone start from its MLIR.

    19,187 kernels have 7,803 sets of MLIR: LLVM is the first to read that value, as an attribute of
    the function that the LLVM dialect is translated into. The translation leaves the module as it
    is, so the next kernel takes it, and all passes are left out.
    """
    from triton._C.libtriton import ir
    from triton.backends.amd.compiler import HIPBackend
    from triton.compiler import ASTSource

    make_ir = ASTSource.make_ir
    make_ttgir = HIPBackend.make_ttgir
    last = LastKernel()

    class PassManager(ir.pass_manager):
        def run(self, module: object, name: str) -> None:
            if not last.is_shared:
                super().run(module, name)
                last.is_complete = name == "make_llir"

    def make_ir_once(source: Any, target: object, options: Any, *rest: Any) -> object:
        key = (source.hash(), str(target), replace(options, waves_per_eu=0).hash())
        last.is_shared = last.is_complete and key == last.key
        if not last.is_shared:
            last.is_complete = False
            last.key = key
            last.module = make_ir(source, target, options, *rest)
            last.context = rest[-1]
        return last.module

    def make_ttgir_once(module: object, metadata: dict[str, Any], options: object) -> object:
        if not last.is_shared:
            make_ttgir(module, metadata, options)
            last.descriptors = metadata["tensordesc_meta"]
        # A shared module is already in the LLVM dialect, which has no tensor descriptors.
        metadata["tensordesc_meta"] = last.descriptors
        return module

    ir.pass_manager = PassManager
    ASTSource.make_ir = make_ir_once
    HIPBackend.make_ttgir = staticmethod(make_ttgir_once)


@dataclass
class LastKernel:
    """The kernel that was compiled last.

    Attributes:
        key: A digest of all that its MLIR depends on.
        module: Its MLIR.
        context: What the module lives in.
        descriptors: The metadata of its tensor descriptors.
        is_complete: All passes have run.
        is_shared: The kernel that is being compiled takes its MLIR.
    """

    key: object = None
    module: object = None
    context: object = None
    descriptors: object = None
    is_complete: bool = False
    is_shared: bool = False


def mlir_of(rule: str) -> list[str]:
    """Return what rules with the same MLIR have in common: all but name and waves_per_eu."""
    fields = rule.split(";")
    return [*fields[3:7], *fields[8:]]


def compile_kernels(rules: list[str]) -> list[Done]:
    """Compile rules of the same MLIR. Raises RuntimeError that names the kernel."""
    return [compile_kernel(rule) for rule in rules]


def compile_kernel(rule: str) -> Done:
    """Run upstream's compiler on one rule. Raises RuntimeError that names the kernel."""
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
    """Pack the kernels of a line of Bare.cluster into an image file (AKS2).

    Args:
        rules: The line, alone.
        images: The folder aotriton.images.
    """
    from v3python import aks2

    (rule,) = rules
    first, second, third, stem, *kernels = rule.split(";")
    out = Path(images, first, second, third, f"{stem}.aks2")
    out.parent.mkdir(parents=True, exist_ok=True)
    aks2.do_create(argparse.Namespace(o=out, ignore_json=False, hsaco_files=kernels))
    return [Done(0.0, False)]


def in_processes(
    jobs: int,
    source: Path,
    name: str,
    work: Callable[..., list[Done]],
    groups: list[list[str]],
    *arguments: str,
) -> Iterator[Done]:
    """Work on groups of rules in several processes, with a line of progress now and then.

    Stops at the first failure and names it: an image without one of its kernels fails on the GPU
    only when that kernel is called.

    Args:
        jobs: The number of processes.
        source: AOTriton's source tree.
        name: What the rules make, for messages.
        work: Takes a group and `arguments`.
        groups: Groups of rules.
        arguments: Further arguments of `work`.

    Yields:
        Each result as it comes.
    """
    progress = Progress(name, sum(map(len, groups)))
    # In rounds, because max_tasks_per_child hangs in CPython before 3.12.3 (gh-115634).
    groups_per_round = jobs * GROUPS_PER_PROCESS
    for start in range(0, len(groups), groups_per_round):
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), start_worker, (str(source),))
        try:
            futures = []
            for rules in groups[start : start + groups_per_round]:
                futures.append(pool.submit(work, rules, *arguments))
            for future in as_completed(futures):
                results = future.result()
                yield from results
                progress.add(len(results))
        except BrokenProcessPool:
            raise SystemExit(
                f"{name}: a process died (out of memory?); what is finished stays in "
                f"{os.environ.get('TRITON_CACHE_DIR')}, so run the build again, with fewer jobs"
            ) from None
        except RuntimeError as error:
            raise SystemExit(f"{name}: {error}") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Prints how much is done, every PROGRESS_SECONDS and at the end."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.count = 0
        self.printed_at = time.monotonic()

    def add(self, count: int) -> None:
        """Add what was just finished."""
        self.count += count
        is_due = time.monotonic() - self.printed_at > PROGRESS_SECONDS
        if is_due or self.count == self.total:
            self.printed_at = time.monotonic()
            print(f"{self.name}: {self.count} of {self.total}", flush=True)


def compile_all(source: Path, build: Path, jobs: int) -> None:
    """Compile every rule of Bare.compile and print the cost."""
    rules = sorted((build / "Bare.compile").read_text().splitlines(), key=mlir_of)
    groups = [list(group) for _, group in groupby(rules, mlir_of)]
    done = list(in_processes(jobs, source, "kernels", compile_kernels, groups))
    seconds = [kernel.cpu_seconds for kernel in done if not kernel.cached]
    count = len(seconds)
    mean = f", {sum(seconds) / count:.2f} CPU seconds each" if seconds else ""
    print(f"kernels: {count} compiled{mean}, {len(done) - count} from the cache")


def pack_all(source: Path, build: Path, images: Path, jobs: int) -> None:
    """Pack every image of Bare.cluster."""
    groups = [[rule] for rule in (build / "Bare.cluster").read_text().splitlines()]
    for _ in in_processes(jobs, source, "images", pack, groups, str(images)):
        pass


def sign(source: Path, build: Path, images: Path, arch: str, commit: str, tree: str) -> None:
    """Write upstream's signature beside the images: commit, tuning database, Triton's version.

    Args:
        source: AOTriton's source tree.
        build: The folder of the build.
        images: The folder aotriton.images.
        arch: The architecture of the GPU.
        commit: The commit of AOTriton.
        tree: The tree of that commit.
    """
    (folder,) = images.iterdir()
    signature = folder / "__signature__"
    _run_module(
        source,
        "write_image_signature",
        *("--build_dir", build),
        *("--git_sha1", commit),
        *("--git_treesha1", tree),
        *("--target_arch", arch),
        *("--output_file", signature),
    )
    json.loads(signature.read_text())  # raises if it is not JSON


def main() -> None:
    """Build aotriton.images. Commit and tree take the place of what upstream asks git for."""
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
