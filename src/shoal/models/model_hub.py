"""Downloads models from the hub of Hugging Face, or a mirror (``HF_ENDPOINT``).

Files go to the hub's own cache, which other programs share and ``shoal join`` searches.
A download that ended early is resumed, and each file is compared with its SHA-256.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.installation import this_installation
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import HubModel
from shoal.models.names import GgufModel, HubFile, choose_model, gguf_models

OK, PARTIAL_CONTENT = 200, 206  # of HTTP
SPACE_RESERVE = 1 << 28  # bytes that a download leaves free
SUGGESTED_MAX = 5  # repositories that a message names
OFFLINE_WAYS = (
    "without the hub: copy a GGUF file here, for shoal join --model NAME=FILE; or copy "
    "a model of another machine: shoal models get NAME --from http://HOST:4010; or "
    "name a mirror: HF_ENDPOINT=https://…"
)
_NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?"
    r"([\w.-]+)/([\w.-]+)(?::([\w.-]+))?/?",
    re.ASCII,
)

OnProgress = Callable[[int], None]
"""Receives the number of bytes that arrived since the last call."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and the quantization that was asked for; empty: any."""

    repository: str
    quantization: str = ""


def parse_hub_name(text: str) -> HubName | None:
    """Return what ``ORGANIZATION/NAME[:QUANTIZATION]`` names; None if it is not one."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    return HubName(f"{found[1]}/{found[2]}", found[3] or "")


class ModelHub:
    """The hub at ``endpoint``; by default that of ``HF_ENDPOINT``.

    ``public_only``: it gets no token of this user.  Raises ConfigError if its library
    is not installed.
    """

    def __init__(
        self, endpoint: str | None = None, *, public_only: bool = False
    ) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise ConfigError(
                "downloading models needs the package huggingface_hub: "
                + this_installation().add_packages("huggingface_hub")
            ) from error
        self._token = False if public_only else None  # None: that of this user
        self._api: HfApi = HfApi(endpoint, self._token, library_name="shoal")
        self._access = "pull it on that machine" if public_only else "set HF_TOKEN"

    @property
    def endpoint(self) -> str:
        """The URL of the hub."""
        return str(self._api.endpoint)

    def models(self, repository: str) -> list[GgufModel]:
        """Return the models of a repository, the smallest first.

        Raises ConfigError if it does not exist, is not accessible or has none;
        Unavailable if the hub is unreachable.
        """
        return self._revision(repository, None)[1]

    def find(self, model: HubModel) -> GgufModel:
        """Return the files of a model of some revision.

        Raises ConfigError if the hub has no such file, or not its SHA-256; Unavailable
        if it is unreachable.
        """
        if not model.is_usable:
            shown = f"{model.repository}/{model.file}"
            raise ConfigError(f"{shown!a:.300} is no GGUF file of a repository")
        _, models = self._revision(model.repository, model.revision)
        for each in models:
            if each.files[0].name == model.file and all(f.sha256 for f in each.files):
                return each
        raise ConfigError(
            f"{model.repository} has no {model.file} with a SHA-256 in the revision "
            f"{model.revision}"
        )

    def locate(self, name: HubName) -> HubModel:
        """Return where the model of a name is now: what ``find`` finds later.

        Raises ConfigError, Unavailable.
        """
        revision, models = self._revision(name.repository, None)
        model = choose_model(models, None, name.quantization)
        file = model.files[0].name
        return HubModel(name.repository, file, revision, model.size)

    def _revision(
        self, repository: str, revision: str | None
    ) -> tuple[str, list[GgufModel]]:
        """Return the hash of a revision, by default the latest, and its models."""
        with self._errors(repository):
            about = self._api.model_info(
                repository, revision=revision, files_metadata=True
            )
        files = [
            HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "")
            for each in about.siblings or ()
        ]
        found = gguf_models(files)
        if not found:
            raise ConfigError(
                f"{repository} has no GGUF files, which the embedded engine runs; "
                + self._suggestions(repository.partition("/")[2])
            )
        return about.sha or "", found

    def suggest(self, text: str) -> str:
        """Return a sentence with repositories that a name could mean.

        Raises Unavailable if the hub is unreachable.
        """
        with self._errors(text):
            return self._suggestions(text)

    @property
    def cache(self) -> Path:
        """The folder in which the hub's library keeps models."""
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE)

    def has(self, repository: str, model: GgufModel) -> bool:
        """Return whether the cache has all files of a model."""
        from huggingface_hub import try_to_load_from_cache

        return all(
            isinstance(try_to_load_from_cache(repository, each.name), str)
            for each in model.files
        )

    def keep(self, repository: str, sha256: str, file: Path) -> None:
        """Move a file of a model, which was copied from elsewhere, into the cache.

        The library finds it by its hash, and ``download`` compares that once more.
        Raises ConfigError if that fails.
        """
        folder = self.cache / f"models--{repository.replace('/', '--')}" / "blobs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(file, folder / sha256)
        except OSError as error:
            raise ConfigError(
                f"{folder}: {error.strerror}; choose another folder: HF_HOME=FOLDER"
            ) from error

    def download(self, repository: str, model: GgufModel, on: OnProgress) -> Path:
        """Download the files of a model; return the one to load.

        Raises ConfigError if the folder cannot be written, the disk has no space or a
        file is damaged; Unavailable if the hub is unreachable.
        """
        self.check_space(model)
        paths = [self._file(repository, each, on) for each in model.files]
        return paths[0]

    def read(
        self, repository: str, revision: str, file: str, offset: int, size: int
    ) -> bytes:
        """Read a part of a file of a revision; empty: of the latest.

        Raises ConfigError if it is not accessible; Unavailable if the hub is
        unreachable, or does not send that part.
        """
        from huggingface_hub import get_session, hf_hub_url

        url = hf_hub_url(
            repository, file, revision=revision or None, endpoint=self.endpoint
        )
        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        headers |= self._authorization()
        data = bytearray()
        with (
            self._errors(repository),
            get_session().stream(
                "GET", url, headers=headers, follow_redirects=True
            ) as response,
        ):
            if response.status_code != PARTIAL_CONTENT:
                raise Unavailable(
                    f"{self.endpoint} does not send a part of {file}: HTTP "
                    f"{response.status_code}"
                )
            for piece in response.iter_bytes():
                data += piece
                if len(data) > size:
                    break
        if len(data) != size:
            raise Unavailable(f"{self.endpoint} sent another part of {file}")
        return bytes(data)

    def _file(self, repository: str, file: HubFile, on: OnProgress) -> Path:
        from huggingface_hub import hf_hub_download

        with self._errors(repository):
            path = Path(
                hf_hub_download(
                    repository,
                    file.name,
                    endpoint=self.endpoint,
                    token=self._token,
                    tqdm_class=_progress_class(on),
                )
            )
        if file.sha256:
            with path.open("rb") as read:
                digest = hashlib.file_digest(read, "sha256").hexdigest()
            if digest != file.sha256:
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise ConfigError(
                    f"{file.name} of {repository} arrived damaged: its SHA-256 is "
                    f"{digest}, expected {file.sha256}; it is deleted, pull it again"
                )
        return path

    def check_space(self, model: GgufModel) -> None:
        """Raise ConfigError if a model does not fit, or the cache is not writable."""
        folder = self.cache
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise ConfigError(
                f"{folder}: {error.strerror}; choose another folder: HF_HOME=FOLDER"
            ) from error
        if model.size + SPACE_RESERVE > free:
            raise ConfigError(
                f"{folder} has {free / 1e9:.1f} GB of free space, and the model has "
                f"{model.size / 1e9:.1f} GB; make room, or choose another folder: "
                "HF_HOME=FOLDER"
            )

    def _suggestions(self, text: str) -> str:
        from huggingface_hub import get_session

        # Not the library's `list_models`: without a network it retries for half a
        # minute, and prints each attempt.
        response = get_session().get(
            f"{self.endpoint}/api/models",
            params={
                "search": text,
                "filter": "gguf",
                "sort": "downloads",
                "limit": SUGGESTED_MAX,
            },
            headers=self._authorization(),
        )
        if response.status_code != OK:
            raise Unavailable(
                f"{self.endpoint} does not search for {text}: HTTP "
                f"{response.status_code}; {OFFLINE_WAYS}"
            )
        found = [each["id"] for each in response.json()]
        if not found:
            return f"the hub has no GGUF models for {text!r}"
        return f"models with GGUF files for {text!r}: {', '.join(found)}"

    def _authorization(self) -> dict[str, str]:
        """Return the header with the user's token, if there is one, and it is sent."""
        from huggingface_hub import get_token

        token = get_token() if self._token is None else None
        return {"Authorization": f"Bearer {token}"} if token else {}

    @contextmanager
    def _errors(self, repository: str) -> Iterator[None]:
        """Raise the errors of the hub's library as Shoal's own."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{repository} is gated: accept its terms at "
                f"{self.endpoint}/{repository}, and {self._access}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(
                f"{repository} has not this revision (any more): {error}"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{self.endpoint} has no model {repository}, or it is private: check "
                f"the name, and {self._access} for a private one"
            ) from error
        except errors.HFValidationError as error:
            raise ConfigError(
                f"{repository} is no repository's name: {error}"
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise Unavailable(f"HF_HUB_OFFLINE is set; {OFFLINE_WAYS}") from error
        except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
            raise Unavailable(
                f"{self.endpoint} does not give {repository}: {error}; {OFFLINE_WAYS}"
            ) from error
        except (httpx2.RequestError, ConnectionError, TimeoutError) as error:
            raise Unavailable(
                f"cannot reach {self.endpoint}: {error}; {OFFLINE_WAYS}"
            ) from error
        except json.JSONDecodeError as error:
            raise Unavailable(
                f"{self.endpoint} answers, but not as a hub: a proxy or a sign-in page "
                f"may be in between; {OFFLINE_WAYS}"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{repository} cannot be pulled: {error}; make room, or choose another "
                "folder: HF_HOME=FOLDER"
            ) from error


def _progress_class(on: OnProgress) -> type[Any]:
    """Return the class of progress bars by which the library reports what arrived."""
    from tqdm import tqdm

    class Progress(tqdm):  # type: ignore[type-arg]
        """Shows nothing, and reports."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"file": _Nowhere(), "disable": False}
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)
            if self.n:
                on(int(self.n))  # the part that an earlier download left

        def update(self, n: float | None = 1) -> bool | None:
            on(int(n or 0))
            return super().update(n)

    return Progress


class _Nowhere:
    """A file to which bars are written."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
