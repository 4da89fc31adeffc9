# SPDX-License-Identifier: BSD-3-Clause
"""What is answered about one model: vLLM's choices, memory, and the line that serves it."""

from dataclasses import dataclass, field
from pathlib import Path

from strix_validate import TARGET
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, memory_of
from strix_validate.models import model_memory, serving, table
from strix_validate.models.table import NoModel, Row

#: What a config whose values have other types or sizes raises, wherever it is asked.
STRANGE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError)


@dataclass(frozen=True)
class ModelAnswer:
    """What is said of one model.

    Attributes:
        source: Who says it.
        rows: Of the table.
        parts: Names by part, as vLLM chooses.
        refusal: vLLM's words, or "".
        weights: Bytes; None if they cannot be counted.
        token: Bytes of a token's keys and values; None if unknown.
        compared: Whether the table was compared with this architecture.
        tiles: Of the experts' kernel.
        uncounted: Parts of the model that the weights leave out.
        unproven: Parts that were not compared.
        is_estimate: Whether the family's count was never compared, so that it may be too high.
        length: Tokens that vLLM lets a request have if no flag says it; 0 if unknown.
        parsers: Flags by which tool calls and reasoning are parsed, and a note.
        drafts: Flags of speculative decoding.
        speed: Public figures of the format.
        command: What serves it.
        suffix: Flags that the way in which it is stored needs.
        notes: What else has to be known.
    """

    source: str
    rows: list[Row]
    parts: dict[str, list[str]]
    refusal: str
    weights: int | None
    token: int | None
    compared: bool
    tiles: str
    uncounted: list[str]
    unproven: list[str]
    is_estimate: bool = False
    length: int = 0
    parsers: tuple[str, str] = ("", "")
    drafts: list[str] = field(default_factory=list)
    speed: str = ""
    command: str = "vllm serve"
    suffix: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def fewest(self) -> str:
        """What stands before the weights: whether they are exact, a lower bound or an estimate."""
        if self.is_estimate:
            return "perhaps "
        return "at least " if self.uncounted else ""


def answer(config: dict, folder: Path | None, source: Path | None) -> ModelAnswer:
    """Return what vLLM's code at source says, or else the table.

    Raises:
        NoModel: the table cannot place it. CannotRun: vLLM's code does not run.
    """
    if not source:
        table.about_target()
    files = model_memory.weights_of_files(folder) if folder else 0
    rows: list[Row] = []
    try:
        rows = table.rows_of(config)
    except STRANGE as error:
        # vLLM may know what the table does not
        if not source:
            if isinstance(error, NoModel):
                raise
            raise NoModel(f"a dimension is missing or is not a number: {error!r:.200}") from error
    weights, token, missing = _count(config, files)
    uncounted = [] if files else _uncounted(config) + missing
    is_estimate = not files and not _is_counted(config)
    refusal = next((row.refused for row in rows if row.refused), "")
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts[row.part] = sorted({*parts.get(row.part, []), row.chosen})
    speaker = f"the table, compared with vLLM {table.version()}"
    if source:
        from strix_validate.models.choose import ask
        from strix_validate.vllm.source import version

        (reply,) = ask([config], source)
        speaker = f"the code of vLLM {version(source)}, on a mock {TARGET}"
        refusal = reply.get("error", "").partition("\n")[0]
        parts = reply.get("chosen", {})
        if reply.get("parameters"):
            weights, uncounted, is_estimate = reply["parameters"], [], False
    return ModelAnswer(
        speaker,
        rows,
        parts,
        refusal,
        files or weights,
        token,
        table.was_compared(config),
        table.tiles_of(config, source) if rows else "",
        uncounted,
        _or_nothing(model_memory.not_in_table, config),
        is_estimate,
        **_advice(config, folder),
    )


def _count(config: dict, files: int) -> tuple[int | None, int | None, list[str]]:
    """Return bytes of weights and of a token's cache, None where a key lacks, and what lacks."""
    weights = token = None
    missing: list[str] = []
    try:
        weights = files or model_memory.weights(config)
        if not 0 <= weights < 1 << 60:
            raise NoModel("its dimensions are those of no model")
    except NoModel:
        raise
    except KeyError as error:
        weights, missing = None, [f"what {error!s:.60} would say"]
    except STRANGE as error:
        raise NoModel(f"a dimension is missing or is not a number: {error!r:.200}") from error
    try:
        token = model_memory.cache_of_token(config)
    except NoModel:
        raise
    except STRANGE:
        token = None
    return weights, token, missing


def _uncounted(config: dict) -> list[str]:
    return _or_nothing(model_memory.uncounted, config)


def _is_counted(config: dict) -> bool:
    return bool(_or_nothing(model_memory.is_counted, config))


def _or_nothing(function, config: dict):
    """Return what a function says of a config, or nothing where a value is strange."""
    try:
        return function(config)
    except STRANGE:
        return []


def _advice(config: dict, folder: Path | None) -> dict:
    """Return what the model is served with."""
    try:
        return {
            "length": serving.length_of(config, folder),
            "parsers": serving.parsers_of(config),
            "drafts": serving.drafts_of(config),
            "speed": serving.speed_of(config),
        }
    except STRANGE:
        return {}


def describe(name: str, result: ModelAnswer, tree: Tree) -> list[str]:
    """Return an answer as lines for people: what is chosen, how far that is proven, memory."""
    lines = [f"{name}: {'does not start' if result.refusal else 'starts'}, says {result.source}"]
    lines += [f"  {note}" for note in result.notes]
    if result.refusal:
        lines.append(f"  vLLM refuses it: {result.refusal:.300}")
        instead = next((row.instead for row in result.rows if row.refused), "")
        lines += [f"  {'take':17} {instead}"] * bool(instead)
    elif not result.compared:
        lines.append("  no model of this architecture was compared: the rest is a guess")
    proven = {(row.part, row.chosen): row for row in result.rows}
    for part, names in result.parts.items():
        for chosen in filter(None, names):
            row = proven.get((part, chosen))
            words = f"{row.proven} ({row.of})" if row else "not in the table"
            lines.append(f"  {part:17} {chosen}: {words}")
    if result.tiles:
        lines.append(f"  {'tiles of experts':17} {result.tiles}")
    lines += [f"  {'not compared':17} {part}" for part in result.unproven]
    lines += _memory_lines(result)
    if result.speed and not result.refusal:
        lines.append(f"  {'speed':17} {result.speed}")
    if result.weights is not None:
        lines += _serve_lines(name, result, result.weights, tree)
    return lines


def _memory_lines(result: ModelAnswer) -> list[str]:
    without = [f"  {'':17} without {part}" for part in result.uncounted]
    if result.weights is None:
        return [f"  {'memory':17} cannot be said: config.json lacks a dimension", *without]
    cache = "no KV cache" if result.token == 0 else "a KV cache of unknown size"
    if result.token:
        cache = f"{result.token / 1024:.0f} KiB of KV cache a token at most"
    size = f"{result.fewest}{result.weights / GIB:.1f} GiB of weights"
    lines = [f"  {'memory':17} {size}, {cache}", *without]
    if result.is_estimate:
        lines.append(f"  {'':17} as if its layers were Llama's: nobody compared this family")
    return lines


def _serve_lines(name: str, result: ModelAnswer, weights: int, tree: Tree) -> list[str]:
    """Return the line that serves a model on this machine, and what may be added to it."""
    more = [f"  {'drafts':17} {flags}" for flags in result.drafts] if not result.refusal else []
    flags, note = result.parsers
    if flags and not result.refusal:
        more.insert(0, f"  {'tools':17} {flags}" + f" ({note})" * bool(note))
    machine = memory_of(tree)
    if not machine:
        return [*more, f"  {'here':17} no Strix Halo whose memory could be read"]
    memory = machine.flags(weights)
    if not memory:
        may = "may not fit" if result.is_estimate else "does not fit"
        return [*more, f"  {'here':17} {may}: strix-validate doctor says what limits it"]
    cache = machine.cache_gib(weights) * GIB
    length = serving.length_flag(result.length, result.token, cache)
    tokens = cache // result.token if result.token else 0
    room = f", room for {tokens} tokens" if tokens else ""
    room += f" of {result.length} that a request may have" * bool(room and length and result.length)
    return [*more, f"  {'here':17} {result.command} {name}{result.suffix} {memory}{length}{room}"]
