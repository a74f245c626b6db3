"""Texts from the tokens that some clients of embeddings send in their place.

Clients that cut texts to a model's context count tokens with the library tiktoken, and
then send the tokens: LangChain's ``OpenAIEmbeddings`` does by default.  For a model
that tiktoken does not know, and for those of OpenAI that make embeddings, they are
those of the encoding ``cl100k_base``; no other model reads them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.domain.errors import CannotDo, InvalidRequest

if TYPE_CHECKING:
    import tiktoken

ENCODING = "cl100k_base"

REMEDY = "send texts: LangChain does with check_embedding_ctx_length=False"


class EncodingMissing(Exception):
    """The library or the vocabulary is missing."""


class TokenTexts:
    """Decodes tokens; ``load`` loads the encoding when the first ones come."""

    def __init__(self, load: "Callable[[], tiktoken.Encoding] | None" = None) -> None:
        self._load = load or load_encoding
        self._encoding: tiktoken.Encoding | None = None

    async def decode(self, inputs: Sequence[Sequence[int]], field: str) -> list[str]:
        """Return a text for each list of tokens; ``field`` is theirs in the body.

        Raises InvalidRequest for tokens that the encoding does not have, and CannotDo
        if the encoding cannot be loaded.
        """
        return await asyncio.to_thread(self._decode, inputs, field)

    def _decode(self, inputs: Sequence[Sequence[int]], field: str) -> list[str]:
        if self._encoding is None:
            try:
                self._encoding = self._load()
            except EncodingMissing as error:
                raise CannotDo(f"{field}: {error}: {REMEDY}", field) from error
        texts = []
        for index, tokens in enumerate(inputs):
            try:
                texts.append(self._encoding.decode(tokens, errors="replace"))
            except KeyError as error:
                path = f"{field}[{index}]"
                raise InvalidRequest(
                    f"{path}: not tokens of {ENCODING}: {REMEDY}", path
                ) from error
        return texts


def load_encoding() -> "tiktoken.Encoding":
    """Load the encoding; tiktoken downloads the vocabulary that it does not find.

    Raises EncodingMissing.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise EncodingMissing(
            "the coordinator reads tokens only with the extra `tokens` (pip install "
            "'.[tokens]')"
        ) from error
    try:
        return tiktoken.get_encoding(ENCODING)
    except OSError as error:
        raise EncodingMissing(
            f"the coordinator could not download the vocabulary of {ENCODING}, which "
            "is not in its folder TIKTOKEN_CACHE_DIR either"
        ) from error
