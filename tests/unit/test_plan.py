# SPDX-License-Identifier: BSD-3-Clause
"""A plan: rendering and ordering recipes, refusing wrong ones, and finding what has to be built."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.project import MiniProject

from forge import bases
from forge.bases import BaseName
from forge.building.runner import Result, format_table, predict_skipped
from forge.cli.context import Context
from forge.conda.local import LocalChannel, Record
from forge.errors import ForgeError
from forge.project import Project
from forge.recipes.plan import BUILD, UP_TO_DATE, RecipeSet, Step
from forge.recipes.render import build_recipes, cli_api, render


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    return MiniProject(tmp_path)


class Recorded(LocalChannel):
    """A mock of a channel with the outputs of `steps`, and one other package.

    Attributes:
        steps: The steps whose outputs are in the channel.
    """

    steps: Sequence[Step] = ()

    def records(self) -> list[Record]:
        result = []
        for step in self.steps:
            for output in step.outputs:
                result.append(Record(*vars(output).values(), "", 0))
        result.append(Record("zeta", "9", "h1234567_7", "noarch", "", 0))
        return result

    def read_digest(self, record: Record) -> dict[str, str] | None:
        for step in self.steps:
            if record.name in step.recipe.output_names:
                return step.digest
        raise AssertionError(f"no step yields {record.name}")


def load_recipes(mini: MiniProject) -> RecipeSet:
    """Return the recipes of a project, rendered with the conda-forge base."""
    project = Project.at(mini.root)
    return RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda text: text + "\n  - [", "Failed to parse YAML"),
        (lambda text: text.replace("build:", "bild:"), "field 'bild'"),
        (lambda text: text.replace("content_digest", "other"), "add content_digest"),
        (lambda text: text.replace("a test package", '"${{ nowhere_set }}"'), "nowhere_set"),
        (
            lambda text: text.replace("source: []", "source: [{path: ., patches: [no.patch]}]"),
            "no.patch, which does not exist",
        ),
        (lambda text: text.replace("source: []", "source: [{path: ./no}]"), "/no, which does not"),
        (
            lambda text: text.replace("source: []", "source: [{path: %s}]" % ("a" * 5000)),
            "a patch or path: [Errno 36] File name too long",
        ),
    ],
)
def test_malformed_recipe(mini: MiniProject, broken: Callable[[str], str], message: str) -> None:
    recipe = mini.recipe("alpha") / "recipe.yaml"
    recipe.write_text(broken(recipe.read_text()))
    with pytest.raises(ForgeError) as error:
        load_recipes(mini)
    assert message in str(error.value)
    assert str(recipe) in str(error.value)


def test_environment_does_not_enter_the_hash(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build string does not depend on a variable that a recipe reads with `env.get`.

    PYPI_SOURCES is the address of the files of PyPI, for which a machine may set a mirror.
    """
    source = '[{url: "${{ env.get(\'PYPI_SOURCES\') }}/a.tar.gz", sha256: "%s"}]' % ("0" * 64)
    mini.recipe("alpha", source=source)
    builds = set()
    for folder in ("file:///one", "file:///two"):
        monkeypatch.setenv("PYPI_SOURCES", folder)
        path = mini.root / "recipes/alpha/recipe.yaml"
        (output,) = render(path, load_recipes(mini).base, "x")
        assert output["recipe"]["source"][0]["url"] == f"{folder}/a.tar.gz"
        builds.add(output["recipe"]["build"]["string"])
    assert len(builds) == 1


def test_a_first_build_has_the_recipes_number(mini: MiniProject, tmp_path: Path) -> None:
    mini.recipe("alpha")
    (step,) = load_recipes(mini).plan(LocalChannel(tmp_path / "empty"))
    assert [output.number for output in step.outputs] == [0]
    assert step.reason == "not in the channel"


def test_what_is_in_the_channel_is_up_to_date(mini: MiniProject) -> None:
    """A recipe is out of date if its content, a variant value or the build of a dependency changed.

    Other packages in the channel do not matter.
    """
    mini.recipe("alpha")
    mini.recipe("beta", run=["alpha"])
    recipes = load_recipes(mini)
    channel = Recorded(mini.channel)
    channel.steps = recipes.plan(channel)
    alpha, beta = channel.steps
    assert beta.digest.keys() - alpha.digest.keys() == {f"needs {alpha.outputs[0].dist}"}
    assert [step.action for step in recipes.plan(channel)] == [UP_TO_DATE, UP_TO_DATE]
    (mini.root / "recipes/alpha/more").touch()
    new_steps = load_recipes(mini).plan(channel)
    assert [step.reason for step in new_steps] == [
        "recipe, script, patch or local source changed",
        "other alpha",
    ]
    assert [step.outputs[0].number for step in new_steps] == [1, 1]
    for digest, reason in (
        (new_steps[1].digest, "variant values changed"),
        (None, "changed since the build in the channel"),
    ):
        digests = {"alpha": alpha.digest, "beta": digest}
        channel.read_digest = lambda record, digests=digests: digests[record.name]
        assert load_recipes(mini).plan(channel)[1].reason == reason


def test_a_project_without_recipes(mini: MiniProject) -> None:
    with pytest.raises(ForgeError, match="/recipes holds no recipe"):
        load_recipes(mini)


def test_circle(mini: MiniProject) -> None:
    mini.recipe("alpha", run=["beta"])
    mini.recipe("beta", run=["alpha"])
    with pytest.raises(ForgeError, match="circle"):
        load_recipes(mini)


def test_order_and_dependents(mini: MiniProject) -> None:
    mini.recipe("alpha")
    mini.recipe("beta", run=["alpha"])
    mini.recipe("gamma", run=["beta"])
    recipes = load_recipes(mini)
    assert list(recipes.recipes) == ["alpha", "beta", "gamma"]
    assert recipes.direct_needs("gamma") == {"beta"}
    assert recipes.dependencies({"beta"}) == {"alpha", "beta"}
    assert recipes.dependents({"beta"}) == {"beta", "gamma"}


def test_the_order_is_the_same_in_every_run(mini: MiniProject) -> None:
    # The order of a set differs between processes. The order of recipes must not depend on it.
    needed = list("bcdefghi")
    mini.recipe("alpha", run=needed)
    for name in needed:
        mini.recipe(name)
    assert list(load_recipes(mini).recipes) == [*needed, "alpha"]


def test_what_will_be_skipped(mini: MiniProject) -> None:
    """A recipe that needs a package that nobody provides is skipped, and so are its dependents."""
    mini.recipe("alpha", run=["nowhere", "__glibc"])
    mini.recipe("beta", run=["alpha"])
    mini.recipe("gamma", run=["python"])
    project = Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"), {"python"}, "key")
    steps = recipes.plan(LocalChannel(mini.channel))
    assert {step.action for step in steps} == {BUILD}
    assert predict_skipped(recipes, steps) == {
        "alpha": "the conda-forge base has no nowhere",
        "beta": "needs alpha",
    }


def test_two_recipes_of_one_package(mini: MiniProject) -> None:
    mini.recipe("alpha")
    recipe = mini.recipe("beta") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: beta", "name: alpha"))
    with pytest.raises(ForgeError, match="recipes/alpha and recipes/beta both yield alpha"):
        load_recipes(mini)


def test_an_engine_that_panics_is_one_message(
    mini: MiniProject, capfd: pytest.CaptureFixture[str]
) -> None:
    """A panic of rattler-build is one error.

    rattler-build 0.73 panics on a name that is too long for a path.
    """
    recipe = mini.recipe("alpha") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: alpha", f"name: {'a' * 70_000}"))
    with pytest.raises(ForgeError, match="does not render") as error:
        load_recipes(mini)
    assert len(str(error.value)) < 2_000
    assert capfd.readouterr() == ("", "")


UNRESOLVED = "Failed to resolve dependencies"


@pytest.mark.parametrize(
    ("errors", "calls"),
    [([], 1), ([UNRESOLVED], 2), ([UNRESOLVED] * 2, 2), (["Script failed"], 1)],
)
def test_a_cold_cache_fails_a_build_once(
    errors: list[str], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build whose dependencies cannot be resolved is attempted once more.

    Two builds that unpack the same package into an empty cache at the same time may fail in this
    way. In 5 of 13 trials a build failed, and no second attempt failed. If a second attempt fails,
    its failure is reported, and so is the failure of a script.
    """
    remaining = list(errors)
    received: list[object] = []

    def build(recipes: list[str], **arguments: object) -> None:
        received.append((recipes, arguments))
        if remaining:
            raise RuntimeError(remaining.pop(0))

    monkeypatch.setattr(cli_api, "build_recipes", build)
    if len(errors) == calls:
        with pytest.raises(RuntimeError, match=errors[-1]):
            build_recipes(["alpha"], test="skip")
    else:
        build_recipes(["alpha"], test="skip")
    assert received == [(["alpha"], {"test": "skip"})] * calls


BAD = {
    "yaml": lambda path: path.write_text("["),
    "encoding": lambda path: path.write_bytes(b"\xff\xfe"),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "file name": lambda path: (path.with_name("x\udcff").write_text("x"), path.write_text("[")),
}


@pytest.mark.parametrize("case", BAD)
def test_one_bad_recipe_among_others(mini: MiniProject, case: str) -> None:
    mini.recipe("alpha")
    mini.recipe("beta", run=["alpha"])
    mini.recipe("gamma")
    BAD[case](mini.root / "recipes" / "alpha" / "recipe.yaml")
    with pytest.raises(ForgeError, match=r"recipes/alpha/recipe\.yaml"):
        load_recipes(mini)
    project = Project.at(mini.root)
    recipes = RecipeSet(project, bases.load(project, "conda-forge"), keep_going=True)
    assert set(recipes.recipes) == {"beta", "gamma"}
    assert "recipe.yaml" in recipes.broken["alpha"]
    assert recipes.direct_needs("beta") == {"alpha"}
    assert len(recipes.plan(LocalChannel(mini.channel))) == 2


@pytest.mark.parametrize(
    "edited", ["recipes/bases/host/activate-c.sh", "recipes/bases/host/requirements.in"]
)
def test_an_edit_of_the_base_is_a_decision(mini: MiniProject, edited: str) -> None:
    """An edit of the host base is a reason to build only the recipes that use the base.

    The plan depends on the inputs of the base, so it is the same before and after the base is made.
    """
    mini.recipe("alpha", run=["python"])
    mini.recipe("beta")
    (mini.root / "build" / "host-base").unlink()

    def read_reasons() -> dict[str, str]:
        steps = Context(base_name=BaseName.HOST, root=mini.root).recipes.plan(channel)
        return {step.recipe.name: step.reason for step in steps}

    channel = Recorded(mini.channel)
    assert read_reasons() == dict.fromkeys(("alpha", "beta"), "not in the channel")
    channel.steps = Context(base_name=BaseName.HOST, root=mini.root).recipes.plan(channel)
    assert read_reasons() == dict.fromkeys(("alpha", "beta"), "up to date")
    with (mini.root / edited).open("a") as stream:
        stream.write("# edited\n")
    assert read_reasons() == {"alpha": "the host base changed", "beta": "up to date"}


def test_what_extra_states_is_no_reason_to_build(mini: MiniProject) -> None:
    """A change of `extra` in a recipe is no reason to build.

    If it were a reason, PyTorch would be compiled for a night after each new evidence record.
    """
    recipe = mini.recipe("alpha") / "recipe.yaml"
    channel = Recorded(mini.channel)
    channel.steps = load_recipes(mini).plan(channel)
    text = recipe.read_text()
    for extra, action in (
        ("extra:\n  state: {ran: emulated}\n# and why\n\n  notes: |\n    a\n", UP_TO_DATE),
        ('extra: {"a": 1}', UP_TO_DATE),
        ("extra: {}\n# a comment behind it\n", UP_TO_DATE),
        ("extra: {}\ncontext: {x: 1}\n", BUILD),
        ("# extra: {}\n", BUILD),
    ):
        recipe.write_text(text + extra)
        (step,) = load_recipes(mini).plan(channel)
        assert step.action == action, extra


def test_a_variant_value_rebuilds_its_users_only(mini: MiniProject) -> None:
    recipe = mini.recipe("uses") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("a test package", "for torch ${{ colour }}"))
    mini.recipe("other")
    variants = mini.root / "variants.yaml"
    channel = Recorded(mini.channel)
    variants.write_text(variants.read_text() + 'colour:\n  - "red"\n')
    channel.steps = load_recipes(mini).plan(channel)
    for old, new, changed in (('"0.1.19"', '"0.1.20"', set()), ("red", "blue", {"uses"})):
        text = variants.read_text()
        assert old in text
        variants.write_text(text.replace(old, new))
        steps = load_recipes(mini).plan(channel)
        assert {step.recipe.name for step in steps if step.action == BUILD} == changed


def test_an_explicit_build_string_carries_the_tag(mini: MiniProject) -> None:
    recipe = mini.recipe("alpha") / "recipe.yaml"
    project = Project.at(mini.root)
    text = recipe.read_text()
    string = 'number: 0\n  string: "${{ base_tag }}rocm_h${{ hash }}_0"'
    recipe.write_text(text.replace("number: 0", string))
    for base, prefix in (("host", "hostbound_rocm_h"), ("conda-forge", "rocm_h")):
        recipes = RecipeSet(project, bases.load(project, base))
        (step,) = recipes.plan(LocalChannel(mini.channel))
        assert step.outputs[0].build.startswith(prefix)
    recipe.write_text(text.replace("number: 0", string.replace("${{ base_tag }}", "")))
    with pytest.raises(ForgeError, match="base_tag"):
        RecipeSet(project, bases.load(project, "host"))


@pytest.mark.parametrize("note", [[], "", 1, {}, {"content": []}])
def test_a_damaged_note_only_loses_the_reason(mini: MiniProject, note: object) -> None:
    mini.recipe("alpha")
    channel = Recorded(mini.channel)
    channel.steps = load_recipes(mini).plan(channel)
    (mini.root / "recipes" / "alpha" / "more").touch()
    channel.read_digest = lambda _: note
    (step,) = load_recipes(mini).plan(channel)
    assert step.action == BUILD
    assert step.reason


def test_the_closing_table_is_never_cut(mini: MiniProject) -> None:
    name = "a" * 90
    mini.recipe(name)
    (step,) = load_recipes(mini).plan(LocalChannel(mini.channel))
    head, row = format_table([Result(step, "built", "", 1.25)])
    assert row.split() == [name, "1.0", step.outputs[0].build, "built", "1.2"]
    assert head.index("build") == row.index(step.outputs[0].build)
