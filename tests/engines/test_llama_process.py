"""The errors in the log of the embedded engine's process."""

import pytest

from shoal.engines.llama_process import first_error, last_unformatted_line

LOG = """\
0.00.001 W srv init: no API key is set
0.00.002 E gguf_init_from_file: failed to open GGUF file 'x.gguf'
0.00.003 E llama_model_load: error loading model: something more general
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LOG, "failed to open GGUF file 'x.gguf'"),
        ("0.1 E llama_model_load: error loading model: cut short\n", "cut short"),
        ("0.1 I srv init: all is well\n", None),
        ("", None),
    ],
)
def test_first_error_of_a_log_is_reported(log: str, message: str | None) -> None:
    assert first_error(log) == message


@pytest.mark.parametrize(
    ("log", "suffix"),
    [
        ("", ""),
        (LOG, ""),
        (
            LOG + "ggml.c:7: GGML_ASSERT(x) failed\n",
            ": ggml.c:7: GGML_ASSERT(x) failed",
        ),
    ],
)
def test_unformatted_last_line_is_reported(log: str, suffix: str) -> None:
    assert last_unformatted_line(log) == suffix
