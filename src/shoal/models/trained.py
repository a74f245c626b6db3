"""Puts trained models into the models folder, as files for the embedded engine."""

from pathlib import Path

from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.engines.gguf_export import write_gguf_of_folder
from shoal.engines.gguf_vocabulary import byte_vocabulary
from shoal.models.library import StoredModel, stored_model
from shoal.models.names import model_folder_name


def add_trained_model(
    models: Path,
    name: str,
    trained: Path,
    *,
    of_bytes: bool = False,
    replace: bool = False,
) -> StoredModel:
    """Write the model of a folder as GGUF into the folder of models, and return it.

    ``trained`` has Hugging Face's files: ``config.json``, ``*.safetensors`` and
    ``tokenizer.json``; ``of_bytes`` says that its tokens are those of
    ``byte_vocabulary`` instead.  An engine that runs the model of that name keeps the
    old file until it ends.

    Raises InvalidRequest for names that are not valid, and ConfigError if the model
    exists and must not be replaced, is not a Llama model, or cannot be written.
    """
    folder = models / model_folder_name(name)
    file = folder / f"{folder.name}.gguf"
    if not replace and (folder.exists() or folder.with_suffix(".gguf").exists()):
        raise ConfigError(f"{folder} exists already; give --replace to replace it")
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = byte_vocabulary() if of_bytes else None
        write_gguf_of_folder(file, trained, vocabulary=vocabulary)
        return stored_model(folder, name)
    except (InvalidRequest, OSError, ImportError) as error:
        if not existed and folder.is_dir():
            folder.rmdir()
        raise ConfigError(_reason(error, folder)) from error


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, ImportError):
        return f"{error}; to write models: {install_extra('train')}"
    if isinstance(error, OSError):
        return f"cannot write to {folder}: {error.strerror or error}"
    return str(error)
