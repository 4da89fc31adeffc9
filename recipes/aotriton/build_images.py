# SPDX-License-Identifier: BSD-3-Clause
"""Compile and pack AOTriton's kernels: call upstream's code, but do not use upstream's CMake.

Upstream's CMake starts one Python process per kernel, and each process spends a third of its time
on importing Triton. CMake also clones a repository that gfx1151 does not need, and requires HIP,
although the images do not contain HIP. This program runs the same compiler (v3python/compile.py)
with the same arguments in a few long-lived processes. Kernels whose MLIR modules are equal share
one module. Except for the debug sections, which are left out, the object files are identical to
upstream's.

Finished kernels stay in Triton's cache, the folder TRITON_CACHE_DIR. After a killed build, the next
build takes them from there.
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
    # Upstream's CMake sets these two environment variables.
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_STORE_BINARY_ONLY": "1",
    # Omit debug sections, which are a third of each file. They contain the path of the build
    # folder, so the files of two builds would differ. Code, descriptors and metadata do not change.
    "TRITON_DISABLE_LINE_INFO": "1",
}
# LLVM's arenas grow with every kernel. To limit the memory, the processes are replaced after each
# has compiled, on average, this many groups of kernels.
GROUPS_PER_PROCESS = 100
PROGRESS_SECONDS = 30


class Done(NamedTuple):
    """A finished kernel or image.

    Attributes:
        cpu_seconds: The CPU time of a kernel in seconds; 0 for an image.
        cached: Whether Triton's cache already had the kernel.
    """

    cpu_seconds: float
    cached: bool


def generate(source: Path, build: Path, arch: str) -> None:
    """Run upstream's generator.

    The generator writes two files: Bare.compile, which has a rule for each kernel, and
    Bare.cluster, which has a rule for each image.

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

    Without this check, a worker process that cannot import Triton would be reported as a process
    that ran out of memory.
    """
    command = [sys.executable, "-c", "import triton"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise SystemExit(f"triton cannot be imported: {last_line}")


def choose(build: Path, patterns: list[str]) -> None:
    """Keep only some images in Bare.cluster, and only their kernels in Bare.compile.

    Args:
        build: The folder with Bare.cluster and Bare.compile.
        patterns: Regular expressions for the beginnings of the images' names FAMILY/NAME.

    Raises:
        SystemExit: A pattern matches no image.
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
        raise SystemExit(f"AOTriton has no image whose name matches {' or '.join(unmatched)}")
    kernels = set()
    for rule in images:
        kernels.update(rule.split(";")[4:])
    compilation = build / "Bare.compile"
    all_rules = compilation.read_text().splitlines()
    rules = [rule for rule in all_rules if rule.split(";")[2] in kernels]
    _write_lines(cluster, images)
    _write_lines(compilation, rules)


def _image_of(rule: str) -> str:
    """Return the image's name FAMILY/NAME in a line of Bare.cluster."""
    return "/".join(rule.split(";")[2:4])


def _write_lines(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def _run_module(source: Path, name: str, *arguments: object) -> None:
    """Run one of upstream's programs."""
    command = [sys.executable, "-X", "utf8", "-m", f"v3python.{name}", *map(str, arguments)]
    subprocess.run(command, cwd=source, check=True)


def compile_arguments(rule: str) -> list[str]:
    """Return the command line that upstream's CMake would make from a line of Bare.compile."""
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
    """Prepare a process: find upstream's modules, record Triton's cache hits, and share MLIR.

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
    """Patch Triton so that a kernel reuses the previous kernel's MLIR if only waves_per_eu differs.

    With this patch, 19,187 kernels need only 7,803 MLIR modules. A module does not depend on
    waves_per_eu, because this option becomes an attribute of the LLVM function only when the module
    is translated to LLVM IR. The translation does not change the module. So the module can be used
    again for the next kernel, for which no MLIR pass has to run.
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
        key: Values that identify everything that its MLIR depends on.
        module: Its MLIR module.
        context: The MLIR context of the module, which has to be kept alive.
        descriptors: The metadata of its tensor descriptors.
        is_complete: Whether all passes have run.
        is_shared: Whether the kernel that is being compiled uses this module.
    """

    key: object = None
    module: object = None
    context: object = None
    descriptors: object = None
    is_complete: bool = False
    is_shared: bool = False


def mlir_of(rule: str) -> list[str]:
    """Return the parts of a rule that determine the MLIR. waves_per_eu is not one of them.

    Rules with equal results have the same MLIR.
    """
    fields = rule.split(";")
    return [*fields[3:7], *fields[8:]]


def compile_kernels(rules: list[str]) -> list[Done]:
    """Compile rules with the same MLIR. If one fails, raise RuntimeError that names its output."""
    return [compile_kernel(rule) for rule in rules]


def compile_kernel(rule: str) -> Done:
    """Run upstream's compiler on a rule. If it fails, raise RuntimeError that names the output."""
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
        rules: A list of one rule, the line of Bare.cluster.
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
    """Call `work` for groups of rules in several processes, and print the progress.

    The first failure ends the program with a message. If the program continued, an image could lack
    a kernel, and nobody would notice before this kernel is called on a GPU.

    Args:
        jobs: The number of processes.
        source: AOTriton's source tree.
        name: The word for the results in messages, such as "kernels".
        work: The function to call in a process. Its arguments are a group and `arguments`.
        groups: The groups of rules.
        arguments: Further arguments of `work`.

    Yields:
        Each result once it is finished.
    """
    progress = Progress(name, sum(map(len, groups)))
    # Make a new pool for each round. max_tasks_per_child would do the same, but it hangs in CPython
    # before 3.12.3 (gh-115634).
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
                f"{name}: a process died (out of memory?). Run the build again, with fewer jobs "
                "(MAX_JOBS=N ./forge build aotriton): "
                f"finished kernels are kept in {os.environ.get('TRITON_CACHE_DIR')}"
            ) from None
        except RuntimeError as error:
            raise SystemExit(f"{name}: {error}") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Progress:
    """Prints the number of finished rules, at most every PROGRESS_SECONDS, and at the end."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.count = 0
        self.printed_at = time.monotonic()

    def add(self, count: int) -> None:
        """Add a number of rules that were just finished."""
        self.count += count
        is_due = time.monotonic() - self.printed_at > PROGRESS_SECONDS
        if is_due or self.count == self.total:
            self.printed_at = time.monotonic()
            print(f"{self.name}: {self.count} of {self.total}", flush=True)


def compile_all(source: Path, build: Path, jobs: int) -> None:
    """Compile every kernel that upstream's list Bare.compile names, and print the CPU time."""
    rules = sorted((build / "Bare.compile").read_text().splitlines(), key=mlir_of)
    groups = [list(group) for _, group in groupby(rules, mlir_of)]
    done = list(in_processes(jobs, source, "kernels", compile_kernels, groups))
    seconds = [kernel.cpu_seconds for kernel in done if not kernel.cached]
    count = len(seconds)
    mean = f", {sum(seconds) / count:.2f} CPU seconds each" if seconds else ""
    print(f"kernels: {count} compiled{mean}, {len(done) - count} from the cache")


def pack_all(source: Path, build: Path, images: Path, jobs: int) -> None:
    """Pack every image that upstream's list Bare.cluster names."""
    groups = [[rule] for rule in (build / "Bare.cluster").read_text().splitlines()]
    for _ in in_processes(jobs, source, "images", pack, groups, str(images)):
        pass


def sign(source: Path, build: Path, images: Path, arch: str, commit: str, tree: str) -> None:
    """Run upstream's program that writes the file __signature__.

    This JSON file names what the images are made from: AOTriton's commit and tree, the hashes of
    the tuning database, and Triton's version.

    Args:
        source: AOTriton's source tree.
        build: The folder of the build.
        images: The folder aotriton.images.
        arch: The architecture of the GPU.
        commit: The commit of AOTriton.
        tree: The hash of that commit's tree.
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
    json.loads(signature.read_text())  # raise an error if the file is not JSON


def main() -> None:
    """Build aotriton.images. The source has no git history, so its commit and tree are options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="AOTriton's source tree")
    parser.add_argument("images", type=Path, help="the folder aotriton.images to write")
    parser.add_argument("--build", type=Path, required=True, help="folder for intermediate files")
    parser.add_argument("--arch", default="gfx1151")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--only", nargs="*", help="patterns of FAMILY/NAME: only these images")
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
