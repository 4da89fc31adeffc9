# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of channel.yml and release.yml: repositories on a simulated GitHub."""

from collections.abc import Iterator

import pytest
from support import hosted
from support.hosted import Hosting
from support.hub import Hub
from support.servers import served
from support.workflow_runner import SKIPPED, SUCCESS, Run


@pytest.fixture(scope="session")
def hosting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosting]:
    """Makes repositories. The machines of all repositories share a stand-in for conda-forge."""
    folder = tmp_path_factory.mktemp("hosted")
    hosted.make_conda_forge(folder / "conda-forge")
    with served(folder / "conda-forge") as conda_forge:
        yield Hosting(folder, conda_forge)


@pytest.fixture(scope="session")
def published_hub(hosting: Hosting) -> Hub:
    """A repository that has published all packages, in a run without interruptions."""
    hub = hosting.hub("whole")
    run = Run(hub, "channel.yml")
    results = run.start("push", hosted.CODE)
    assert results.pop("release") == SKIPPED, (
        "the release must be skipped if the repository has no variable CHANNEL"
    )
    assert set(results.values()) == {SUCCESS}, "\n".join(run.log)
    stages = [f"{name}-{stage}" for name in hosted.NEEDS for stage in hosted.STAGES]
    assert hosted.take_executed(hub) == stages, "each stage must run once, in this order"
    return hub
