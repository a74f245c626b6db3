"""The actions that a command has, such as ``ls`` and ``create``."""

import argparse
from typing import Any


def add_action(actions: Any, name: str, does: str) -> argparse.ArgumentParser:
    """Add one to the parser's ``actions``, which argparse has no type for.

    What it does is said both in the command's help and in its own.
    """
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}."
    )
    return action
