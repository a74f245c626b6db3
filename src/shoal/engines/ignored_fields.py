"""Notices by an answer that its server ignored a field of the request.

Servers of unknown kinds ignore what they do not know, without a word.  So they are
believed as far as their answers show it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from shoal.domain.errors import CannotDo
from shoal.domain.outcome import Delta
from shoal.domain.work import Feature, Inference
from shoal.engines.engine import Finished, Item

JSON_BEGINS = '{["-0123456789tfn'  # the first characters of values


class FieldIgnored(CannotDo):
    """The server ignored a field, and so lacks a feature.

    A model that was to call a tool, and did not, may call one all the same.
    """

    def __init__(self, field: str, feature: Feature | None = None) -> None:
        super().__init__(
            f"{field}: the model server ignored it. Repeat the request, which other "
            "workers may do, or `shoal join` an engine that does: see docs/engines.md",
            field,
        )
        self.feature = feature


async def check_heeded(
    work: Inference, items: AsyncGenerator[Item, None]
) -> AsyncGenerator[Item, None]:
    """Yield the ``items`` of an answer.

    Raises FieldIgnored at the first that shows that the server ignored a field.
    """
    begun = called = False
    must_call = work.options.get("tool_choice") not in (None, "auto", "none")
    async with aclosing(items) as answer:
        async for item in answer:
            if isinstance(item, Finished):
                if must_call and not called and item.finish_reason == "stop":
                    raise FieldIgnored("tool_choice")
            elif not called and (must_call or not begun):
                delta = item if isinstance(item, Delta) else Delta(0, {"content": item})
                called = "tool_calls" in delta.fields
                text = str(delta.fields.get("content") or "").lstrip()
                checked = text and not begun
                if (
                    checked
                    and Feature.LOGPROBS in work.needs
                    and delta.logprobs is None
                ):
                    raise FieldIgnored("logprobs", Feature.LOGPROBS)
                in_json = Feature.SCHEMA in work.needs
                if checked and in_json and text[0] not in JSON_BEGINS:
                    raise FieldIgnored("response_format", Feature.SCHEMA)
                begun = begun or bool(text)
            yield item
