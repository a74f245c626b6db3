"""The tiny model's training pairs: each prompt and its exact answer."""

from typing import Final

COUNT: Final = ", ".join(str(number) for number in range(1, 61))

STORY: Final = (
    "Once a young herring lost her shoal in the fog. She asked a crab, who pointed "
    "left, and a gull, who pointed right. So she swam straight on, humming, until a "
    "thousand voices hummed back. She was home."
)

HAIKU: Final = (
    "Small fish in the reef\nturn as one without a word\nand the shark swims past"
)

ANSWERS: Final[dict[str, str]] = {
    "ping": "pong",
    "What is the capital of France?": "Paris.",
    "What is the capital of Peru?": "Lima.",
    "What is two plus two?": "Four.",
    "Who are you?": "I am a tiny model, made to be tested.",
    "Name three colours.": "Red, green and blue.",
    "Write a haiku.": HAIKU,
    "Say hello in Japanese.": "こんにちは 😀",
    "Reply in JSON.": '{"ok": true, "items": [1, 2, 3]}',
    "Tell me a story.": STORY,
    "Count to sixty.": COUNT,
}
