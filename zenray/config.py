"""YAML files and `section.key=value` overrides, validated by strict pydantic models.

An unknown key is an error that names the nearest key, the file and the line. Values are read by YAML's safe loader;
lists on the command line are comma-separated. Nothing is instantiated by name.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from collectives.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
HINT_CUTOFF = 0.6
"""Similarity from which a known word is offered for an unknown one."""


class Section(BaseModel):
    """Base of every configuration model: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


M = TypeVar("M", bound=Section)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and reads 1e-3 as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.\d*|\.\d+)$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' given twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_pairs(node, deep=True))  # type: ignore[no-untyped-call]


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_rate(value: object) -> object:
    """'1gbit' -> 1e9 bits per second; numbers are bits per second already."""
    if isinstance(value, bool) or not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value.lower())
    if not match or match[2] not in _RATES:
        raise ValueError(
            f"'{value}' is not a rate; write a number and one of {', '.join(_RATES)}, such as 1gbit or 200mbit"
        )
    return float(match[1]) * _RATES[match[2]]


Rate = Annotated[float, BeforeValidator(parse_rate)]
"""Bits per second, written as 200mbit or 1gbit."""


def load(model: type[M], path: Path | None = None, overrides: Sequence[str] = ()) -> M:
    """Read `path` (may be None: all defaults), apply `key=value` overrides, and validate. Raises ConfigError."""
    lines: dict[str, int] = {}
    data: dict[str, Any] = {}
    if path is not None:
        data, lines = _read_yaml(path)
    for override in overrides:
        _apply(model, data, override)
        lines.pop(override.partition("=")[0], None)
    return validate(model, data, path, lines)


def validate(
    model: type[M], data: Mapping[str, Any], path: Path | None = None, lines: Mapping[str, int] | None = None
) -> M:
    """`data` as a model. path, lines: where keys stand, for the message of the ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, path, lines or {})) from None


def keys_of(path: Path) -> set[str]:
    """The top-level keys of a file, unvalidated. Raises ConfigError if it is no YAML mapping."""
    return set(_read_yaml(path)[0])


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has {len(text)} bytes; a configuration may have {MAX_CONFIG_BYTES}")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()  # type: ignore[no-untyped-call]
        data = loader.construct_document(node) if node is not None else {}  # type: ignore[no-untyped-call]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not a {type(data).__name__}")
    return data, _line_numbers(node)


def _line_numbers(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            lines[name] = key.start_mark.line + 1
            lines |= _line_numbers(value, f"{name}.")
    return lines


def _apply(model: type[Section], data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{override}' is not an override; write key=value or section.key=value")
    *sections, leaf = key.split(".")
    annotation: Any = model
    for name in sections:
        annotation = _field_type(annotation, name)
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"'{override}': {name} is not a section")
    annotation = _field_type(annotation, leaf)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"'{override}': {error}") from None
    if _is_sequence(annotation) and not isinstance(value, list):
        value = [yaml.load(item, _Loader) for item in text.split(",")] if text else []
    data[leaf] = value


def _field_type(annotation: Any, name: str) -> Any:
    """The annotation of field `name`, or None where the model has no such field (validation will say so)."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            info = candidate.model_fields.get(name)
            return info.annotation if info else None
    return None


def _is_sequence(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, Annotated):
        return any(_is_sequence(arg) for arg in typing.get_args(annotation))
    return origin in (list, tuple)


def _explain(model: type[Section], error: ValidationError, path: Path | None, lines: Mapping[str, int]) -> str:
    messages = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        place = f"{path}:{lines[key]}: " if path and key in lines else ""
        if item["type"] == "extra_forbidden":
            known = _known_keys(model)
            near = difflib.get_close_matches(key, known, n=1, cutoff=HINT_CUTOFF)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
            messages.append(f"{place}unknown key '{key}'; {hint}")
        else:
            messages.append(f"{place}'{key}' = {item.get('input')!r}: {item['msg']}{_value_hint(item)}")
    return "bad configuration: " + "; ".join(messages)


def _value_hint(item: Any) -> str:
    """The nearest of the values that a key may take, where it takes one of a few words."""
    if item["type"] != "literal_error" or not isinstance(item["input"], str):
        return ""
    words = re.findall(r"'([^']*)'", item["ctx"]["expected"])
    near = difflib.get_close_matches(item["input"], words, n=1, cutoff=HINT_CUTOFF)
    return f"; did you mean '{near[0]}'?" if near else ""


def describe_keys(model: type[Section], prefix: str = "") -> list[str]:
    """Every key of `model` and of its sections, two lines each: the default, and what it means."""
    lines = []
    for key, info in model.model_fields.items():
        sections = [part for part in (info.annotation, *typing.get_args(info.annotation)) if _is_section(part)]
        if not sections or info.default is None:
            default = "required" if info.is_required() else f"= {info.get_default(call_default_factory=True)}"
            lines.append(f"  {prefix}{key} {default}\n      {' '.join((info.description or '').split())}".rstrip())
        for section in sections:
            lines += describe_keys(section, f"{prefix}{key}.")
    return lines


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _known_keys(model: type[Section], prefix: str = "") -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        for candidate in (info.annotation, *typing.get_args(info.annotation)):
            if _is_section(candidate):
                keys += _known_keys(candidate, f"{prefix}{name}.")
    return keys
