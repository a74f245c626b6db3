"""What a server said that it has, and then refused: not offered until it works."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace

from shoal.domain.work import Chat, Completion, Embedding, Inference, Kind
from shoal.domain.worker import Model

TRY_AGAIN = 60.0  # seconds between trials of something that was refused
DOUBTS_MAX = 1024  # beyond the models of one server, times what can be done with them


class Doubts:
    """Models, and kinds of work with them, that a server refused lately."""

    def __init__(self) -> None:
        self._again: dict[tuple[str, Kind], float] = {}  # on the loop's clock

    def add(self, name: str, kinds: Iterable[Kind]) -> None:
        """Doubt what was just refused."""
        again = asyncio.get_running_loop().time() + TRY_AGAIN
        for kind in kinds:
            if len(self._again) < DOUBTS_MAX or (name, kind) in self._again:
                self._again[name, kind] = again

    def remove(self, name: str, kind: Kind) -> None:
        """Believe it again."""
        self._again.pop((name, kind), None)

    def keep(self, names: Collection[str]) -> None:
        """Forget about models that are not there any more."""
        for name, kind in list(self._again):
            if name not in names:
                del self._again[name, kind]

    def due(self) -> list[tuple[str, Kind]]:
        """Return what should be tried again now."""
        now = asyncio.get_running_loop().time()
        return [each for each, again in self._again.items() if again <= now]

    def without(self, model: Model) -> Model | None:
        """Return the model with what is left of it; None if that is nothing."""
        doubted = {kind for name, kind in self._again if name == model.name}
        if not doubted & model.kinds:
            return model
        left = model.kinds - doubted
        return replace(model, kinds=left) if left else None


def trial_of(name: str, kind: Kind) -> Inference:
    """Return the least job of a kind."""
    match kind:
        case Kind.CHAT:
            return Chat(name, ({"role": "user", "content": "a"},), max_tokens=1)
        case Kind.COMPLETION:
            return Completion(name, "a", max_tokens=1)
        case Kind.EMBEDDING:
            return Embedding(name, ("a",))
        case Kind.TASK | Kind.CALL | Kind.LANE:
            raise AssertionError(f"no model does a {kind.value} by itself")
