"""What a terminal may be shown of other people's texts."""

_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def shown(text: str) -> str:
    """Spell out control characters: names, errors and answers come from peers."""
    return text.translate(_CONTROLS)
