"""Which form errors have at which paths."""

from collections.abc import Mapping

from shoal.gateway.anthropic.errors import ANTHROPIC_ERRORS
from shoal.gateway.http.errors import OPENAI_ERRORS, PLAIN_ERRORS, ErrorForm

ERROR_FORMS: Mapping[str, ErrorForm] = {
    "/v1/health": PLAIN_ERRORS,
    "/v1/quote": PLAIN_ERRORS,
    "/v1/jobs": PLAIN_ERRORS,
    "/v1/trust": PLAIN_ERRORS,
    "/ollama": PLAIN_ERRORS,
    "/api": PLAIN_ERRORS,  # where clients of Ollama go without the prefix
    "/v1/messages": ANTHROPIC_ERRORS,
}
"""By paths, with all below; others have OpenAI's."""


def error_form(path: str) -> ErrorForm:
    """Return the form of errors at a path."""
    return next(
        (
            form
            for each, form in ERROR_FORMS.items()
            if path == each or path.startswith(f"{each}/")
        ),
        OPENAI_ERRORS,
    )


def ollama_port_error_form(path: str) -> ErrorForm:
    """Return the form of errors at a path of the port of Ollama's API."""
    return error_form(path if path.startswith("/v1/") else f"/ollama{path}")
