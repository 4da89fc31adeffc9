# SPDX-License-Identifier: BSD-3-Clause
"""`serve --url` on servers that are right, each in its own legal way, and on ones that are not."""

import threading
import tomllib
from importlib.resources import files
from types import SimpleNamespace

import pytest
from strix_validate import skips
from strix_validate.checks import CheckFailed, RunOptions, State
from strix_validate.reporting.record import Device
from strix_validate.serving import endpoint, judges
from strix_validate.tiers import serve
from trained_server import Server


@pytest.fixture
def judged(monkeypatch):
    """Results by name of all checks of a server, or of those that are named."""
    monkeypatch.setenv("PATH", "")  # no vllm of the machine's

    def run(names=None, **options):
        with Server(**options) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            options = RunOptions(url=f"http://127.0.0.1:{server.server_port}/v1", model="any")
            wanted = [c for c in serve.checks() if serve.applies(c, options)]
            if names:
                wanted = [c for c in wanted if c.id.removeprefix("serve/url-") in names]
            results = [
                skips.judge(r, Device(type="cpu", architecture="x86_64"))
                for r in serve.run(wanted, options)
            ]
            server.shutdown()
        return {result.check.id.removeprefix("serve/url-"): result for result in results}

    return run


@pytest.mark.parametrize("server", [{}, {"delay": 0.05}, {"fault": "noise"}], ids=str)
def test_a_right_server_passes(server, judged):
    found = judged(**server)
    assert found.pop("bench").state is State.SKIPPED
    assert {r.state for r in found.values()} == {State.PASSED}, found


@pytest.mark.parametrize(
    "style", ["comments", "lines", "returns", "windows", "tight", "mark", "chunks"]
)
def test_a_stream_in_each_legal_form_passes(style, judged):
    """By the checks that read streams."""
    names = {"stop", "streaming", "abort", *(f"load-{load}" for load in judges.LOADS)}
    found = judged(names, style=style)
    assert {name: r.state for name, r in found.items()} == dict.fromkeys(names, State.PASSED), found


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
        ("finish", {"usage"}, "expected 'length'"),
        ("usage", {"usage", "prefill", "together", "prefix"}, "usage says"),
        ("probabilities", {"probabilities"}, "sum to"),
        ("logprobs", {"prefill", "together", "prefix", "abort"}, "decoding and prefill differ"),
        ("abort", {"abort"}, "less likely"),
        ("lost", {"streaming"}, "tokens of a stream"),
        ("doubled", {"streaming"}, "text of a stream"),
        ("stream-usage", {"streaming"}, "usage of a stream"),
        ("one-part", {"streaming"}, "one part"),
        ("no-done", {"streaming", "stop"}, "without [DONE]"),
        ("broken", {"streaming", "stop"}, "broke off"),
        ("stream-error", {"streaming", "stop"}, "EngineCore died"),
        ("cut-json", {"streaming", "stop", "abort"}, "not JSON"),
        ("no-json", {"text", "prefill", "recall-8192", "streaming"}, "not JSON"),
    ],
)
def test_a_wrong_server_fails_where_it_is_wrong(fault, failing, said, judged):
    found = judged(failing, fault=fault)
    assert {name for name, r in found.items() if r.state is State.FAILED} == failing, found
    assert all(said in result.reason for result in found.values()), found


def test_after_clients_that_left_an_answer_has_a_minute(monkeypatch):
    limits = []
    server = SimpleNamespace(
        generate=lambda _prompt, _number, limit=None: limits.append(limit),
        stream_parts=lambda *_: (part for part in "ab"),
    )
    monkeypatch.setattr(judges, "judge_greedy", lambda *_, **__: None)
    judges.judge_abort(server, "prompt")
    assert limits[0] is None and limits[1] >= 60


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


class Pupil:
    """Answers as many of the questions as it is told, the others off by one."""

    def __init__(self, number):
        self.number = number

    def generate(self, prompt, number, stop):
        asked = [q["ask"] for q in QUESTIONS]
        (place,) = (i for i, ask in enumerate(asked) if f"Question: {ask}\nAnswer:" in prompt)
        said = QUESTIONS[place]["is"] + (place >= self.number)
        return endpoint.Generation([], [], [], f"It is 7 + 8. The answer is {said:,}.", "stop", {})


QUESTIONS = tomllib.loads((files("strix_validate.serving") / "questions.toml").read_text())[
    "question"
]


def test_questions_are_counted():
    assert judges.judge_questions(Pupil(41), 41) == {"right": 41, "asked": 50}
    with pytest.raises(CheckFailed, match="41 of 50 answers are right, 42 were expected"):
        judges.judge_questions(Pupil(41), 42)


def test_questions_are_asked_where_it_is_said():
    (check,) = (c for c in serve.checks() if c.id == "serve/url-questions")
    assert not serve.applies(check, RunOptions(url="http://x", model="any"))
    assert serve.applies(check, RunOptions(url="http://x", model="any", questions=30))
