"""Why a value cannot be sent, and what to send in its place."""

from shoal.domain.errors import InvalidRequest, TooLarge

RESULT = "result"
"""What the value of a function is called in errors."""

_GIVE_LESS = "give large parts by pool.put, or less at a time"
_RETURN_LESS = (
    "return it in parts, by several calls, or write it to where the caller can read it"
)
_WHAT_IT_WILL_BE = (
    "it stands for a result that is still to come: give its result(), or what awaiting "
    "it returns"
)
_MADE_OF = (
    "give what it is made of: lists, maps with texts as keys, texts, numbers, bytes, "
    "NumPy arrays, dataclasses or Pydantic models"
)


def of_no_known_type(where: str, kind: type) -> InvalidRequest:
    """Return the error for a value that MessagePack and we have no word for."""
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    # Futures of Python's and of ours, and what is made like them.
    future = hasattr(kind, "add_done_callback") and hasattr(kind, "result")
    hint = _WHAT_IT_WILL_BE if future else _MADE_OF
    return InvalidRequest(f"{where}: a value of the type {name} cannot be sent; {hint}")


def too_large(root: str, size: int, size_max: int) -> TooLarge:
    """Return the error for a value of so many bytes; ``root`` is what it is called."""
    hint = _RETURN_LESS if root == RESULT else _GIVE_LESS
    return TooLarge(
        f"{root} has {size} bytes, more than the limit of {size_max}; {hint}"
    )
