"""The formats of strings in JSON schemas, as patterns.

Each pattern is narrower than its format, with all that is usual of it.

Sources: JSON Schema Validation, "Defined Formats"; RFC 5321 (email), RFC 1123
(hostname), RFC 2673 and 4291 (IP addresses), RFC 3986 (uri), RFC 3339, appendix A
(duration).
"""

from collections.abc import Mapping

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LOCAL = "[A-Za-z0-9_+-]+"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = "[0-9A-Fa-f]{1,4}"
_SHORTENED = [f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)]
_IPV6 = [
    f"({_GROUP}:){{7}}{_GROUP}",
    *_SHORTENED,
    f"({_GROUP}:){{1,7}}:",
    f":(:{_GROUP}){{1,7}}",
    "::",
]
_MINUTES = r"\d+M(\d+S)?"
_TIME = rf"T(\d+H({_MINUTES})?|{_MINUTES}|\d+S)"
_DAYS = r"\d+M(\d+D)?"
_DATE = rf"(\d+Y({_DAYS})?|{_DAYS}|\d+D)"

FORMAT_PATTERNS: Mapping[str, str] = {
    "email": rf"^{_LOCAL}(\.{_LOCAL})*@{_LABEL}(\.{_LABEL})+$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": f"^({'|'.join(_IPV6)})$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-F]{2})+$",
    "duration": rf"^P({_DATE}({_TIME})?|{_TIME}|\d+W)$",
}
"""The formats that llama.cpp does not know."""

FORMAT_LENGTHS: Mapping[str, tuple[int, int]] = {
    "date": (10, 10),
    "time": (9, 18),
    "date-time": (20, 29),
    **dict.fromkeys(("uuid", *(f"uuid{n}" for n in range(1, 6))), (36, 36)),
}
"""The formats that llama.cpp knows, with the least and the most characters of each."""

UNSUPPORTED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)
"""The other formats that JSON Schema defines."""

FORMATS = UNSUPPORTED_FORMATS | FORMAT_PATTERNS.keys() | FORMAT_LENGTHS.keys()
"""All formats that mean something; any other is only a remark."""
