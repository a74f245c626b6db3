"""How deep the JSON of others may be nested, so that nothing that walks it fails."""

NESTING_MAX = 100  # lists and objects in each other; engines bear no more either


def is_deep(value: object) -> bool:
    """Say whether a value is nested more deeply than ``NESTING_MAX``."""
    level = [value]
    for _ in range(NESTING_MAX + 1):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def may_be_deep(text: str) -> bool:
    """Say whether JSON can be that deep, by its brackets: quick, and seldom true."""
    return text.count("[") + text.count("{") > NESTING_MAX
