"""The options of chats and completions: one table for the API, the pool and the wires.

An option is a field of OpenAI's request that changes how a model answers.  A new one is
a row here; wires and engines that encode an option differently convert it in their
codec.  The token limit and the temperature are not rows but fields of ``Chat`` and
``Completion``: every wire and every engine has them, each in a form of its own, so that
no worker has to be chosen for them.

Source: OpenAI's API reference, "Create chat completion" and "Create completion".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class Feature(Enum):
    """Something a worker can do with a job beyond producing text."""

    CONTINUE = "continue"  # continues a partial answer
    OPTIONS = "options"  # obeys sampling options other than the temperature
    STOP = "stop"  # ends at the caller's stop strings
    TOOLS = "tools"  # calls functions, and reads their results
    SCHEMA = "schema"  # writes JSON, to a schema if there is one
    LOGPROBS = "logprobs"  # returns the log probabilities of tokens
    CHOICES = "choices"  # returns several answers to one prompt
    ECHO = "echo"  # returns the prompt of a completion, with its log probabilities
    IMAGES = "images"
    AUDIO = "audio"
    FIELDS = "fields"  # passes fields on that Shoal does not know
    VALUES = "values"  # takes arrays and other values that only Shoal's peers know
    CODE = "code"  # runs functions that are sent along

    __hash__ = object.__hash__  # members are singletons, hashed for every job


class OptionType(Enum):
    """The JSON value of an option."""

    NUMBER = "number"
    INTEGER = "integer"
    FLAG = "flag"
    TEXT = "text"
    OBJECT = "object"
    NUMBERS = "numbers"  # an object whose values are numbers
    STRUCTURED = "structured"  # a form of its own, which the API checks


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """An option, and its requirements.

    ``minimum`` and ``maximum`` bound a number, or the numbers of ``NUMBERS``;
    ``maximum`` also bounds the length of a text.  A ``neutral`` value has no effect and
    is never passed on.  A worker without the feature that an option ``needs`` would
    give a wrong answer; other options only influence the style.
    """

    name: str
    type: OptionType
    minimum: float | None = None
    maximum: float | None = None
    neutral: tuple[object, ...] = ()
    needs: Feature | None = None
    chat: bool = True
    completion: bool = True

    def is_requested(self, value: object) -> bool:
        """Return whether a value has an effect: it is neither null nor neutral."""
        return value is not None and not any(
            # 0 and 1 equal False and True, and mean something else.
            value == each and isinstance(value, bool) is isinstance(each, bool)
            for each in self.neutral
        )


OPTIONS = (
    Option("top_p", OptionType.NUMBER, 0, 1),
    Option("seed", OptionType.INTEGER, -INT64_MAX - 1, INT64_MAX),
    Option("presence_penalty", OptionType.NUMBER, -2, 2),
    Option("frequency_penalty", OptionType.NUMBER, -2, 2),
    Option(
        *("logit_bias", OptionType.NUMBERS, -100, 100),
        neutral=({},),
        needs=Feature.OPTIONS,
    ),
    Option("n", OptionType.INTEGER, 1, 128, neutral=(1,), needs=Feature.CHOICES),
    Option("best_of", OptionType.INTEGER, 1, 128, neutral=(1,), chat=False),
    Option(
        *("echo", OptionType.FLAG), neutral=(False,), needs=Feature.ECHO, chat=False
    ),
    Option("suffix", OptionType.TEXT, neutral=("",), chat=False),
    Option(
        *("logprobs", OptionType.FLAG),
        neutral=(False,),
        needs=Feature.LOGPROBS,
        completion=False,
    ),
    Option(
        *("logprobs", OptionType.INTEGER, 0, 20),
        neutral=(False,),
        needs=Feature.LOGPROBS,
        chat=False,
    ),
    Option("top_logprobs", OptionType.INTEGER, 0, 20, completion=False),
    Option("tool_choice", OptionType.STRUCTURED, completion=False),
    Option("parallel_tool_calls", OptionType.FLAG, completion=False),
    Option("reasoning_effort", OptionType.TEXT, maximum=32, completion=False),
    Option("verbosity", OptionType.TEXT, maximum=32, completion=False),
    # Not OpenAI's, but known to most engines.
    Option("top_k", OptionType.INTEGER, -1, INT32_MAX),
    Option("min_p", OptionType.NUMBER, 0, 1),
    Option("repetition_penalty", OptionType.NUMBER, 0, 10),
    Option("repeat_penalty", OptionType.NUMBER, 0, 10),
    Option("repeat_last_n", OptionType.INTEGER, -1, INT32_MAX),
    Option("typical_p", OptionType.NUMBER, 0, 1),
    Option("tfs_z", OptionType.NUMBER, 0, 100),
    Option("mirostat", OptionType.INTEGER, 0, 2),
    Option("mirostat_tau", OptionType.NUMBER, 0, 100),
    Option("mirostat_eta", OptionType.NUMBER, 0, 10),
    Option("chat_template_kwargs", OptionType.OBJECT, completion=False),
    Option("stop", OptionType.STRUCTURED, neutral=([], ""), needs=Feature.STOP),
    Option(
        *("tools", OptionType.STRUCTURED),
        neutral=([],),
        needs=Feature.TOOLS,
        completion=False,
    ),
    Option(
        *("response_format", OptionType.STRUCTURED),
        neutral=({"type": "text"},),
        needs=Feature.SCHEMA,
        completion=False,
    ),
)
"""All options.  A job holds its options in this order."""

CHAT_OPTIONS = tuple(each for each in OPTIONS if each.chat)
COMPLETION_OPTIONS = tuple(each for each in OPTIONS if each.completion)

SAMPLING_OPTIONS = tuple(
    each
    for each in CHAT_OPTIONS
    if each.type in (OptionType.NUMBER, OptionType.INTEGER)
    and each.needs is None
    and each.name != "top_logprobs"
)
"""Those that only influence the style: they have one name and form in all APIs."""

UNUSED = frozenset(
    {
        # OpenAI's: notes, caches, speed and bookkeeping.
        *("metadata", "store", "user", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "service_tier"),
        # How a server loads a model, and what it reports beside the answer.
        *("keep_alive", "ttl", "num_ctx", "num_gpu", "num_thread", "num_batch"),
        *("num_keep", "main_gpu", "use_mmap", "use_mlock", "numa", "low_vram"),
        *("cache_prompt", "id_slot", "timings_per_token", "request_id"),
        *("penalize_newline", "truncate", "shift", "rope_frequency_base"),
        *("rope_frequency_scale", "num_gqa", "vocab_only", "f16_kv"),
        *("usage", "include_reasoning"),  # of OpenRouter
        # Of Codex and of Claude Code; Anthropic's are about its caches and servers.
        *("client_metadata", "max_tool_calls", "cache_control", "betas", "speed"),
        *("context_management", "inference_geo", "anthropic_version", "diagnostics"),
        # Open WebUI's, for itself.
        *("background_tasks", "chat_id", "features", "files", "filter_ids"),
        *("function_calling", "id", "message_id", "model_item", "params"),
        *("parent_id", "session_id", "tool_ids", "tool_servers", "variables"),
    }
)
"""Fields of programs' requests that change no answer: no engine needs them."""

_BY_NAME: Mapping[str, Option] = {each.name: each for each in OPTIONS}


def unknown_options(options: Iterable[str]) -> list[str]:
    """Return the names that are not options: fields that only an engine may know."""
    return [each for each in options if each not in _BY_NAME and each not in UNUSED]


def needed_features(options: Mapping[str, object]) -> set[Feature]:
    """Return the features that a worker needs to obey the options of a job."""
    wanted = {
        option.needs
        for name, value in options.items()
        if (option := _BY_NAME.get(name)) is not None
        and option.needs is not None
        and option.is_requested(value)
    }
    return wanted | {Feature.FIELDS} if unknown_options(options) else wanted
