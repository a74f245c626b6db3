"""The types of the bodies of Ollama's requests.

Source: Ollama's API reference (``docs/api.md`` and ``docs/openapi.yaml`` of its
repository).
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.options import CHAT_OPTIONS, SAMPLING_OPTIONS
from shoal.gateway.chat.inputs import DIMENSIONS_MAX
from shoal.gateway.chat.messages import (
    CALL_ID_MAX,
    CALLS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    FunctionName,
)
from shoal.gateway.chat.options import StopStrings, body_type
from shoal.gateway.http.decoding import FreeObject, Ignored, ModelName, Temperature

IMAGES_MAX = 64
PREDICT_MAX = 2**31 - 1

OPTIONS = tuple(
    each for each in CHAT_OPTIONS if each in SAMPLING_OPTIONS or each.name == "stop"
)
"""Options of models that a chat has under the same names."""

Images = Annotated[list[str], Meta(max_length=IMAGES_MAX)]
"""Images in base64."""

_FORMATS = ({"enum": ["", "json", None]}, {"type": "object"})

Format = Annotated[Raw, Meta(extra_json_schema={"anyOf": list(_FORMATS)})]
"""``json``, or the JSON schema of the answer."""


class ModelOptions(msgspec.Struct, frozen=True):
    """Options of the model; unknown ones go to the engine.

    Those for loading it (``num_ctx``, ``num_gpu`` and so on) are ignored: its worker
    has decided them.
    """

    # Its other options are added from the table ``OPTIONS``.

    num_predict: Annotated[int, Meta(le=PREDICT_MAX)] | None = None
    temperature: Temperature | None = None
    stop: StopStrings | None = None


OllamaOptions = body_type("OllamaOptions", ModelOptions, OPTIONS)


class CalledOllamaFunction(msgspec.Struct, frozen=True):
    name: FunctionName
    arguments: FreeObject | UnsetType = UNSET


class OllamaToolCall(msgspec.Struct, frozen=True):
    function: CalledOllamaFunction
    id: Annotated[str, Meta(max_length=CALL_ID_MAX)] | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=CALLS_MAX)] | None = (
        None
    )
    tool_name: str | None = None
    tool_call_id: Annotated[str, Meta(max_length=CALL_ID_MAX)] | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: FreeObject | UnsetType = UNSET


class OllamaTool(msgspec.Struct, frozen=True):
    function: OllamaFunction
    type: str = "function"


class OllamaPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common."""

    model: ModelName
    stream: bool | None = None  # by default it streams
    format: Format | UnsetType = UNSET
    options: OllamaOptions | None = None  # type: ignore[valid-type]  # made at run time
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Ignored | UnsetType = UNSET


class OllamaChat(OllamaPrompt, frozen=True, kw_only=True):
    """A chat; without messages, the model is to be loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MESSAGES_MAX)] | None = (
        None
    )
    tools: Annotated[list[OllamaTool], Meta(max_length=TOOLS_MAX)] | None = None


class OllamaGenerate(OllamaPrompt, frozen=True, kw_only=True):
    """A completion; without a prompt, the model is to be loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: Images | None = None
    raw: bool | None = None
    # Untyped: what matters is only whether they ask for something.
    context: Raw | UnsetType = UNSET


class OllamaEmbed(msgspec.Struct, frozen=True):
    """Texts to embed; without any, the model is to be loaded."""

    model: ModelName
    input: str | list[str] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    truncate: bool | None = None
    options: Ignored | UnsetType = UNSET
    keep_alive: Ignored | UnsetType = UNSET


class OllamaEmbedOne(msgspec.Struct, frozen=True):
    """A text to embed, in the older form."""

    model: ModelName
    prompt: str | None = None


class OllamaModelName(msgspec.Struct, frozen=True):
    """The model that a request is about; ``name`` is the older field."""

    model: Annotated[str, Meta(max_length=256)] = ""
    name: Annotated[str, Meta(max_length=256)] = ""
    stream: bool | None = None
