# SPDX-License-Identifier: BSD-3-Clause
"""With `--stop-after`, a build ends cleanly when its time is up, and the next run completes it.

The tests do not wait for the timer. A script sends the driver the signal that the timer would send.
"""

import json
import signal
from pathlib import Path

import pytest
from rattler.package_streaming import extract
from support.commands import expect_error
from support.project import MiniProject, processes_in
from support.recipe_checks import RECIPES

from forge.building import jobs
from forge.building.jobs import resume
from forge.cli.time_box import NOT_FINISHED, TimeUp, parse_duration, time_box
from forge.errors import ForgeError
from forge.files import write_text

# Lines of a script that send the timer's signal to the driver. The engine is the leader of the
# script's session, and the driver is the engine's parent.
TIME_IS_UP = """\
engine=$(cut -d ' ' -f 6 /proc/self/stat)
kill -ALRM "$(sed -n 's/^PPid:\\t//p' "/proc/$engine/status")"
"""
# Lines of a build script that behave as ninja does: a compiler runs in a process group of its own,
# and its unfinished object is removed on SIGTERM.
COMPILE = """\
set -m
trap 'rm unfinished.o; echo "removed what was unfinished" > "{note}"; exit 1' TERM
(touch unfinished.o; exec sleep infinity) &
until [[ -e unfinished.o ]]; do sleep 0.05; done
"""


def is_running(process: int) -> bool:
    """Return whether a process has not ended.

    If the machine's first process does not wait for its children, an ended process stays as a
    zombie.
    """
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5h", 18000), ("90m", 5400), ("45s", 45), ("999999h", 3599996400)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "h",
        "0h",
        "05h",
        "-5h",
        "1.5h",
        "5 h",
        "5h30m",
        "5H",
        "5d",
        "\u0665h",
        "9" * 9 + "h",
        "5h\n",
        " 5h",
        "1e3s",
        "0x5h",
        "5h 5h",
        "\U0001d7d7h",
        "nanh",
        "infinity",
    ],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ForgeError, match="is not a duration: write .* 5h, 90m or 45s"):
        parse_duration(text)


@pytest.mark.parametrize("command", [["build", "alpha"], ["build-all"]])
def test_a_wrong_duration_is_one_message(command: list[str], tmp_path: Path) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    error = expect_error(*command, "--stop-after=soon", FORGE_ROOT=str(tmp_path), FORGE_BASE="host")
    assert str(error).startswith("--stop-after 'soon' is not a duration") and error.exit_code == 2
    assert not (tmp_path / "build/staging").exists()


def test_the_alarm_is_that_of_the_block() -> None:
    """time_box() sets the timer and the handler of SIGALRM, and restores them after its block."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeUp, match="--stop-after 10h"), time_box("10h"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 35_000
        signal.raise_signal(signal.SIGALRM)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before
    with time_box("999999h"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 3e9
    with time_box(None):
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.fixture
def project(tmp_path: Path, host_base: None) -> MiniProject:
    return MiniProject(tmp_path / "project")


@pytest.mark.parametrize("command", [["build", "beta"], ["build-all"]])
def test_a_compile_ends_in_good_order(
    command: list[str], project: MiniProject, tmp_path: Path
) -> None:
    """When the time is up, a build script can remove its unfinished files.

    Built packages stay, and the next run builds the other ones.
    """
    note = tmp_path / "note"
    project.recipe("alpha")
    script = f'if [[ ! -e "{note}" ]]; then\n{COMPILE.format(note=note)}{TIME_IS_UP}wait\nfi\n'
    beta = project.recipe("beta", run=["alpha"]) / "build.sh"
    beta.write_text(script + beta.read_text())
    done = project.forge(*command, "--stop-after", "5h", code=NOT_FINISHED)
    assert "not finished: the time of --stop-after 5h is up; run the same" in done.stderr
    assert note.read_text() == "removed what was unfinished\n"
    assert processes_in(project.root) == []
    assert not list(project.root.rglob("unfinished.o"))
    assert project.to_build() == {"beta"}
    done = project.forge(*command, "--stop-after", "5h")
    assert "beta 1.0: built" in done.stdout and project.to_build() == set()
    assert list((project.root / "build/staging").iterdir()) == []


def test_a_daemon_of_a_script_ends_too(project: MiniProject, tmp_path: Path) -> None:
    """A daemon is killed although it has left the session, the folder and the engine's pipe.

    A build script may start such a daemon, for example the server of a compiler.
    """
    pid_file = tmp_path / "number"
    build = project.recipe("alpha") / "build.sh"
    daemon = f"setsid sh -c 'cd /; echo $$ > {pid_file}; exec sleep infinity' <&- >&- 2>&- &\n"
    wait = f"until [[ -s {pid_file} ]]; do sleep 0.05; done\n"
    build.write_text(daemon + wait + TIME_IS_UP + "sleep infinity\n")
    project.forge("build", "alpha", "--stop-after", "5h", code=NOT_FINISHED)
    assert not is_running(int(pid_file.read_text()))


def test_time_is_up_in_a_package_test(project: MiniProject, tmp_path: Path) -> None:
    """If the time is up during a package test, the next run only tests the package."""
    log = tmp_path / "log"
    mark = tmp_path / "ended"
    folder = project.recipe("alpha", test="bash test.sh", script=f'echo built >> "{log}"\n')
    (folder / "test.sh").write_text(
        f'[[ -e "{mark}" ]] && exit\ntouch "{mark}"\n{TIME_IS_UP}sleep infinity\n'
    )
    recipe = folder / "recipe.yaml"
    test_files = "\n    files: {recipe: [test.sh]}\nabout:"
    recipe.write_text(recipe.read_text().replace("\nabout:", test_files))
    project.forge("build", "alpha", "--stop-after", "5h", code=NOT_FINISHED)
    project.forge("build", "alpha")
    assert log.read_text() == "built\n" and project.to_build() == set()


STAGES = ["prepare", "compile", "install", "clean", "pack"]
# A build script in stages, which writes each stage that begins to a log. When the stage {slow} runs
# for the first time, the time is up.
STAGED = """\
source checks/stages.sh
stage() {{
    echo "$1" >> "{log}"
    if [[ $1 == "{slow}" && ! -e "{note}" ]]; then
        touch "{note}"
        {time_is_up}
        sleep infinity
    fi
    echo "$1" >> made
}}
prepare() {{ echo "$PREFIX" > place; stage prepare; }}
compile() {{ stage compile; }}
install() {{
    stage install
    [[ $(< place) == "$PREFIX" ]]
    mkdir -p "$PREFIX/share"
    cp made "$PREFIX/share"
}}
run_stages prepare compile
install
end_stages
stage clean
rm place made
stage pack
"""


def write_staged_recipe(project: MiniProject, slow: str, folder: Path, host: str = "[]") -> Path:
    """Write a recipe whose build script runs several stages.

    Args:
        project: The project.
        slow: The stage that does not end before the time of --stop-after is up.
        folder: The folder for the log.
        host: The host requirements.

    Returns:
        The log, to which each stage appends its name when it begins.
    """
    log = folder / "log"
    script = STAGED.format(log=log, note=folder / "note", slow=slow, time_is_up=TIME_IS_UP)
    source = f"[{{path: {RECIPES / 'checks'}, target_directory: checks}}]"
    recipe_folder = project.recipe("alpha", source=source)
    (recipe_folder / "build.sh").write_text(script)
    recipe = recipe_folder / "recipe.yaml"
    text = recipe.read_text().replace("requirements:", f"requirements:\n  host: {host}")
    recipe.write_text(text)
    return log


@pytest.mark.parametrize("slow", STAGES)
def test_each_stage_is_gone_on_with(slow: str, project: MiniProject, tmp_path: Path) -> None:
    """The next run skips the finished stages, and starts with the one in which the time was up.

    If that stage comes after `install`, the next run repeats all stages, because its new $PREFIX
    does not have the installed files.
    """
    log = write_staged_recipe(project, slow, tmp_path)
    project.forge("build", "alpha", "--stop-after", "5h", code=NOT_FINISHED)
    assert processes_in(project.root) == []
    project.forge("build", "alpha", "--stop-after", "5h")
    index = STAGES.index(slow)
    num_skipped = 0 if slow in ("clean", "pack") else index
    assert log.read_text().split() == STAGES[: index + 1] + STAGES[num_skipped:]
    (package,) = project.channel.glob("*/*.conda")
    extract(package, tmp_path / "package")
    assert (tmp_path / "package/share/made").read_text().split() == STAGES[:3]
    assert list((project.root / "build/staging").iterdir()) == []


@pytest.mark.parametrize("change", ["recipe", "environment", "killed"])
def test_what_has_changed_begins_anew(change: str, project: MiniProject, tmp_path: Path) -> None:
    """All stages are repeated if the recipe or a package of its environments has changed.

    All stages are also repeated if the first run was killed.
    """
    project.recipe("beta")
    project.forge("build", "beta")
    log = write_staged_recipe(project, "install", tmp_path, "[beta]")
    project.forge("build", "alpha", "--stop-after", "5h", code=NOT_FINISHED)
    (folder,) = (project.root / "build/staging").iterdir()
    assert (folder / "stopped.json").exists()
    if change == "recipe":
        with (project.root / "recipes/alpha/build.sh").open("a") as script:
            script.write("true\n")
    elif change == "environment":
        # This has the same effect as an update of beta after the first run.
        (environments,) = folder.glob("bld/*/work/.environments")
        environments.write_text(environments.read_text().replace("beta-1.0", "beta-0.9"))
    else:
        (folder / "stopped.json").rename(folder / "job.json")
    project.forge("build", "alpha")
    assert log.read_text().split() == STAGES[:3] + STAGES


@pytest.mark.parametrize("is_same", [True, False])
def test_what_stays_of_a_stopped_build(is_same: bool, tmp_path: Path) -> None:
    """If the job is unchanged, the packages of finished Pythons and the build's work folder stay.

    A package that was being written is removed. If the job has changed, all files are removed.
    """
    job = {"action": "build", "variant_overrides": {"content_digest": ["a"]}}
    files = {
        "stopped.json": json.dumps(job),
        "done-0": "linux-64/a-py312_0.conda",
        "linux-64/a-py312_0.conda": "whole",
        "linux-64/a-py313_0.conda": "half",
        "bld/rattler-build_a/work/.done-prepare": "",
        "bld/rattler-build_a/host_env/file": "",
        "build_cache/file": "",
    }
    for name, text in files.items():
        path = tmp_path / "output" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    resume(tmp_path / "output", job if is_same else job | {"action": "another"})
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {str(path.relative_to(tmp_path / "output")) for path in paths}
    if is_same:
        assert names == {"done-0", "linux-64/a-py312_0.conda", "stopped/.done-prepare"}
    else:
        assert names == set()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_is_stopped_before_its_script(has_begun: bool, tmp_path: Path) -> None:
    """The tree of a stopped run stays if the next run is stopped before its script begins.

    The script moves the tree. If it has begun, the tree may be incomplete, and is removed.
    """
    job = {"action": "build"}
    for name in ("job.json", "stopped/.done-prepare"):
        write_text(tmp_path / name, json.dumps(job))
    if has_begun:
        write_text(tmp_path / "bld/rattler-build_a/work/conda_build.sh", "")
    jobs._mark_stopped(tmp_path)
    resume(tmp_path, job)
    assert (tmp_path / "stopped/.done-prepare").exists() != has_begun
