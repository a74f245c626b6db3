"""The traits of each job kind, and the sets of kinds that share one.

``_traits`` matches every kind: the type check fails until a new one has its traits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.domain.work import (
    Call,
    CallStream,
    Chat,
    Completion,
    Embedding,
    JobKind,
    ModelOrder,
    Rerank,
    Task,
    Transcription,
    Work,
)


@dataclass(frozen=True, slots=True)
class _Traits:
    work: type[Work]
    is_inference: bool = False  # runs on a model
    generates_text: bool = False
    answers_in_numbers: bool = False
    calls_function: bool = False
    shared_with_pools: bool = True  # else it stays between a pool and its workers


def _traits(kind: JobKind) -> _Traits:
    match kind:
        case JobKind.CHAT:
            return _Traits(Chat, is_inference=True, generates_text=True)
        case JobKind.COMPLETION:
            return _Traits(Completion, is_inference=True, generates_text=True)
        case JobKind.EMBEDDING:
            return _Traits(Embedding, is_inference=True, answers_in_numbers=True)
        case JobKind.RERANK:
            return _Traits(Rerank, is_inference=True, answers_in_numbers=True)
        case JobKind.TRANSCRIPTION:
            return _Traits(Transcription, is_inference=True)
        case JobKind.TASK:
            return _Traits(Task)
        case JobKind.CALL:
            return _Traits(Call, calls_function=True)
        case JobKind.CALL_STREAM:
            return _Traits(CallStream, calls_function=True, shared_with_pools=False)
        case JobKind.MODEL:
            return _Traits(ModelOrder, shared_with_pools=False)


_TRAITS = {kind: _traits(kind) for kind in JobKind}

WORK_TYPES: Mapping[JobKind, type[Work]] = {
    kind: traits.work for kind, traits in _TRAITS.items()
}
INFERENCE_KINDS = frozenset(kind for kind in JobKind if _TRAITS[kind].is_inference)
TEXT_KINDS = frozenset(kind for kind in JobKind if _TRAITS[kind].generates_text)
NUMBER_KINDS = frozenset(kind for kind in JobKind if _TRAITS[kind].answers_in_numbers)
FUNCTION_KINDS = frozenset(kind for kind in JobKind if _TRAITS[kind].calls_function)
SHARED_KINDS = frozenset(kind for kind in JobKind if _TRAITS[kind].shared_with_pools)
