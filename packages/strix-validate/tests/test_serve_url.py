# SPDX-License-Identifier: BSD-3-Clause
"""`serve --url` on servers that are right, each in its own legal way, and on ones that are not."""

import threading

import pytest
from strix_validate import skips
from strix_validate.checks import RunOptions, State
from strix_validate.serving import endpoint
from strix_validate.skips import Platform
from strix_validate.tiers import serve
from trained_server import Server


@pytest.fixture
def judged(monkeypatch):
    """Results by name of all checks of a server, but for how fast it is."""
    monkeypatch.setenv("PATH", "")  # no vllm of the machine's

    def run(**options):
        with Server(**options) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            options = RunOptions(url=f"http://127.0.0.1:{server.server_port}/v1", model="any")
            wanted = [c for c in serve.checks() if serve.applies(c, options)]
            results = [skips.judge(r, Platform()) for r in serve.run(wanted, options)]
            server.shutdown()
        return {result.check.id.removeprefix("serve/url-"): result for result in results}

    return run


@pytest.mark.parametrize(
    "server",
    [
        {},
        *({"style": style} for style in
          ("comments", "lines", "returns", "windows", "tight", "mark", "chunks")),
        {"delay": 0.05},
        {"fault": "noise"},
    ],
    ids=str,
)  # fmt: skip
def test_a_right_server_passes(server, judged):
    found = judged(**server)
    assert found.pop("bench").state is State.SKIPPED
    assert {r.state for r in found.values()} == {State.PASSED}, found


def test_a_short_context_is_skipped(judged):
    found = judged(context=9000)
    assert {name for name, r in found.items() if r.state is State.SKIPPED} == {
        "bench", "recall-32768",
    }  # fmt: skip
    assert not [r for r in found.values() if r.state is State.FAILED]


@pytest.mark.parametrize(
    ("fault", "failing", "said"),
    [
        ("random", {"text"}, "as random weights do"),
        ("text-beyond-256", {"text"}, "from token 256 on a known text is guessed"),
        ("garbage-31", {"prefill"}, "300 are over it"),
        ("beyond-256", {"recall-8192", "recall-32768"}, "depth"),
        ("short-window", {"recall-8192", "recall-32768"}, "attention at this length"),
        ("swapped", {"together"}, "less likely"),
        ("leak", {"prefix"}, "less likely"),
        ("limit", {"together"}, "HTTP 503"),
        ("no-stop", {"stop"}, "before the stop string"),
        ("with-stop", {"stop"}, "before the stop string"),
        ("stream-no-stop", {"stop"}, "before the stop string"),
        ("finish", {"usage"}, "right is 'length'"),
        ("usage", {"usage", "prefill", "together", "prefix"}, "usage says"),
        ("probabilities", {"probabilities"}, "sum to"),
        ("logprobs", {"prefill", "together", "prefix", "abort"}, "decoding and prefill differ"),
        ("abort", {"abort"}, "less likely"),
        ("lost", {"streaming"}, "of a stream"),
        ("doubled", {"streaming"}, "of a stream"),
        ("one-part", {"streaming"}, "one part"),
        ("no-done", {"streaming", "stop"}, "without [DONE]"),
        ("broken", {"streaming", "stop"}, "broke off"),
        ("stream-error", {"streaming", "stop"}, "EngineCore died"),
        ("cut-json", {"streaming", "stop", "abort"}, "not JSON"),
    ],
)
def test_a_wrong_server_fails_where_it_is_wrong(fault, failing, said, judged):
    found = judged(fault=fault, delay=0.05 * (fault == "limit"))
    # others may see it as well, as a count of threads has it
    assert failing <= {name for name, r in found.items() if r.state is State.FAILED}, found
    assert all(said in found[name].reason for name in failing), found


def test_an_answer_that_is_no_json_fails_everywhere(judged):
    found = judged(fault="no-json")
    assert "not JSON" in found["text"].reason


def test_events_follow_the_standard():
    lines = [
        ":ping\n",
        "event: a\n",
        "data: 1\n",
        "data:2\n",
        "\n",
        "\n",
        "datum: 3\n",
        "data\n",
        "\n",
    ]
    assert list(endpoint.events(lines)) == ["1\n2", ""]
