"""An engine that gives the one right answer, more or less quickly."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random

from shoal.domain.errors import JobError, Unavailable
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.work import Chat, Feature, Work, message_text
from shoal.domain.worker import CHAT_ONLY, ServedModel
from shoal.engines.engine import Finished, Item

STALL_MAX = 60.0  # seconds
PACE = (0.01, 0.4)  # seconds for a piece, from and to


def answer_to(prompt: str) -> list[str]:
    """Return the pieces of the one right answer to ``prompt``."""
    digest = hashlib.sha256(prompt.encode()).digest()
    pieces = 200 if "long" in prompt else 1 + digest[0] % 24
    return [f"{digest[n % 32]:x} {n} é" for n in range(pieces)]


def words_of(piece: AnswerPiece) -> str:
    """Return the text of a piece, whichever way it came."""
    return piece if isinstance(piece, str) else str(piece.fields["content"])


class SimEngine:
    """Answers as ``answer_to`` says, more or less quickly."""

    def __init__(
        self,
        model: str,
        slots: int,
        random: Random,
        *,
        continues: bool,
        refuses: float,
        stalls: float,
        pace: tuple[float, float] = PACE,
        runs: Counter[str] | None = None,
    ) -> None:
        self.slots = slots
        can = {Feature.OPTIONS, Feature.STOP}
        features = frozenset(can | ({Feature.CONTINUE} if continues else set()))
        self.models = (ServedModel(model, CHAT_ONLY, features),)
        self._random = random
        self._refuses = refuses  # which share of its jobs
        self._stalls = stalls  # at which share of its jobs
        self._runs = Counter[str]() if runs is None else runs
        self._pace = random.uniform(*pace)  # seconds for a piece

    async def start(self) -> None:
        pass

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        assert isinstance(work, Chat)
        prompt = message_text(work.messages[-1])
        self._runs[prompt] += 1
        if "poison" in prompt:
            raise JobError("the model cannot read this")
        if self._random.random() < self._refuses:
            raise Unavailable("the model is being loaded")
        if self._random.random() < self._stalls:
            await asyncio.sleep(self._random.uniform(0.0, STALL_MAX))
        whole = "".join(answer_to(prompt))
        assert whole.startswith(continues), "asked to continue another answer"
        written = 0
        for piece in answer_to(prompt):
            written += len(piece)
            if written <= len(continues):
                continue
            await asyncio.sleep(self._pace * self._random.uniform(0.5, 1.5))
            text = piece[-(written - len(continues)) :]
            yield Delta(0, {"content": text}) if "rich" in prompt else text
        yield Finished("stop", Usage(len(prompt), written))

    async def close(self) -> None:
        pass
