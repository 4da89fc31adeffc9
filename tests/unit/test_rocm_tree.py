# SPDX-License-Identifier: BSD-3-Clause
"""The rules of tree.py for files that are no libraries: AMD's build paths, MIOpen's databases."""

from pathlib import Path

import pytest
from support.recipe_checks import load

pytest.importorskip("elftools", reason="tree.py reads ELF files with pyelftools")
tree = load("rocm-sdk", "tree")

NEW = "/__w/rockrel/rockrel/build"
OLD = "/home/runner/_work/rockrel/rockrel/output/build"
SYSDEPS = "third-party/sysdeps/linux/libdrm/build/stage/lib/rocm_sysdeps/lib/pkgconfig/../.."
HERE = "${CMAKE_CURRENT_LIST_DIR}/../../.."


@pytest.mark.parametrize("build", [NEW, OLD])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "lib/cmake/rocprofiler-sdk/rocprofiler-sdk-config.cmake",
            "HINTS\n  {}/core/clr/dist/lib/cmake/hip\n  {}/dist/rocm)\n",
            f"HINTS\n  {HERE}/lib/cmake/hip\n  {HERE})\n",
        ),
        (
            "lib/cmake/hsakmt/hsakmtTargets.cmake",
            f'"-L{{}}/{SYSDEPS}/lib;$<LINK_ONLY:-ldrm>;/usr/lib64/libc.so;$<LINK_ONLY:dl>"\n',
            f'"-L{HERE}/lib/rocm_sysdeps/lib;$<LINK_ONLY:-ldrm>;$<LINK_ONLY:dl>"\n',
        ),
        (
            "lib/cmake/a/a.cmake",
            f"$<LINK_ONLY:-L{{}}/{SYSDEPS}/lib>\n",
            f"$<LINK_ONLY:-L{HERE}/lib/rocm_sysdeps/lib>\n",
        ),
        (
            "share/pkgconfig/nlohmann_json.pc",
            "prefix={}/third-party/json/stage\nb=${{prefix}}/i\n",
            "prefix=${pcfiledir}/../..\nb=${prefix}/i\n",
        ),
        (
            "lib/pkgconfig/flatbuffers.pc",
            "libdir={}/third-party/flatbuffers/stage/lib\n",
            "libdir=${pcfiledir}/../../lib\n",
        ),
        (
            "lib/cmake/b/b.cmake",
            '"https://x.org/stage/y" "${{A}}/stage/b" "/usr/share/cmake"\n',
            '"https://x.org/stage/y" "${A}/stage/b" "/usr/share/cmake"\n',
        ),
        (
            "lib/cmake/c/c.cmake",
            'D "{}/core/clr/dist/include;/usr/include/libdrm;/usr/include"\n',
            f'D "{HERE}/include"\n',
        ),
        (
            "lib/cmake/d/d.cmake",
            '# /lib -> /usr/lib.\n"/usr/include/libdrm;{}/core/clr/dist/i" /opt/rocm\n',
            f'# /lib -> /usr/lib.\n"{HERE}/i" /opt/rocm\n',
        ),
    ],
)
def test_paths_of_the_build_machine(
    tmp_path: Path, build: str, name: str, before: str, after: str
) -> None:
    """fix_paths replaces the paths of AMD's build machine, and no text that looks similar.

    Releases 7.13 to 10.0 have such paths and texts.
    """
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(before.format(build, build))
    changed = tree.fix_paths(tmp_path)
    assert file.read_text() == after
    expected = [name] if build in before.format(build, build) else []
    assert changed == expected


@pytest.mark.parametrize("name", ["lib/cmake/a/a.cmake", "lib/pkgconfig/a.pc"])
@pytest.mark.parametrize(
    "path",
    [
        f"{NEW}/include",
        "-I/home/runner/x",
        "/therock/src/y",
        "/usr/lib/x86_64-linux-gnu/libdrm.so",
        "/usr/local/include/x",
    ],
)
def test_a_path_of_another_form_is_refused(tmp_path: Path, name: str, path: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(f'set(A "{path}")\n')
    tree.fix_paths(tmp_path)
    with pytest.raises(SystemExit, match=rf"{name} names .*{path.removeprefix('-I')}"):
        tree.check_paths(tmp_path)


def test_other_texts_that_name_a_path_outside(tmp_path: Path) -> None:
    """If a script has a path outside of the prefix, the path is reported, but is not a fault."""
    for name, text in {
        "bin/scan": '#!/usr/bin/env perl\nrealpath("/usr/lib/llvm-22/bin/clang");\n',
        "bin/clean": "#!/usr/bin/env bash\n# as in /usr/lib/llvm\n",
        "share/doc/x/LICENSE": "see /usr/lib/x\n",
        "lib/data": "\0 /usr/lib/x\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = tree.check_paths(tmp_path)
    assert lines == ["bin/scan names /usr/lib/llvm-22/bin/clang, which is not in the prefix"]


def test_a_cmake_target_without_its_file(tmp_path: Path) -> None:
    """A CMake target whose file is missing is reported when the SDK is staged.

    find_package would fail in a build that uses the SDK.
    """
    (tmp_path / "lib/cmake/x").mkdir(parents=True)
    (tmp_path / "lib/libx.so.1").touch()
    append = "list(APPEND _cmake_import_check_files_for_roc::x "
    (tmp_path / "lib/cmake/x/x-targets-none.cmake").write_text(
        f'{append}"${{_IMPORT_PREFIX}}/lib/libx.so.1" )\n'
        f'{append}"${{_IMPORT_PREFIX}}/lib/libx.a" "${{_IMPORT_PREFIX}}/lib/libx.so.1" )\n'
    )
    (line,) = tree.find_unmet_targets(tmp_path)
    assert line.startswith("lib/cmake/x/x-targets-none.cmake names lib/libx.a, which is not in")


def test_miopens_databases(tmp_path: Path) -> None:
    """A tree without MIOpen's find-db for gfx1151 is reported."""
    for name in (*tree.EXPECTED, tree.CHOLMOD):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name.replace("*", "1")).touch()
    (line,) = tree.check_contents(tmp_path)
    assert line.startswith("no find-db for gfx1151")
    database = tmp_path / "share/miopen/db/gfx1151_20.HIP.fdb.txt"
    database.parent.mkdir(parents=True)
    database.touch()
    assert not tree.check_contents(tmp_path)


def test_all_may_read_the_tree(tmp_path: Path) -> None:
    """set_permissions lets everyone read the tree, and lets its owner write to each folder.

    In some archives, only the owner can read MIOpen's files. In a folder without write permission,
    no file can be removed.
    """
    database = tmp_path / "miopen/db/data"
    program = tmp_path / "miopen/program"
    database.parent.mkdir(parents=True)
    database.touch(mode=0o600)
    program.touch(mode=0o711)
    (tmp_path / "link").symlink_to("gone")
    database.parent.chmod(0o500)
    tree.set_permissions(tmp_path)
    modes = [path.stat().st_mode & 0o777 for path in (database.parent, database, program)]
    assert modes == [0o755, 0o644, 0o755]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("lib/librocprofiler-sdk-roctx.so.1", "libraries"),
        ("lib/libfftw3f.so.3", "drop"),
        ("lib/libhipfftw.so.0", "libraries"),
    ],
)
def test_names_that_begin_like_others(name: str, part: str) -> None:
    """find_part assigns a file to a part by its whole name, not by a name that begins like it.

    integration/test_rocm_sdk.py has a file of each rule.
    """
    assert tree.find_part(name, False) == part
