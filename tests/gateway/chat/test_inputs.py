"""Tokens in place of texts."""

import asyncio
import threading
from pathlib import Path

import pytest
import tiktoken

from harness.speed import PATIENCE
from shoal.domain.errors import CannotDo, InvalidRequest, NotReady, TooLarge
from shoal.gateway.chat import inputs as token_texts
from shoal.gateway.chat.inputs import EncodingMissing, TokenTexts


def bytes_encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={},
    )


def decode(*inputs: list[int], texts: TokenTexts | None = None) -> list[str]:
    texts = texts or TokenTexts(bytes_encoding)
    return asyncio.run(texts.decode(inputs, "input"))


def test_each_list_is_a_text() -> None:
    assert decode([72, 105], list("wö".encode())) == ["Hi", "wö"]


def test_half_a_character_is_replaced() -> None:
    # Clients cut long texts between tokens.
    assert decode([72, 0xC3]) == ["H\N{REPLACEMENT CHARACTER}"]


def test_unknown_token_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"input\[1\].*check_embedding") as raised:
        decode([1], [256])

    assert raised.value.field == "input[1]"


def test_texts_are_no_larger_than_a_body_of_texts_could_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_texts, "BODY_MAX", 3)

    assert decode([72], [72, 105]) == ["H", "Hi"]
    with pytest.raises(TooLarge, match="limit of 3 bytes"):
        decode([72, 105], [72, 105])


def test_missing_encoding_is_an_error_that_names_the_remedy() -> None:
    def load() -> tiktoken.Encoding:
        raise EncodingMissing("there is none")

    with pytest.raises(CannotDo, match="input: there is none: send texts"):
        decode([1], texts=TokenTexts(load))


async def test_load_that_hangs_is_begun_once_and_holds_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_texts, "LOAD_TIMEOUT", 0.01)
    begun: list[int] = []
    go_on = threading.Event()

    def load() -> tiktoken.Encoding:
        begun.append(1)
        go_on.wait()
        return bytes_encoding()

    texts = TokenTexts(load)
    try:
        for _ in range(3):
            with pytest.raises(NotReady, match="still downloading"):
                await texts.decode([[72]], "input")
    finally:
        go_on.set()  # the loop waits for its threads before it closes
    assert len(begun) == 1

    monkeypatch.setattr(token_texts, "LOAD_TIMEOUT", PATIENCE)
    assert await texts.decode([[72, 105]], "input") == ["Hi"]


async def test_failure_is_remembered_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def load() -> tiktoken.Encoding:
        tried.append(1)
        raise EncodingMissing("there is none")

    texts = TokenTexts(load)
    for _ in range(2):
        with pytest.raises(CannotDo, match="there is none"):
            await texts.decode([[72]], "input")
    assert len(tried) == 1

    monkeypatch.setattr(token_texts, "RETRY_AFTER", -1.0)
    with pytest.raises(CannotDo):
        await texts.decode([[72]], "input")
    assert len(tried) == 2


def test_vocabulary_that_cannot_be_downloaded_is_missing(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    with pytest.raises(CannotDo, match="TIKTOKEN_CACHE_DIR"):
        decode([1], texts=TokenTexts())
