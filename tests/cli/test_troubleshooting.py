"""The page about messages: programs print each one that it quotes."""

import re
from pathlib import Path

import pytest

from cli.source_messages import occurs

pytestmark = pytest.mark.long  # it parses the whole source

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)")


def quoted_messages() -> list[str]:
    """Return the messages in the first cells of the tables."""
    cells = re.findall(r"^\| (.+?) \| ", PAGE.read_text("utf-8"), re.MULTILINE)
    return [text.strip() for cell in cells for _, text in QUOTED.findall(cell)]


def test_each_quoted_message_is_in_the_source() -> None:
    messages = quoted_messages()

    assert len(messages) > 35
    assert not [each for each in messages if not occurs(each)]


@pytest.mark.parametrize(
    "message", ["the coordinator is asleep: wake it", "no API key: … or a song"]
)
def test_other_messages_are_noticed(message: str) -> None:
    assert not occurs(message)
