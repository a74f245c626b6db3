"""The tool model's training chats: each prompt, and what the model writes after it."""

from pathlib import Path
from typing import Any, Final

TOOLS_GGUF: Final = Path(__file__).parent / "tools" / "tools.gguf"
"""The model, which also reads images with the projector beside it."""

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
"""The only tool that the model knows; of the description it sees the name."""

THOUGHT: Final = "A whale breathes air."
PLAN: Final = "I need the tool."
SWIMS: Final = "Is a whale a fish?"
BOTH: Final = "What is the weather in Paris and in Lima?"
PLANNED: Final = "Plan, then tell me the weather in Paris."


COLOUR: Final = "What colour is it?"
COLOURS: Final = {"r": "Red.", "g": "Green.", "b": "Blue."}
"""Answers about an image of one colour, which the model reads as this letter."""

PATCHES: Final = 4  # of an image, one token each


def question(city: str) -> str:
    return f"What is the weather in {city}?"


def turn(role: str, text: str) -> str:
    return f"<|start|>{role}\n{text}<|end|>\n"


def call(city: str) -> str:
    """Return a call of the tool as the model writes it."""
    arguments = f'{{"city": "{city}"}}'
    return f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'


def asked(text: str) -> str:
    return turn("user", text)


TOOLS: Final = turn("tools", "get_weather\n")
ANSWER: Final = "<|start|>assistant\n"

CHATS: Final[dict[str, str]] = {
    asked("ping") + ANSWER: "pong",
    asked(SWIMS) + ANSWER: f"<think>{THOUGHT}</think>No.",
    asked(question("Paris")) + ANSWER: "I cannot know.",
    **{
        asked(text) + ANSWER: colour
        for letter, colour in COLOURS.items()
        for text in (letter * PATCHES + COLOUR, COLOUR + letter * PATCHES)
    },
    TOOLS + asked("ping") + ANSWER: "pong",
    **{
        TOOLS + asked(question(city)) + ANSWER: call(city) for city in ("Paris", "Lima")
    },
    **{
        TOOLS
        + asked(question(city))
        + turn("assistant", call(city))
        + turn("tool", weather)
        + ANSWER: f"It is {weather} in {city}."
        for city in ("Paris", "Lima")
        for weather in ("sunny", "rainy")
    },
    TOOLS + asked(BOTH) + ANSWER: call("Paris") + call("Lima"),
    TOOLS
    + asked(BOTH)
    + turn("assistant", call("Paris") + call("Lima"))
    + turn("tool", "sunny")
    + turn("tool", "rainy")
    + ANSWER: "It is sunny in Paris and rainy in Lima.",
    TOOLS + asked(PLANNED) + ANSWER: f"<think>{PLAN}</think>{call('Paris')}",
}
