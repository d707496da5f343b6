"""The bytes of spans, read with OpenTelemetry's own messages."""

from __future__ import annotations

from gateway.tracing.spans import Kind, Span, encode_spans
from tests.gateway.tracing.otlp import read_request, read_spans

RESOURCE = (("service.name", "sluice"), ("service.instance.id", "node:9092"))


def test_a_span_keeps_its_name_times_attributes_and_resource() -> None:
    attributes = (("messaging.client.id", "é"), ("kafka.api.version", 0), ("large", 2**40), ("kafka.error.code", -1))
    (found,) = read_spans(encode_spans([Span("produce", Kind.SERVER, 1_000, 2_500, attributes)], RESOURCE, "1.2"))
    assert (found.name, found.kind, found.start_ns, found.end_ns, found.error) == ("produce", 2, 1_000, 2_500, None)
    assert found.attributes == dict(attributes)
    assert found.resource == dict(RESOURCE)


def test_a_failed_span_has_the_status_of_an_error() -> None:
    (found,) = read_spans(encode_spans([Span("fetch", Kind.SERVER, 1, 2, (), "NOT_COORDINATOR")], RESOURCE, "1"))
    assert found.error == "NOT_COORDINATOR"


def test_a_clock_that_went_back_makes_no_span_that_ends_before_its_start() -> None:
    (found,) = read_spans(encode_spans([Span("fetch", Kind.SERVER, 5, 4, ())], RESOURCE, "1"))
    assert (found.start_ns, found.end_ns) == (5, 5)


def test_each_span_has_ids_of_its_own_in_the_sizes_of_otlp() -> None:
    spans = [Span("commit", Kind.CLIENT, 1, 2, ())] * 100
    found = read_spans(encode_spans(spans, RESOURCE, "1"))
    assert {(len(each.trace_id), len(each.span_id)) for each in found} == {(16, 8)}
    assert len({each.trace_id for each in found}) == len({each.span_id for each in found}) == 100


def test_the_scope_says_which_program_made_the_spans() -> None:
    request = read_request(encode_spans([Span("commit", Kind.CLIENT, 1, 2, ())], RESOURCE, "1.2"))
    (of_scope,) = request.resource_spans[0].scope_spans
    assert (of_scope.scope.name, of_scope.scope.version) == ("sluice", "1.2")
