# SPDX-License-Identifier: BSD-3-Clause
"""The activation scripts of the rocm-sdk packages restore what they changed."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.project import CHECKOUT

RECIPE = CHECKOUT / "recipes" / "rocm-sdk"


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("initial", [{}, {"ROCM_PATH": "/mine", "CMAKE_PREFIX_PATH": "/a;b c"}])
def test_activation_restores_what_it_changed(tmp_path: Path, shell: str, initial: dict) -> None:
    """After deactivation, the environment is as before activation.

    The scripts work under `set -eu`, and with a sysroot, for which they set compiler flags.
    """
    prefix = tmp_path / "a prefix"
    (prefix / "x86_64-conda-linux-gnu/sysroot").mkdir(parents=True)
    names = ["core-activate", "devel-activate", "devel-deactivate", "core-deactivate"]
    sources = []
    for number, name in enumerate(names):
        script = RECIPE / "activation" / f"{name}.sh"
        sources.append(f'. "{script}"\nenv -0 > {tmp_path}/{number}')
    start = {"PATH": os.environ["PATH"], "HOME": "/home/me", "CONDA_PREFIX": str(prefix)} | initial
    program = "set -eu\n" + "\n".join(sources)
    subprocess.run([shell, "-c", program], env=start, check=True)
    environments = [read_environment(tmp_path / str(number)) for number in range(4)]
    assert environments[0]["AMD_COMGR_CACHE_DIR"].startswith("/home/me/.cache/comgr/rocm-")
    assert environments[0]["ROCPROFILER_QUEUE_INTERPOSITION"] == "0"
    assert environments[0]["MIOPEN_FIND_MODE"] == "FAST"
    rocm = f"{prefix}/opt/rocm"
    assert environments[1]["ROCM_PATH"] == rocm and environments[1]["PATH"].startswith(
        f"{rocm}/bin:"
    )
    assert environments[1]["CMAKE_PREFIX_PATH"].endswith(initial.get("CMAKE_PREFIX_PATH", rocm))
    for name in ("HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND"):
        assert environments[1][name] == (
            f"--gcc-toolchain={prefix} --gcc-triple=x86_64-conda-linux-gnu "
            f"--sysroot={prefix}/x86_64-conda-linux-gnu/sysroot"
        )
    forbidden = {"HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "HIP_VISIBLE_DEVICES"}
    assert not forbidden & set(environments[1])
    assert environments[3] == start


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_deactivation_does_not_put_the_environment_back_into_path(shell: str) -> None:
    """conda and micromamba change PATH first, and then run the scripts of packages."""
    prefix = "/a prefix"
    program = f"""set -eu
        . "{RECIPE}/activation/devel-activate.sh"
        PATH=/added:${{PATH%"{prefix}/bin:/usr/bin:/bin"}}/usr/bin:/bin
        . "{RECIPE}/activation/devel-deactivate.sh"
        echo "$PATH"
    """
    start = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "CONDA_PREFIX": prefix}
    done = subprocess.run([shell, "-c", program], env=start, capture_output=True, text=True)
    assert done.stdout == "/added:/usr/bin:/bin\n", done.stderr


def read_environment(file: Path) -> dict[str, str]:
    """Read the output of `env -0`, without the variables that a shell sets itself."""
    lines = [line for line in file.read_text().split("\0") if line]
    variables = dict(line.split("=", 1) for line in lines)
    for name in ("PWD", "SHLVL", "_", "OLDPWD"):
        variables.pop(name, None)
    return variables


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMD_COMGR_CACHE_DIR", "/mine"),
        ("ROCPROFILER_QUEUE_INTERPOSITION", "1"),
        ("MIOPEN_FIND_MODE", "NORMAL"),
    ],
)
def test_users_own_value_stays(name: str, value: str) -> None:
    program = "set -eu\n"
    for action in ("activate", "deactivate"):
        script = RECIPE / "activation" / f"core-{action}.sh"
        program += f'. "{script}"\necho "${name}"\n'
    start = {"HOME": "/home/me", name: value}
    done = subprocess.run(["sh", "-c", program], env=start, capture_output=True, text=True)
    assert done.stdout.split() == [value, value], done.stderr


def test_another_version_of_rocm_has_its_own_comgr_cache(tmp_path: Path) -> None:
    """`pixi run` in the shell of another environment inherits the variables of that environment."""
    template = (RECIPE / "activation" / "core-activate.sh").read_text()
    program = "set -eu\n"
    for version in ("10.0.0", "10.1.0"):
        script = tmp_path / version
        script.write_text(template.replace("@VERSION@", version))
        program += f'. "{script}"\n'
    program += 'echo "$AMD_COMGR_CACHE_DIR"'
    start = {"HOME": "/home/me"}
    done = subprocess.run(["sh", "-c", program], env=start, capture_output=True, text=True)
    assert done.stdout.strip() == "/home/me/.cache/comgr/rocm-10.1.0", done.stderr


def test_a_value_of_another_project_is_not_set() -> None:
    """Activation sets no MIOPEN_DEBUG variable. docs/rocm.md explains each variable that it sets.

    Other projects set some MIOPEN_DEBUG variables to disable solvers. With these variables, MIOpen
    would have too few solvers on gfx1151, as docs/rocm.md explains. The scripts set our variables,
    and docs/rocm.md tells users why.
    """
    texts = "".join(file.read_text() for file in (RECIPE / "activation").iterdir())
    assert "MIOPEN_DEBUG" not in texts
    table = (CHECKOUT / "docs/rocm.md").read_text()
    for name in re.findall(r"^_rocm_sdk_default (\w+)", texts, flags=re.M):
        assert f"| `{name}" in table, f"docs/rocm.md must have {name}"
