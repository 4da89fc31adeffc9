# SPDX-License-Identifier: BSD-3-Clause
"""The answer about one model: vLLM's choices, memory, and the command that serves it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from strix_validate import TARGET
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, read_memory_budget
from strix_validate.models import model_memory, serving, table
from strix_validate.models.table import NoModel, Row

#: Exceptions that code raises if the values of a config.json have other types or sizes than
#: expected.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError)


@dataclass(frozen=True)
class ModelAnswer:
    """The answer about one model. `models --json` prints these fields.

    Attributes:
        source: Where the answer comes from: vLLM's code or the table.
        rows: The table's rows for the model.
        parts: Names of the backends and kernels that vLLM chooses, by part of the model.
        refusal: vLLM's message if it refuses the model, or "".
        weights: Bytes of the weights; None if they cannot be counted.
        token: Bytes of a token in the KV cache; None if unknown.
        compared: Whether the choices are those of vLLM's code, or come from the table and were
            compared with that code for this architecture.
        tiles: Whether vLLM has tuned tiles for the experts' kernel, in words, or "".
        uncounted: Parts of the model that `weights` does not include.
        unproven: Kinds of layers that the table has no row for.
        is_estimate: Whether no count for this family of models was compared with transformers'. The
            count may then be too high or too low.
        length: Maximum tokens of a request if no flag limits them; 0 if unknown.
        parsers: Flags of the parsers for tool calls and reasoning, and a note.
        drafts: Flags of speculative decoding.
        speed: Published speeds of models in this format.
        command: The command that serves a model, without arguments.
        suffix: Flags that the model's format or its LoRA needs.
        notes: Further lines for the user.
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
    def weights_prefix(self) -> str:
        """Words to print before the size of the weights if it is a bound or an estimate, or ""."""
        if self.is_estimate:
            return "perhaps "
        return "at least " if self.uncounted else ""


@dataclass(frozen=True)
class _Count:
    """The weights of a model.

    Attributes:
        weights: Bytes; None if a dimension is missing.
        uncounted: Parts of the model that `weights` does not include.
        is_estimate: Whether no count for this family of models was compared with transformers'.
    """

    weights: int | None
    uncounted: list[str] = field(default_factory=list)
    is_estimate: bool = False


@dataclass(frozen=True)
class _Choice:
    """vLLM's choices for a model.

    Attributes:
        source: Where the answer comes from.
        parts: Names of backends and kernels by part of the model.
        refusal: vLLM's message if it refuses the model, or "".
        weights: Bytes of the parameters, if vLLM's code built the model; 0 otherwise.
    """

    source: str
    parts: dict[str, list[str]]
    refusal: str
    weights: int = 0


def answer(config: dict, folder: Path | None, source: Path | None) -> ModelAnswer:
    """Return the answer about a model, with the choices of vLLM's code or of the table.

    Args:
        config: The model's config.json.
        folder: The model's folder, if it is on this machine.
        source: vLLM's source folder; None to use the table.

    Raises:
        NoModel: The config describes no model; or the answer should come from the table, and the
            table has no rows for the model, or is not for this GPU.
        CannotRun: vLLM's code fails on this machine.
    """
    if not source:
        table.require_target(": only vLLM's own code can answer")
    file_bytes = model_memory.weights_of_files(folder) if folder else 0
    rows = _rows(config, is_required=not source)
    count = _count(config, file_bytes)
    token = _token_bytes(config)
    choice = _ask_code(config, source) if source else _ask_table(rows)
    if choice.weights:
        count = _Count(file_bytes or choice.weights)
    tiles = table.describe_tiles(config, source) if rows else ""
    return ModelAnswer(
        source=choice.source,
        rows=rows,
        parts=choice.parts,
        refusal=choice.refusal,
        weights=count.weights,
        token=token,
        compared=source is not None or table.was_compared(config),
        tiles=tiles,
        uncounted=count.uncounted,
        unproven=_list_or_empty(model_memory.not_in_table, config),
        is_estimate=count.is_estimate,
        **_advice(config, folder),
    )


def _rows(config: dict, is_required: bool) -> list[Row]:
    """Return the table's rows of a model.

    Args:
        config: The model's config.json.
        is_required: Whether a model without rows is an error. vLLM's code may know a model that the
            table does not.

    Raises:
        NoModel: Rows are required, and the table has none for the model or a value is malformed.
    """
    try:
        return table.find_rows(config)
    except NoModel:
        if is_required:
            raise
    except MALFORMED as error:
        if is_required:
            raise _no_model(error) from error
    return []


def _ask_table(rows: list[Row]) -> _Choice:
    """Return the choices in a model's rows of the table."""
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(row.part, set()).add(row.chosen)
    return _Choice(
        source=f"the table, compared with vLLM {table.version()}",
        parts={part: sorted(chosen) for part, chosen in names.items()},
        refusal=next((row.refused for row in rows if row.refused), ""),
    )


def _ask_code(config: dict, source: Path) -> _Choice:
    """Return the choices of vLLM's code in a source folder."""
    from strix_validate.models.choose import ask
    from strix_validate.vllm.source import version

    (reply,) = ask([config], source)
    return _Choice(
        source=f"the code of vLLM {version(source)}, on a mock {TARGET}",
        parts=reply.get("chosen", {}),
        refusal=reply.get("error", "").partition("\n")[0],
        weights=reply.get("parameters", 0),
    )


def _no_model(error: Exception) -> NoModel:
    """Return the NoModel for an exception that a malformed value raised."""
    return NoModel(f"a dimension of the model is missing or is not a number: {error!r:.200}")


def _count(config: dict, file_bytes: int) -> _Count:
    """Return the weights of a model.

    Args:
        config: The model's config.json.
        file_bytes: Bytes of the weights' files, or 0 if there are none.

    Raises:
        NoModel: A dimension is malformed, or no model has such a dimension.
    """
    missing: list[str] = []
    weights: int | None = None
    try:
        weights = file_bytes or model_memory.weights(config)
    except NoModel:
        raise
    except KeyError as error:
        missing = [f"the parts whose size is {error!s:.60}, a key that is missing"]
    except MALFORMED as error:
        raise _no_model(error) from error
    if weights is not None and not 0 <= weights < 1 << 60:
        raise NoModel("no model has such dimensions")
    if file_bytes:
        return _Count(weights)
    uncounted = _list_or_empty(model_memory.uncounted, config)
    return _Count(
        weights,
        uncounted + missing,
        is_estimate=not _is_counted(config),
    )


def _token_bytes(config: dict) -> int | None:
    """Return the bytes of a token's keys and values; None if unknown.

    Raises:
        NoModel: No model has such a dimension.
    """
    try:
        return model_memory.cache_of_token(config)
    except NoModel:
        raise
    except MALFORMED:
        return None


def _is_counted(config: dict) -> bool:
    try:
        return model_memory.is_counted(config)
    except MALFORMED:
        return False


def _list_or_empty(function: Callable[[dict], list[str]], config: dict) -> list[str]:
    """Return a function's list for a config, or an empty one if a value is malformed."""
    try:
        return function(config)
    except MALFORMED:
        return []


def _advice(config: dict, folder: Path | None) -> dict:
    """Return the fields of ModelAnswer about serving; empty if a value is malformed."""
    try:
        return {
            "length": serving.read_length(config, folder),
            "parsers": serving.find_parsers(config),
            "drafts": serving.list_draft_flags(config),
            "speed": serving.find_speed(config),
        }
    except MALFORMED:
        return {}


def _line(title: str, text: str) -> str:
    return f"  {title:17} {text}"


def describe(name: str, result: ModelAnswer, tree: Tree) -> list[str]:
    """Return an answer as lines of text for the terminal.

    Args:
        name: The model's name as the user wrote it.
        result: The answer.
        tree: The machine on which the model is to be served.
    """
    verdict = "does not start" if result.refusal else "starts"
    lines = [f"{name}: {verdict}, according to {result.source}"]
    lines += [f"  {note}" for note in result.notes]
    if result.refusal:
        lines.append(f"  vLLM refuses it: {result.refusal:.300}")
        instead = next((row.instead for row in result.rows if row.refused), "")
        if instead:
            lines.append(_line("use instead", instead))
    elif not result.compared:
        lines.append(
            "  the table was not compared with vLLM for this architecture, so the rest is a guess"
        )
    lines += _choice_lines(result)
    if result.tiles:
        lines.append(_line("tiles of experts", result.tiles))
    lines += [_line("not compared", part) for part in result.unproven]
    lines += _memory_lines(result)
    if result.speed and not result.refusal:
        lines.append(_line("speed", result.speed))
    if result.weights is not None:
        lines += _serve_lines(name, result, result.weights, tree)
    return lines


def _choice_lines(result: ModelAnswer) -> list[str]:
    """Return a line for each choice, with how far it is proven."""
    rows = {(row.part, row.chosen): row for row in result.rows}
    lines = []
    for part, names in result.parts.items():
        for chosen in filter(None, names):
            proven = "not in the table"
            row = rows.get((part, chosen))
            if row:
                proven = f"{row.proven} ({row.of})"
            lines.append(_line(part, f"{chosen}: {proven}"))
    return lines


def _memory_lines(result: ModelAnswer) -> list[str]:
    without = [_line("", f"without {part}") for part in result.uncounted]
    if result.weights is None:
        return [_line("memory", "unknown, because config.json lacks a dimension"), *without]
    if result.token is None:
        cache = "a KV cache of unknown size"
    elif result.token == 0:
        cache = "no KV cache"
    else:
        cache = f"{result.token / 1024:.0f} KiB of KV cache per token at most"
    size = f"{result.weights_prefix}{result.weights / GIB:.1f} GiB of weights"
    lines = [_line("memory", f"{size}, {cache}"), *without]
    if result.is_estimate:
        line = "computed as if its layers were Llama's: no count for this family was checked"
        lines.append(_line("", line))
    return lines


def _serve_lines(name: str, result: ModelAnswer, weights: int, tree: Tree) -> list[str]:
    """Return lines: optional flags, then the command that serves a model here, or why none does."""
    lines = []
    if not result.refusal:
        flags, note = result.parsers
        if flags:
            remark = f" ({note})" if note else ""
            lines.append(_line("tools", f"{flags}{remark}"))
        lines += [_line("drafts", draft_flags) for draft_flags in result.drafts]
    machine = read_memory_budget(tree)
    if not machine:
        return [*lines, _line("here", "this is no Strix Halo, or its memory cannot be read")]
    memory_flags = machine.flags(weights)
    if not memory_flags:
        verdict = "may not fit" if result.is_estimate else "does not fit"
        line = f"{verdict}: strix-validate doctor shows what limits the memory"
        return [*lines, _line("here", line)]
    cache = machine.cache_gib(weights) * GIB
    length_flag = serving.length_flag(result.length, result.token, cache)
    room = ""
    if result.token:
        num_tokens = cache // result.token
        if num_tokens:
            room = f", room for {num_tokens} tokens"
            if length_flag and result.length:
                room += f" of the {result.length} that a request may have"
    command = f"{result.command} {quote(name)}{result.suffix} {memory_flags}{length_flag}"
    return [*lines, _line("here", f"{command}{room}")]
