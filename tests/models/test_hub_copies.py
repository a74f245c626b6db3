"""A model of the hub as a source; with machines: tests/cli/test_models_pull."""

import pytest

from shoal.domain.errors import PeerError
from shoal.models.hub_copies import HubSource
from shoal.models.model_hub import ModelHub
from shoal.models.names import GgufModel, HubFile


async def test_hash_that_is_none_is_the_reported_reason() -> None:
    model = GgufModel("", (HubFile("tiny.gguf", 4, "no" * 32),))
    source = HubSource(ModelHub("http://127.0.0.1:1"), "org/Tiny-GGUF", model)

    with pytest.raises(PeerError, match="org/Tiny-GGUF: no SHA-256"):
        async with source.connect():
            pass
