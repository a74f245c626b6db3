"""Validates names of models and files, from peers and for sharing.

Names become files and folders.  A strict alphabet gives them the same meaning on every
system: no hidden files, no parent folders, no Windows devices.
"""

import re

from shoal.domain.errors import InvalidRequest

NAME_MAX = 200  # characters; keeps paths below Windows' 260
PARTS_MAX = 4  # of a model's name, such as host/organization/model

_MODEL_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=:-]*(?<!\.)", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*(?<!\.)", re.ASCII)
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\.|$)", re.ASCII | re.IGNORECASE)


def check_model_name(name: str) -> str:
    """Return a model's name, whose parts are separated by slashes.

    Raises InvalidRequest if it cannot become a folder.
    """
    parts = name.split("/")
    valid = all(_MODEL_PART.fullmatch(part) and _is_not_device(part) for part in parts)
    if valid and len(name) <= NAME_MAX and len(parts) <= PARTS_MAX:
        return name
    raise InvalidRequest(
        f"{_short(name)} is not a valid name of a model: expected letters, "
        f"digits and . _ - + @ = : with single slashes between at most {PARTS_MAX} "
        f"parts, {NAME_MAX} characters in all, each part beginning with a letter or "
        "digit",
        "model",
    )


def check_file_name(name: str) -> str:
    """Return the name of a model's file.

    Raises InvalidRequest unless it names a visible file in a single folder.
    """
    if len(name) <= NAME_MAX and _FILE.fullmatch(name) and _is_not_device(name):
        return name
    raise InvalidRequest(
        f"{_short(name)} is not a valid name of a model's file: expected letters, "
        f"digits and . _ - + @ =, at most {NAME_MAX} of them, beginning with a letter, "
        "a digit or _",
        "file",
    )


def model_folder_name(model: str) -> str:
    """Return the relative path of a model's folder, with slashes.

    A dash replaces the colon before a tag, which has a meaning in Windows paths.
    """
    return check_model_name(model).replace(":", "-")


def _is_not_device(part: str) -> bool:
    return _DEVICE.match(part) is None


def _short(name: str) -> str:
    shown = ascii(name)
    return shown if len(shown) <= 80 else f"{shown[:76]}...'"
