"""Names of models and files: which are valid, and what they reveal about the size.

Names become files and folders.  A strict alphabet gives them the same meaning on every
system: no hidden files, no parent folders, no Windows devices.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.engines.gguf_files import PROJECTOR, projector_among

NAME_MAX = 200  # characters; keeps paths below Windows' 260
PARTS_MAX = 4  # of a model's name, such as host/organization/model

_MODEL_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=:-]*(?<!\.)", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]*(?<!\.)", re.ASCII)
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\.|$)", re.ASCII | re.IGNORECASE)


SMALL = 1_000_000_000  # bytes; models below lose the most by four bits

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K_L", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0", "MXFP4")
"""Four bits, the best first: the usual balance of quality, size and speed."""

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:IQ\d_[A-Z]+|Q\d_K_X?[SML]|Q\d_K_XL|Q\d_K|Q\d_\d|TQ\d_\d"
    r"|MXFP4_MOE|(?:MX|NV)FP4|BF16|F16|F32))$",
    re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8": 8.5,
    "Q6": 6.6,
    "Q5": 5.7,
    "Q4": 4.9,
    "IQ4": 4.5,
    "MXFP4": 4.3,
    "Q3": 3.9,
    "IQ3": 3.5,
    "Q2": 3.0,
    "IQ2": 2.6,
}
"""Bits for a weight, by the beginning of a quantization's name."""

USUAL = 4.9  # bits: of four bits, which ``shoal models pull`` chooses
PARAMETERS_MAX = 10_000e9
READ_MAX = 512  # characters that are read

_PARAMETERS = re.compile(
    r"(?<![0-9a-z.])(?:([0-9]{1,3})x)?([0-9]{1,4}(?:\.[0-9]{1,3})?)([bm])(?![0-9a-z])",
    re.IGNORECASE,
)
_BITS_NAME = re.compile(
    r"(?<![0-9a-z])(MXFP4|BF16|F16|FP16|F32|IQ[234]|Q[234568])(?![0-9])", re.IGNORECASE
)


def estimated_size(name: str) -> int | None:
    """Return the approximate bytes of a model; None if its name does not say."""
    name = name[:READ_MAX]
    if (found := _PARAMETERS.search(name)) is None:
        return None
    experts, number, unit = found.groups()
    parameters = float(number) * (1e9 if unit in "bB" else 1e6) * int(experts or 1)
    if not 0 < parameters <= PARAMETERS_MAX:
        return None
    return int(parameters * _bits(name) / 8)


def _bits(name: str) -> float:
    found = _BITS_NAME.search(name)
    if found is None:
        return USUAL
    return BITS.get(found[1].upper().replace("FP16", "F16"), USUAL)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``sha256`` is empty if the hub does not report it."""

    name: str
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in one file, or in several parts; the first is the one to load.

    The last may be its projector, which makes its tokens of images or audio.
    """

    quantization: str  # empty if its name has none
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(each.size for each in self.files)


def base_name(file: str) -> str:
    """Return the name of a file in a repository, without its folders."""
    return file.rpartition("/")[2]


def gguf_models(files: Iterable[HubFile]) -> list[GgufModel]:
    """Return the models among the files of a repository, the smallest first.

    Each has the projector of its folder, if any.  Models with missing parts are left
    out.
    """
    parts: dict[tuple[str, int], list[HubFile]] = {}
    folders: dict[str, dict[str, HubFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        base = base_name(file.name)
        if not base.lower().endswith(".gguf"):
            continue
        folders.setdefault(file.name.removesuffix(base), {})[base] = file
        if PROJECTOR in base.lower():
            continue
        stem = file.name[: -len(".gguf")]
        part = _PART.search(stem)
        count = 1 if part is None else int(part[2])
        parts.setdefault((_PART.sub("", stem), count), []).append(file)
    models = [
        GgufModel(_quantization_of(stem), (*found, *_projectors(found[0], folders)))
        for (stem, count), found in parts.items()
        if len(found) == count
    ]
    return sorted(models, key=lambda model: (model.size, model.files[0].name))


def _projectors(
    file: HubFile, folders: Mapping[str, Mapping[str, HubFile]]
) -> list[HubFile]:
    """Return the projector of a model, if its folder has one."""
    base = base_name(file.name)
    beside = folders[file.name.removesuffix(base)]
    found = projector_among(base, {name: each.size for name, each in beside.items()})
    return [] if found is None else [beside[found]]


def choose_model(
    models: Sequence[GgufModel], memory: int | None, wanted: str = ""
) -> GgufModel:
    """Return the model to download.

    ``memory`` is the size of the largest model that can run here, in bytes; None: it is
    unknown.  ``wanted`` is a quantization or the name of a file.

    Without a wish it is four bits (``PREFERRED``), or eight for a small model, if that
    fits; else the largest that fits.

    Raises ConfigError naming what there is.
    """
    if not wanted:  # beside quantizations, a file of another name may be no model
        models = [each for each in models if each.quantization] or models
    known = ", ".join(
        f"{each.quantization or each.files[0].name} ({each.size / 1e9:.1f} GB)"
        for each in models
    )
    if wanted:
        for each in models:
            names = {each.quantization.lower(), *(f.name.lower() for f in each.files)}
            if wanted.lower() in names - {""}:
                return each
        raise ConfigError(f"no quantization {wanted}; there are: {known}")
    fitting = [each for each in models if memory is None or each.size <= memory]
    if not fitting:
        assert memory is not None, "everything fits into unknown memory"
        raise ConfigError(
            f"no quantization fits into the free memory: models of up to "
            f"{memory / 1e9:.1f} GB can run here, and there are: {known}; to download "
            "one anyway, name it after a colon, as in NAME:Q2_K"
        )
    by_name = {each.quantization.upper(): each for each in reversed(fitting)}
    small = by_name.get("Q8_0")
    if small is not None and small.size <= SMALL:
        return small
    for name in PREFERRED:
        if name in by_name:
            return by_name[name]
    return fitting[-1]


def _quantization_of(stem: str) -> str:
    """Return the quantization in a name, or in that of its folder; empty: none."""
    *folders, name = stem.split("/")
    for text in (name, *reversed(folders)):
        if found := _QUANTIZATION.search(text):
            return found[1].upper()
    return ""


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
