"""One trace, from a client over the coordinator and a worker to the worker's engine."""

from collections.abc import Iterator

import pytest

from live.collector import Collector
from live.programs import GatedModel, Programs, eventually, text_in
from models.tiny_answers import ANSWERS
from shoal.domain.trace_context import read_traceparent

CLIENT_SPAN = "00f067aa0ba902b7"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"
QUESTION, ANSWER = max(ANSWERS.items(), key=lambda pair: len(pair[1]))


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture
def fast_model() -> Iterator[GatedModel]:
    model = GatedModel(pause=1 << 20)
    yield model
    model.close()


def test_takeover_is_one_trace_from_the_client_to_the_engines(
    programs: Programs,
    collector: Collector,
    slow_model: GatedModel,
    fast_model: GatedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    pool = programs.serve("--log-level", "info")
    first = pool.joined("first", *slow_model.flags)

    with (
        pool.client() as client,
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,  # another worker may repeat the answer
            stream=True,
            extra_headers={"traceparent": TRACEPARENT},
        ) as stream,
    ):
        pieces = text_in(stream)
        text = next(pieces)
        pool.joined("second", *fast_model.flags)
        first.kill()
        text += "".join(pieces)
    collector.wait_for(
        lambda spans: (
            sum(span.service == "shoal" for span in spans) >= 5
            and any(span.service == "shoal-worker" for span in spans)
        )
    )

    assert text == "".join(ANSWER)
    assert {span.trace_id for span in collector.spans} == {TRACE}
    (request,) = [span for span in collector.spans if span.name.startswith("POST")]
    assert (request.kind, request.parent_id) == ("SERVER", CLIENT_SPAN)
    assert request.attributes["http.route"] == "/v1/chat/completions"
    waits = [span for span in collector.spans if span.name == "queue"]
    assert [span.parent_id for span in waits] == [request.span_id] * 2
    lost, done = sorted(
        (span for span in collector.spans if span.kind == "CLIENT"),
        key=lambda span: span.attributes["shoal.lease"],
    )
    assert lost.name == done.name == "chat tiny"
    assert lost.parent_id == done.parent_id == request.span_id
    assert lost.failed
    assert lost.attributes["error.type"] == "lost"
    assert lost.events == ["first output"]
    assert not done.failed
    assert done.attributes["gen_ai.operation.name"] == "chat"
    assert done.attributes["gen_ai.provider.name"] == "shoal"
    assert done.attributes["gen_ai.request.model"] == "tiny"
    assert done.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert done.attributes["gen_ai.usage.output_tokens"] == len(ANSWER)
    (worked,) = [span for span in collector.spans if span.service == "shoal-worker"]
    assert (worked.kind, worked.parent_id) == ("SERVER", done.span_id)
    assert worked.attributes["gen_ai.usage.output_tokens"] == len(ANSWER)
    (header,) = fast_model.traceparents
    assert header == f"00-{TRACE}-{worked.span_id}-01"
    assert f"trace='{TRACE}'" in pool.program.errors
    # Neither the question nor the answer is in what was sent.
    sent = b"".join(collector.bodies)
    assert QUESTION.encode() not in sent
    assert ANSWER[:20].encode() not in sent


def test_without_a_collector_engines_continue_the_span_of_the_client(
    programs: Programs, fast_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("one", *fast_model.flags)

    with pool.client() as client:
        for traceparent in (TRACEPARENT, "00-0-0-01", ""):
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": QUESTION}],
                extra_headers={"traceparent": traceparent} if traceparent else {},
            )

    assert fast_model.traceparents == [TRACEPARENT, "", ""]


def test_a_trace_that_a_client_does_not_sample_is_continued_and_not_exported(
    programs: Programs,
    collector: Collector,
    fast_model: GatedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    pool = programs.serve("--otlp-endpoint", collector.url)
    pool.joined("one", *fast_model.flags, "--otlp-endpoint", collector.url)

    with pool.client() as client:
        for traceparent in (f"00-{TRACE}-{CLIENT_SPAN}-00", ""):
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": QUESTION}],
                extra_headers={"traceparent": traceparent} if traceparent else {},
            )
    collector.wait_for(lambda spans: len(spans) >= 4)

    left_out, own = map(read_traceparent, fast_model.traceparents)
    assert left_out is not None
    assert own is not None
    assert (left_out.trace_id, left_out.sampled) == (TRACE, False)
    assert own.sampled
    assert {span.trace_id for span in collector.spans} == {own.trace_id}
    assert len(collector.spans) == 4  # request, queue, attempt and the worker's


def test_a_collector_that_is_down_delays_nothing(
    programs: Programs, fast_model: GatedModel
) -> None:
    pool = programs.serve("--otlp-endpoint", "http://127.0.0.1:9", "--drain", "1")
    worker = pool.joined("one", *fast_model.flags)

    with pool.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}]
        )

    assert answer.choices[0].message.content == "".join(ANSWER)
    assert worker.terminate() == 0
    eventually(lambda: not pool.workers(), "the worker has left")
    assert pool.program.terminate() == 0
