# SPDX-License-Identifier: BSD-3-Clause
"""The guards for the promises of SECURITY.md: the code of each guard, and a test of this code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """A guard. test_guards.py removes each guard from a copy of the checkout.

    Attributes:
        file: The file of the guard, relative to the checkout.
        code: The text of the guard. It occurs exactly once in the file.
        replacement: The text that replaces `code` and so removes the guard.
        test: FILE::NAME of the test that must fail without the guard.
    """

    file: str
    code: str
    replacement: str
    test: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}, {self.test}"


GATE = "src/forge/channel/gate.py"
PUBLISH = "src/forge/channel/publish.py"
CACHE = "src/forge/conda/cache.py"
INDEX = "src/forge/conda/index.py"
PACKAGE = "src/forge/conda/package.py"
LOCATION = "src/forge/conda/location.py"
LOCKFILE = "src/forge/envs/lockfile.py"
LOCK = "src/forge/hostbase/lock.py"
ARCHIVES = "src/forge/sources/archives.py"
SOURCES = "src/forge/sources/cache.py"
GIT = "src/forge/sources/git.py"
PATCHING = "src/forge/sources/patching.py"
RECIPE = "src/forge/recipes/recipe.py"
NETWORK = "src/forge/network.py"
ERRORS = "src/forge/errors.py"
LIMITS = "src/forge/limits.py"
DOWNLOAD = "src/forge/sources/download.py"
WEB = "packages/strix-validate/src/strix_validate/serving/web.py"

T_PUBLISH = "tests/unit/test_publish.py"
T_SAFETY = "tests/unit/test_package_safety.py"
T_PLACES = "tests/unit/test_places.py"
T_CACHE = "tests/unit/test_package_cache.py"
T_NAMES = "tests/unit/test_names.py"
T_LOCKS = "tests/unit/test_locks.py"
T_ARCHIVES = "tests/unit/test_archives.py"
T_PATCHES = "tests/unit/test_patches.py"
T_SOURCES = "tests/unit/test_sources.py"
T_GIT = "tests/unit/test_foreign_git.py"
T_LIMITS = "tests/unit/test_limits.py"
T_REDIRECTS = "tests/unit/test_redirects.py"
T_WORKFLOWS = "tests/unit/test_workflows.py"

GUARDS = [
    # Guards against a hostile mirror, network or server.
    Guard(
        CACHE,
        "        _require_same(archive, record)\n",
        "        pass\n",
        "tests/integration/test_served.py::test_every_flipped_byte_is_found",
    ),
    Guard(
        CACHE,
        "        _require_same(source.folder / name, record)\n",
        "        pass\n",
        f"{T_CACHE}::test_a_changed_package_is_not_taken",
    ),
    Guard(
        LIMITS,
        "        if self.remaining < 0:\n",
        "        if False:\n",
        f"{T_LIMITS}::test_a_package",
    ),
    Guard(
        CACHE,
        "    if mark.read_bytes()[len(REVISION) :] != sha256:\n",
        "    if False:\n",
        f"{T_CACHE}::test_what_lies_in_the_cache_is_taken_as_it_is",
    ),
    Guard(
        LOCK,
        """    requirements.write_text("".join(f"{pin.line}\\n" for pin in pins))
    options = "--require-hashes --no-deps""",
        """    requirements.write_text("".join(f"{pin.name}=={pin.version}\\n" for pin in pins))
    options = "--no-deps""",
        "tests/unit/test_host_lock.py::test_a_tampered_wheel_is_refused",
    ),
    Guard(
        SOURCES,
        "                if sha256 != source.sha256:\n",
        "                if False:\n",
        f"{T_SOURCES}::test_nobody_states_the_sha256",
    ),
    Guard(
        NETWORK,
        "        if self.bytes < LOWEST_RATE * elapsed:\n",
        "        if False:\n",
        "tests/unit/test_slow_servers.py::test_a_file_that_comes_fast_enough_is_not_cut",
    ),
    Guard(
        INDEX,
        "        if not reason and record.file_name != name:\n",
        "        if False:\n",
        f"{T_NAMES}::test_a_lock_that_contradicts_its_url",
    ),
    Guard(
        INDEX,
        "    if not (has_sha256 and has_size):\n",
        "    if not has_size:\n",
        f"{T_NAMES}::test_the_cache_takes_no_such_record",
    ),
    Guard(
        INDEX,
        '    if part in ("", ".", ".."):\n',
        "    if False:\n",
        f"{T_NAMES}::test_a_url_that_readers_could_take_for_another",
    ),
    Guard(
        LOCATION,
        "        if not is_plain(name):\n",
        "        if False:\n",
        f"{T_NAMES}::test_nothing_outside_a_channel_is_read",
    ),
    Guard(
        LOCKFILE,
        "any(is_of(record.url, channel_url) for channel_url in channel_urls)",
        "True",
        "tests/integration/test_hostile.py::test_what_the_lock_does_not_state_is_not_installed",
    ),
    Guard(
        LOCKFILE,
        "> MAX_DEPTH:",
        "> 10**9:",
        f"{T_LOCKS}::test_a_deep_lock_is_not_parsed_for_ever",
    ),
    Guard(
        LIMITS,
        "    if len(data) > limit:\n",
        "    if False:\n",
        f"{T_LIMITS}::test_files",
    ),
    Guard(
        DOWNLOAD,
        "            if len(body) > limits.PAGE:\n",
        "            if False:\n",
        f"{T_LIMITS}::test_a_page_of_an_index",
    ),
    Guard(
        DOWNLOAD,
        "            if size > limits.SOURCE:\n",
        "            if False:\n",
        f"{T_LIMITS}::test_a_source",
    ),
    Guard(
        WEB,
        "        if redirected and origin(redirected.full_url) != origin(req.full_url):\n",
        "        if False:\n",
        f"{T_REDIRECTS}::test_another_server_gets_no_key",
    ),
    Guard(
        "tools/upstream_links.py",
        "        if next_request and is_elsewhere(next_request.full_url, req.full_url):\n",
        "        if False:\n",
        f"{T_REDIRECTS}::test_another_server_gets_no_key",
    ),
    Guard(
        ERRORS,
        "in redact(message))",
        "in str(message))",
        "tests/unit/test_credentials.py::test_sources_that_do_not_answer",
    ),
    Guard(
        "src/forge/envs/manifest.py",
        "            refuse_credentials(channel)\n",
        "            pass\n",
        "tests/unit/test_credentials.py::test_manifests",
    ),
    # Guards against a hostile recipe.
    Guard(
        RECIPE,
        '    if "url" not in source or "sha256" not in source:\n',
        '    if "url" not in source:\n',
        f"{T_SOURCES}::test_source_without_what_pins_it",
    ),
    Guard(
        RECIPE,
        """        if not re.fullmatch("[0-9a-f]{40}", commit):\n""",
        "        if False:\n",
        f"{T_SOURCES}::test_source_without_what_pins_it",
    ),
    Guard(
        SOURCES,
        "        if not FILE_NAME.fullmatch(self.file_name):\n",
        "        if False:\n",
        f"{T_NAMES}::test_a_source_that_would_lead_out_of_the_cache",
    ),
    Guard(
        PATCHING,
        "        if UNSAFE.search(path) or len(path) > LONGEST:\n",
        "        if False:\n",
        f"{T_PATCHES}::test_patch_that_leaves_the_source",
    ),
    Guard(
        PATCHING,
        "    if LINK.search(text):\n",
        "    if False:\n",
        f"{T_PATCHES}::test_patch_that_leaves_the_source",
    ),
    Guard(
        PATCHING,
        "                if not source.is_relative_to(root):\n",
        "                if False:\n",
        f"{T_PATCHES}::test_source_whose_link_leads_out",
    ),
    Guard(
        ARCHIVES,
        """            if ".." in Path(name).parts or not path.is_relative_to(self._folder):\n""",
        "            if False:\n",
        f"{T_ARCHIVES}::test_hostile_members",
    ),
    Guard(
        ARCHIVES,
        "if not (is_plain or is_link):",
        "if False:",
        f"{T_ARCHIVES}::test_hostile_members",
    ),
    Guard(
        ARCHIVES,
        "        if self._remaining < 0:\n",
        "        if False:\n",
        f"{T_ARCHIVES}::test_content_out_of_proportion",
    ),
    Guard(
        GIT,
        '                _git(view, "fsck", "--full", "--no-dangling")\n',
        "                pass\n",
        f"{T_GIT}::test_a_damaged_object_in_the_cache",
    ),
    Guard(
        GIT,
        'if not name.startswith("GIT_") or name in CERTIFICATES',
        "if True",
        f"{T_GIT}::test_the_environment",
    ),
    # Guards against a hostile package.
    Guard(
        PACKAGE,
        """            if not is_plain(name) or name.split("/")[0] == "info":\n""",
        "            if False:\n",
        f"{T_SAFETY}::test_list_that_is_not_of_the_members",
    ),
    Guard(
        PACKAGE,
        "        differing = sorted(self.payload.keys() ^ self.listed.keys())\n",
        "        differing = []\n",
        f"{T_SAFETY}::test_hostile_info",
    ),
    Guard(
        PACKAGE,
        "            if is_link != is_listed_as_link:\n",
        "            if False:\n",
        f"{T_SAFETY}::test_list_that_is_not_of_the_members",
    ),
    Guard(
        PACKAGE,
        "        require_confined([self.places])\n",
        "        pass\n",
        f"{T_SAFETY}::test_hostile_member",
    ),
    Guard(
        PACKAGE,
        "            changed = sorted(self.digests.items() - self.listed.items())\n",
        "            changed = []\n",
        f"{T_SAFETY}::test_list_that_is_not_of_the_members",
    ),
    Guard(
        PACKAGE,
        """            if posixpath.basename(name) != name or name in ("", ".", ".."):\n""",
        "            if False:\n",
        f"{T_SAFETY}::test_console_script_outside_of_bin",
    ),
    Guard(
        PACKAGE,
        "            if top in INSTALLERS:\n",
        "            if False:\n",
        f"{T_PLACES}::test_installed_by_us[record, one package]",
    ),
    Guard(
        PACKAGE,
        "                if self.select_coinstalled(landings, landing):\n",
        "                if False:\n",
        f"{T_PLACES}::test_installed_by_us[script over a file]",
    ),
    Guard(
        PACKAGE,
        "            _require_one_reading(archive)\n",
        "            pass\n",
        "tests/integration/test_header_lies.py::test_what_is_judged_is_what_is_installed",
    ),
    Guard(
        CACHE,
        "    require_confined([package.places for package in packages], python)\n",
        "",
        f"{T_PLACES}::test_installed_by_us[script absolute, two packages]",
    ),
    # Guards against packages that must not be published.
    Guard(
        GATE,
        "    require_confined(places)\n",
        "",
        f"{T_PUBLISH}::test_two_checkouts_publish_what_only_together_leads_out",
    ),
    Guard(
        GATE,
        "        places.append(package.require_safe())\n",
        "        places.append(package.places)\n",
        f"{T_PUBLISH}::test_gate",
    ),
    Guard(
        GATE, "    if build.startswith(HOST_BOUND):\n", "    if False:\n", f"{T_PUBLISH}::test_gate"
    ),
    Guard(
        GATE, "    if build.startswith(REHEARSED):\n", "    if False:\n", f"{T_PUBLISH}::test_gate"
    ),
    Guard(GATE, "    elif tests == 0:\n", "    elif False:\n", f"{T_PUBLISH}::test_gate"),
    Guard(
        GATE,
        "    if tests is None:\n",
        "    if False:\n",
        f"{T_PUBLISH}::test_gate_holds_packages_against_their_notes",
    ),
    Guard(
        GATE,
        "    if not path.is_file() or sha256_file(path) != record.sha256:\n",
        "    if False:\n",
        f"{T_PUBLISH}::test_gate_holds_packages_against_their_notes",
    ),
    Guard(
        GATE, "    if not _is_public(expression):\n", "    if False:\n", f"{T_PUBLISH}::test_gate"
    ),
    Guard(
        GATE,
        """    if libraries and "GPL-" not in expression.replace("LGPL-", ""):\n""",
        "    if False:\n",
        f"{T_PUBLISH}::test_gate",
    ),
    Guard(
        GATE,
        'LICENSES = "licenses/"\n',
        'LICENSES = ""\n',
        f"{T_PUBLISH}::test_gate",
    ),
    Guard(
        GATE,
        "    if published and sha256_file(published) != record.sha256:\n",
        "    if False:\n",
        f"{T_PUBLISH}::test_published_name_keeps_its_bytes",
    ),
    Guard(
        GATE,
        "        if name not in withdrawn:\n",
        "        if True:\n",
        f"{T_PUBLISH}::test_a_withdrawn_build_stays_out",
    ),
    Guard(
        PUBLISH,
        "        self._require_plain()\n",
        "",
        f"{T_PUBLISH}::test_what_is_no_plain_file_is_refused",
    ),
    Guard(
        PUBLISH,
        " or (page.exists() and GENERATOR.encode() not in page.read_bytes()):\n",
        ":\n",
        f"{T_PUBLISH}::test_what_is_no_plain_file_is_refused",
    ),
    Guard(
        PUBLISH,
        "        self._require_ours(may_be_new)\n",
        "",
        f"{T_PUBLISH}::test_folder_of_something_else_is_left_alone",
    ),
    Guard(
        PUBLISH,
        "            valid = all(entry.is_valid() for entry in entries)\n",
        "            valid = True\n",
        f"{T_PUBLISH}::test_a_damaged_list_of_withdrawals",
    ),
    Guard(
        PUBLISH,
        "            if sha256_file(path) != sha256:\n",
        "            if False:\n",
        f"{T_PUBLISH}::test_a_published_file_that_is_lost",
    ),
    Guard(
        PUBLISH,
        " and not find_fault(file, record):\n",
        ":\n",
        f"{T_PUBLISH}::test_an_index_that_names_what_is_outside",
    ),
    Guard(
        PUBLISH,
        "            if sha256_file(package) != sha256_file(target):\n",
        "            if False:\n",
        f"{T_PUBLISH}::test_withdrawn_packages_replace_nothing",
    ),
    Guard(
        PUBLISH,
        "[folder] if folder.is_symlink() else ",
        "",
        f"{T_PUBLISH}::test_withdrawn_packages_replace_nothing",
    ),
    Guard(
        "src/forge/cli/building.py",
        "        if channel.is_ours():\n",
        "        if True:\n",
        "tests/unit/test_leftovers.py::test_what_nobody_holds_goes",
    ),
    Guard(
        PUBLISH,
        'hold(self.folder, "publishing to"), scratch',
        "scratch",
        f"{T_PUBLISH}::test_one_publisher_at_a_time",
    ),
    Guard(
        "src/forge/channel/gate.py",
        "if validated is not None and record.sha256 not in validated:",
        "if False:",
        f"{T_PUBLISH}::test_only_validated_files_are_published",
    ),
    Guard(
        "src/forge/cli/publishing.py",
        "    if untested:\n        require_untested_name(folder)\n",
        "",
        f"{T_PUBLISH}::test_an_untested_channel_is_called_so",
    ),
    # Guards of our workflows and our machines.
    Guard(
        ".github/workflows/release.yml",
        "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1\n"
        "        with: { persist-credentials: false }\n"
        "      - uses: prefix-dev",
        "actions/checkout@v7\n"
        "        with: { persist-credentials: false }\n"
        "      - uses: prefix-dev",
        f"{T_WORKFLOWS}::test_every_action_is_a_commit_with_its_version",
    ),
    Guard(
        ".github/workflows/release.yml",
        "permissions: {}\n",
        "permissions: write-all\n",
        f"{T_WORKFLOWS}::test_no_secret_and_no_more_permission_than_named",
    ),
    Guard(
        ".github/workflows/channel.yml",
        "  workflow_dispatch:\n",
        "  workflow_dispatch:\n  pull_request:\n",
        f"{T_WORKFLOWS}::test_own_machines_run_no_pull_request",
    ),
    Guard(
        ".github/workflows/release.yml",
        "          gh release verify-asset",
        "          true",
        f"{T_WORKFLOWS}::test_what_may_write_runs_no_pixi_by_its_version_alone",
    ),
]
