# SPDX-License-Identifier: BSD-3-Clause
"""With real conda-forge records, a stack installs no package that a server does not need."""

import re

import pytest
from rattler import RepoDataRecord
from support.conda_forge import STRIX_HALO, Rendered, Solver
from support.project import CHECKOUT, STACKS

from forge.envs.manifest import Manifest

# Prefixes of the names of packages for screens, printers, sound cards and other vendors' GPUs.
UNNEEDED = re.compile(
    r"(qt|pyqt|pyside|gtk|xorg-|libx11|cups|cairo|pango|fontconfig|libgl|libegl|mesa|wayland|sdl|"
    r"pulseaudio|alsa|ffmpeg|libopenvino|intel-|mkl$|cuda|nvidia-|cudnn|nccl|libnv|"
    r"libcu(blas|fft|rand|solver|sparse))"
)
# libxcb needs these packages. Each build of Pillow needs libxcb, for screenshots of an X11 screen.
TOLERATED = {"xorg-libxau", "xorg-libxdmcp"}


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return Rendered({})


@pytest.fixture(scope="module")
def solver(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Solver:
    return Solver(tmp_path_factory.mktemp("records"), rendered)


@pytest.fixture(scope="module", params=STACKS)
def contents(solver: Solver, request: pytest.FixtureRequest) -> tuple[str, list[RepoDataRecord]]:
    """The name of a stack and the packages of its default environment."""
    manifest = Manifest.load(CHECKOUT / "stacks" / request.param / "pixi.toml")
    return request.param, solver.records(manifest.environments["default"], STRIX_HALO)


def find_unneeded(records: list[RepoDataRecord]) -> set[str]:
    """Return the packages that a server does not need, and the slow reference BLAS."""
    result = set()
    for record in records:
        name = record.name.normalized
        is_reference_blas = str(record.build).endswith("netlib")
        if is_reference_blas or (UNNEEDED.match(name) and name not in TOLERATED):
            result.add(name)
    return result


def test_a_stack_has_no_ballast(contents: tuple[str, list[RepoDataRecord]]) -> None:
    _, records = contents
    assert not find_unneeded(records)
    (blas,) = [record for record in records if record.name.normalized == "libopenblas"]
    assert str(blas.build).startswith("openmp"), (
        "the build must use OpenMP: any other one hangs in a process with OpenMP"
    )


@pytest.fixture(scope="module")
def solver_313(tmp_path_factory: pytest.TempPathFactory) -> Solver:
    return Solver(tmp_path_factory.mktemp("records-3.13"), Rendered({}, "3.13"))


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_has_no_ballast_for_python_313(solver_313: Solver, stack: str) -> None:
    manifest = Manifest.load(CHECKOUT / "stacks" / stack / "pixi.toml")
    specs = [*manifest.environments["default"], "python 3.13.*"]
    assert not find_unneeded(solver_313.records(specs, STRIX_HALO))


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["matplotlib-base", "python 3.12.*"], {"cairo", "xorg-libx11"}),
        (["numpy", "python 3.12.*", "nomkl", "libblas * *netlib"], {"libblas", "liblapack"}),
        (["libopencv 4.13.* headless*", "python 3.12.*"], {"ffmpeg", "libopenvino", "sdl2"}),
        (["qt6-main"], {"qt6-main", "fontconfig"}),
        (["libcublas", "cudnn"], {"libcublas", "cudnn", "cuda-version"}),
    ],
)
def test_ballast_is_seen(solver: Solver, specs: list[str], expected: set[str]) -> None:
    assert expected <= find_unneeded(solver.records(specs))
