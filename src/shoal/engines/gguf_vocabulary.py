"""A model's vocabulary, as a GGUF file has it: that of a tokenizer, or of plain bytes.

Byte-level BPE alone, as in GPT-2: a token is a text of characters that each stand for a
byte.  Sources: Hugging Face's ``tokenizer.json`` (tokenizers 0.22); llama.cpp's
``llama-vocab.cpp``, which cuts texts by the rule that ``tokenizer.ggml.pre`` names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from shoal.domain.errors import InvalidRequest

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

END_OF_TEXT, TURN_BEGIN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML."""

# llama.cpp wants merges.  UTF-8 has no byte 0xFF, so that this one never applies.
NO_MERGE = "ÿ ÿ"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
RULES_BY_PATTERN: Mapping[str, str] = {
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}
"""llama.cpp's names for how Llama 3 and Qwen 2 cut texts before merging."""


class TokenKind(IntEnum):
    """What a token is (llama.cpp, ``llama_token_type``)."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level vocabulary; the number of a token is its index.

    ``rule`` is llama.cpp's name for how texts are cut before merging.  ``begin`` and
    ``end`` are the tokens of a text; None: there is none.
    """

    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    merges: Sequence[str]
    rule: str
    begin: int | None
    end: int | None
    begins_texts: bool = False
    chat_template: str = CHAT_TEMPLATE


def byte_vocabulary() -> Vocabulary:
    """Return the vocabulary of plain bytes: token n is byte n.

    After them, 256 ends a text, 257 and 258 begin and end a turn of a chat, as ChatML
    has it.
    """
    marks = [END_OF_TEXT, TURN_BEGIN, TURN_END]
    return Vocabulary(
        [*byte_characters(), *marks],
        [TokenKind.NORMAL] * 256 + [TokenKind.CONTROL] * len(marks),
        [NO_MERGE],
        "gpt-2",
        None,
        256 + marks.index(TURN_END),
    )


def byte_characters() -> list[str]:
    """Return the character that stands for each byte.

    Source: GPT-2, ``encoder.py``, ``bytes_to_unicode``: printable characters of Latin-1
    are themselves, the others follow from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [
        chr(byte if byte in printable else next(substitutes)) for byte in range(256)
    ]


def read_vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a folder with Hugging Face's files.

    ``config`` has ``vocab_size``, and the tokens that begin and end a text.

    Raises InvalidRequest if it is not byte-level BPE, or is cut by an unknown rule.
    """
    tokenizer = _read_json(folder / TOKENIZER)
    settings = _read_json(folder / TOKENIZER_CONFIG, missing={})
    model = tokenizer.get("model", {})
    decoders = {each.get("type") for each in _steps(tokenizer.get("decoder"))}
    if model.get("type") != "BPE" or "ByteLevel" not in decoders:
        raise InvalidRequest(
            f"{folder / TOKENIZER} is not a byte-level BPE, the only kind that can be "
            "written as GGUF here; llama.cpp's convert_hf_to_gguf.py supports more"
        )
    tokens = {int(id): text for text, id in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, TokenKind.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        special = added.get("special", False)
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
    size = max(config.get("vocab_size", 0), max(tokens) + 1)
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in model["merges"]
    ]
    return Vocabulary(
        [tokens.get(id, f"[PAD{id}]") for id in range(size)],
        [kinds.get(id, TokenKind.UNUSED) for id in range(size)],
        merges or [NO_MERGE],
        _rule(folder / TOKENIZER, tokenizer.get("pre_tokenizer")),
        _first(config.get("bos_token_id")),
        _first(config.get("eos_token_id")),
        settings.get("add_bos_token", _begins_with_mark(tokenizer)),
        _template(folder, settings),
    )


def _rule(path: Path, pre_tokenizer: Any) -> str:
    """Return llama.cpp's name for how texts are cut.  Raises InvalidRequest."""
    steps = list(_steps(pre_tokenizer))
    match [each.get("type") for each in steps]:
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return "gpt-2"
        case ["Digits", "ByteLevel"] if steps[0].get("individual_digits"):
            return "smollm"
        case ["Split", "ByteLevel"]:
            pattern = steps[0].get("pattern", {}).get("Regex", "")
            if rule := RULES_BY_PATTERN.get(pattern):
                return rule
        case _:
            pass
    raise InvalidRequest(
        f"{path} splits text by an unknown rule; llama.cpp's convert_hf_to_gguf.py "
        "supports more"
    )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of a tokenizer, which may be a sequence."""
    if not isinstance(part, dict):
        return
    if part.get("type") == "Sequence":
        yield from part.get("pretokenizers") or part.get("decoders") or ()
    else:
        yield part


def _begins_with_mark(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer puts a token before each text."""
    after = tokenizer.get("post_processor") or {}
    parts = [after, *after.get("processors", ())]
    return any("SpecialToken" in part for each in parts for part in _single(each)[:1])


def _single(part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    single: Sequence[Mapping[str, Any]] = part.get("single", ())
    return single


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the template of chats; that of ChatML where the folder has none."""
    file = folder / TEMPLATE_FILE
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each["name"]: each["template"] for each in found}
        found = named.get("default")
    return found or CHAT_TEMPLATE


def _first(tokens: int | Sequence[int] | None) -> int | None:
    return tokens[0] if isinstance(tokens, Sequence) else tokens


def _read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the object in a file.  Raises InvalidRequest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise InvalidRequest(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path}: expected a JSON object")
    return found
