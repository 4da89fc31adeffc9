# SPDX-License-Identifier: BSD-3-Clause
"""Evaluate the part of GitHub's expression language that our workflows use.

Anything else raises Unsupported.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<sign>&&|\|\||==|!=|[!().,]))"
)
TEMPLATE = re.compile(r"\$\{\{((?:(?!\}\}).)*)\}\}", re.S)
CONSTANTS = {"true": True, "false": False, "null": None}
STATUS = {"always", "cancelled", "failure", "success"}


class Unsupported(Exception):
    """A workflow uses a feature that this runner lacks. Add it here as GitHub documents it."""


def is_true(value: Any) -> bool:
    """Return whether GitHub treats a value as true."""
    return not (value is None or value is False or value == 0 or value == "")


def are_equal(left: Any, right: Any) -> bool:
    """Compare two values as GitHub does.

    Strings are compared without regard to case, and values of different types as numbers.
    """
    if isinstance(left, str) and isinstance(right, str):
        return left.casefold() == right.casefold()
    if type(left) is type(right):
        return bool(left == right)
    return _number(left) == _number(right)


def _number(value: Any) -> float:
    if value is None or value == "":
        return 0.0
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def contains(whole: Any, part: Any) -> bool:
    """GitHub's function `contains`."""
    if isinstance(whole, list):
        return any(are_equal(item, part) for item in whole)
    return str(part or "").casefold() in str(whole or "").casefold()


FUNCTIONS: dict[str, Callable[..., Any]] = {"contains": contains, "fromjson": json.loads}


class Expression:
    """One expression: the text between `${{` and `}}`.

    Attributes:
        contexts: The values of `github`, `needs` and so on, by name.
        status: The results of always(), cancelled(), failure() and success(), by name.
        calls_status: Whether the expression has called one of these functions.
    """

    def __init__(
        self, text: str, contexts: Mapping[str, Any], status: Mapping[str, bool] | None = None
    ) -> None:
        self.text, self.contexts, self.status = text, contexts, status or {}
        self.calls_status = False
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            match = TOKEN.match(text, position)
            if not match:
                raise Unsupported(f"{text!r}: {text[position:]!r}")
            kind = str(match.lastgroup)
            self.tokens.append((kind, match[kind]))
            position = match.end()

    def value(self) -> Any:
        """Evaluate the expression. Raises Unsupported."""
        result = self._or()
        if self.tokens:
            raise Unsupported(f"{self.text!r}: {self.tokens[0][1]!r} after its end")
        return result

    def _next_is(self, *signs: str) -> str:
        """Remove and return the next token if it is one of these signs, else return ""."""
        if self.tokens and self.tokens[0][0] == "sign" and self.tokens[0][1] in signs:
            return self.tokens.pop(0)[1]
        return ""

    def _require(self, sign: str) -> None:
        if not self._next_is(sign):
            raise Unsupported(f"{self.text!r}: {sign!r} is missing")

    def _or(self) -> Any:
        left = self._and()
        while self._next_is("||"):
            right = self._and()
            left = left if is_true(left) else right
        return left

    def _and(self) -> Any:
        left = self._equality()
        while self._next_is("&&"):
            right = self._equality()
            left = right if is_true(left) else left
        return left

    def _equality(self) -> Any:
        left = self._not()
        sign = self._next_is("==", "!=")
        while sign:
            left = are_equal(left, self._not()) == (sign == "==")
            sign = self._next_is("==", "!=")
        return left

    def _not(self) -> Any:
        if self._next_is("!"):
            return not is_true(self._not())
        return self._operand()

    def _operand(self) -> Any:
        if self._next_is("("):
            value = self._or()
            self._require(")")
            return value
        kind, token = self.tokens.pop(0) if self.tokens else ("end", "end of the expression")
        if kind == "text":
            return token[1:-1].replace("''", "'")
        if kind == "number":
            return float(token)
        if kind != "name":
            raise Unsupported(f"{self.text!r}: {token!r}")
        if self._next_is("("):
            return self._call(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        return self._property(token)

    def _call(self, name: str) -> Any:
        arguments = []
        while not self._next_is(")"):
            arguments.append(self._or())
            self._next_is(",")
            if not self.tokens:
                raise Unsupported(f"{self.text!r}: ')' is missing")
        if name in STATUS and name in self.status and not arguments:
            self.calls_status = True
            return self.status[name]
        if name.casefold() not in FUNCTIONS:
            raise Unsupported(f"{self.text!r}: the function {name}")
        return FUNCTIONS[name.casefold()](*arguments)

    def _property(self, name: str) -> Any:
        if name not in self.contexts:
            raise Unsupported(f"{self.text!r}: the context {name}")
        value = self.contexts[name]
        while self._next_is("."):
            kind, key = self.tokens.pop(0) if self.tokens else ("end", "end of the expression")
            if kind != "name":
                raise Unsupported(f"{self.text!r}: {key!r} after a dot")
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def to_text(value: Any) -> str:
    """Convert a value to a string as GitHub does."""
    if isinstance(value, Mapping | list):
        raise Unsupported(f"a list or a mapping within a text: {value!r:.100}")
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def fill(value: Any, contexts: Mapping[str, Any]) -> Any:
    """Evaluate each `${{ ... }}` in a string, or in the strings of a mapping or a list."""
    if isinstance(value, Mapping):
        return {key: fill(item, contexts) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, contexts) for item in value]
    if not isinstance(value, str):
        return value
    match = TEMPLATE.fullmatch(value.strip())
    if match:
        return Expression(match[1], contexts).value()
    return TEMPLATE.sub(lambda m: to_text(Expression(m[1], contexts).value()), value)


def holds(condition: Any, contexts: Mapping[str, Any], status: Mapping[str, bool]) -> bool:
    """Return whether an `if` holds.

    If its expression calls no status function, success() is required too.
    """
    text = str(condition).strip()
    match = TEMPLATE.fullmatch(text)
    if match:
        text = match[1]
    expression = Expression(text, contexts, status)
    value = is_true(expression.value())
    return value and (expression.calls_status or status["success"])
