"""Vocabularies of GGUF files."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.engines.gguf_vocabulary import (
    CHAT_TEMPLATE,
    NO_MERGE,
    TokenKind,
    byte_characters,
    byte_vocabulary,
    read_vocabulary,
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def folder_of(path: Path, **changes: Any) -> Path:
    """Return a folder with a small tokenizer, as transformers writes it."""
    tokenizer = {
        "added_tokens": [
            {"id": 4, "content": "<|end|>", "special": True},
            {"id": 5, "content": "<tool>", "special": False},
        ],
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3},
            "merges": [["a", "b"]],
        },
        **changes,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_plain_bytes_have_their_own_numbers() -> None:
    found = byte_vocabulary()

    assert found.tokens[ord("a")] == "a"
    assert found.tokens[ord(" ")] == "Ġ"
    assert len({*found.tokens}) == 259
    assert found.tokens[found.end or 0] == "<|im_end|>"
    assert [*found.kinds].count(TokenKind.CONTROL) == 3


def test_characters_of_bytes_are_those_of_gpt_2() -> None:
    found = byte_characters()

    assert len({*found}) == 256
    assert (found[0], found[0x0A], found[0x20], found[0xAD]) == ("Ā", "Ċ", "Ġ", "Ń")
    assert found[0xFF] == "ÿ"


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    config = {"vocab_size": 8, "eos_token_id": [4, 9]}

    found = read_vocabulary(folder_of(tmp_path), config)

    assert [*found.tokens] == [
        *("a", "b", "Ġ", "ab", "<|end|>", "<tool>", "[PAD6]", "[PAD7]")
    ]
    assert [*found.kinds] == [
        *([TokenKind.NORMAL] * 4),
        *(TokenKind.CONTROL, TokenKind.USER_DEFINED),
        *([TokenKind.UNUSED] * 2),
    ]
    assert [*found.merges] == ["a b"]
    assert (found.rule, found.begin, found.end) == ("gpt-2", None, 4)
    assert (found.begins_texts, found.chat_template) == (False, CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        (BYTE_LEVEL, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}, "smollm"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": LLAMA_3}},
                    BYTE_LEVEL,
                ],
            },
            "llama-bpe",
        ),
    ],
)
def test_rules_of_cutting_texts(
    tmp_path: Path, steps: dict[str, Any], rule: str
) -> None:
    found = read_vocabulary(folder_of(tmp_path, pre_tokenizer=steps), {})

    assert found.rule == rule


def test_a_token_before_each_text_and_the_template_of_the_folder(
    tmp_path: Path,
) -> None:
    after = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|begin|>"}}, {"Sequence": {}}],
            },
        ],
    }
    folder_of(tmp_path, post_processor=after)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")

    found = read_vocabulary(tmp_path, {"bos_token_id": 4})

    assert (found.begins_texts, found.begin) == (True, 4)
    assert found.chat_template == "{{ messages }}"


def test_a_vocabulary_without_merges_has_one_that_never_applies(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}

    found = read_vocabulary(folder_of(tmp_path, model=model), {})

    assert [*found.merges] == [NO_MERGE]
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": {"type": "Unigram"}}, "not a byte-level BPE"),
        ({"decoder": {"type": "Sequence", "decoders": []}}, "not a byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "unknown rule"),
    ],
)
def test_other_tokenizers_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidRequest, match=error):
        read_vocabulary(folder_of(tmp_path, **changes), {})
