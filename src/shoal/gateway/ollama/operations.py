"""The table of Ollama's operations, below a path."""

from functools import partial

from shoal.domain.credentials import Scope
from shoal.gateway.http.media_types import NDJSON_TYPE, TEXT_TYPE
from shoal.gateway.http.operation import Authorized, Operation
from shoal.gateway.ollama import endpoints
from shoal.gateway.ollama.bodies import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedOne,
    OllamaGenerate,
    OllamaModelName,
)
from shoal.gateway.ollama.embeddings import OllamaEmbedding, OllamaEmbeddings
from shoal.gateway.ollama.models import (
    OllamaLoadedModels,
    OllamaModelInfo,
    OllamaModels,
    OllamaVersion,
)

API = "ollama"
"""The name of the API in the settings: ``--ollama-open`` and ``--ollama-port``."""

read = partial(Authorized, Scope.READ, open_wire=API)
use = partial(Authorized, Scope.USE, open_wire=API)

MANAGEMENT = (
    ("POST", "create"),
    ("POST", "copy"),
    ("DELETE", "delete"),
    ("POST", "push"),
    ("HEAD", "blobs/{digest}"),
    ("POST", "blobs/{digest}"),
)
"""What Ollama's clients do to the models of its machine."""


def ollama_operations(prefix: str) -> tuple[Operation, ...]:
    """Return the operations below ``prefix``, which is empty or begins with a slash."""
    return (
        # Clients ask both before they present a key.
        Operation(
            *("GET", f"{prefix}/", "Whether Ollama's API is here"),
            endpoints.show_running,
            media=TEXT_TYPE,
            documented=False,
        ),
        Operation(
            *("GET", f"{prefix}/api/version", "Show Ollama's version"),
            endpoints.show_version,
            answer=OllamaVersion,
        ),
        Operation(
            *("POST", f"{prefix}/api/chat", "Answer a chat as Ollama does"),
            use(endpoints.create_ollama_chat),
            body=OllamaChat,
            streams=True,
            stream_media=NDJSON_TYPE,
        ),
        Operation(
            *("POST", f"{prefix}/api/generate", "Complete a prompt as Ollama does"),
            use(endpoints.create_ollama_completion),
            body=OllamaGenerate,
            streams=True,
            stream_media=NDJSON_TYPE,
        ),
        Operation(
            *("POST", f"{prefix}/api/embed", "Embed texts as Ollama does"),
            use(endpoints.embed_texts),
            answer=OllamaEmbeddings,
            body=OllamaEmbed,
        ),
        Operation(
            *("POST", f"{prefix}/api/embeddings", "Embed a text as Ollama did"),
            use(endpoints.embed_text),
            answer=OllamaEmbedding,
            body=OllamaEmbedOne,
        ),
        Operation(
            *("GET", f"{prefix}/api/tags", "List the models as Ollama does"),
            read(endpoints.list_ollama_models),
            answer=OllamaModels,
        ),
        Operation(
            *("GET", f"{prefix}/api/ps", "List the models that workers have loaded"),
            read(endpoints.list_loaded_models),
            answer=OllamaLoadedModels,
        ),
        Operation(
            *("POST", f"{prefix}/api/show", "Describe a model as Ollama does"),
            read(endpoints.show_ollama_model),
            answer=OllamaModelInfo,
            body=OllamaModelName,
        ),
        Operation(
            *("POST", f"{prefix}/api/pull", "Check that the pool has a model"),
            read(endpoints.pull_model),
            body=OllamaModelName,
            streams=True,
            stream_media=NDJSON_TYPE,
        ),
        *(
            Operation(
                *(method, f"{prefix}/api/{path}", "Refuse to manage models"),
                use(endpoints.refuse_management),
                documented=False,
            )
            for method, path in MANAGEMENT
        ),
    )
