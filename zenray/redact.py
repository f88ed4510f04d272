"""Keep secrets out of configurations, params, tags and job metadata before they are shown or stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_SECRET_KEY = re.compile(
    r"(^|[_\-./])(token|passwd|password|passphrase|secret|credentials?|authorization|api_?key|access_?key|private_?key)s?"
    r"([_\-./]|$)|(token|password|secret)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(?P<keep>://[^/\s:@]*:)[^/\s@]+(?=@)"  # scheme://user:PASSWORD@host
    r"|(?P<keep2>\bBearer\s+)[\w.\-~+/=]+"
    r"|\b(?:gh[pousr]_\w{20,}|hf_\w{20,}|sk-[\w\-]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w\-]{10,})"
    r"|(?P<keep3>\b(?:token|password|secret|api_?key)=)[^\s&;,]+",
    re.IGNORECASE,
)


def redact_text(text: str) -> str:
    """`text` with passwords in URLs, bearer tokens, `key=value` secrets and well-known token forms replaced."""

    def replacement(match: re.Match[str]) -> str:
        return (match["keep"] or match["keep2"] or match["keep3"] or "") + REDACTED

    return _SECRET_VALUE.sub(replacement, text)


def redact(value: Any, key: str = "") -> Any:
    """A copy of nested mappings, lists and scalars in which every secret is replaced; numbers and flags stay."""
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        return REDACTED if value and _SECRET_KEY.search(key) else redact_text(value)
    return value
