"""Traces of requests in the OpenTelemetry protocol. The SDK is imported only if tracing is on.

The span of a request begins with its first line and ends with its answer. The spans of its phases are created at its
end, from times that the engine reported; tokens cost nothing. The SDK's queue is bounded, and its own thread exports
spans: without a working collector, they are dropped.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from http import HTTPStatus
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pypto_serving.errors import ConfigError
from pypto_serving.threads import in_quick_thread, start_thread
from pypto_serving.util import brief

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer
    from starlette.types import Scope

logger = logging.getLogger("pypto_serving.api")

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/decisions": "generate_content",
}
"""The paths of traced requests, and OpenTelemetry's names for these operations."""
SPAN = "llm_request"
SERVICE = "pypto-serving"
MAX_STATE_BYTES = 512
"""Ignore longer trace headers of clients, which the SDK may parse slowly. W3C's trace context requires this length."""
CLOSE_S = 2.0
"""Limit of the time to export the last spans when the server ends."""
MAX_CHILDREN = 64
"""Limit of phase spans of one request, which may have hundreds of choices."""
QUIET_S = 60.0
"""Warnings of the exporter are logged at most once in this time."""
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PATH = "/v1/traces"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_W3C = (b"traceparent", b"tracestate")
Attributes = Mapping[str, Any]


class Tracing:
    """Owns the server's only tracer, with its queue and exporter from the SDK. Raises ConfigError.

    The SDK reads all other settings from its own OTEL_* variables: name and attributes of the service, sampler, limits,
    bounds of the queue, headers and certificates of the exporter.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        _quieten(endpoint)
        version = metadata.version(SERVICE)
        found = Resource.create()
        if str(found.attributes["service.name"]).startswith("unknown_service"):
            found = found.merge(Resource({"service.name": SERVICE}))
        resource = Resource({"service.version": version}).merge(found)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_new_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("pypto_serving", version)

    def begin(self, scope: Scope, request_id: str) -> RequestTrace | None:
        """Begin the span of a request, as a child of the client's span if given; return None for untraced paths."""
        operation = OPERATIONS.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _W3C and len(value) <= MAX_STATE_BYTES
        }
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.id": request_id,
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span(SPAN, parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span) if span.is_recording() else None

    async def aclose(self) -> None:
        """Send the last spans beside the event loop, for at most CLOSE_S."""
        thread = start_thread("traces-close", self._provider.shutdown, lambda error: None)
        await in_quick_thread(thread.join, CLOSE_S)


class RequestTrace:
    """The span of one request and the spans of its phases. Times are seconds of the host's monotonic clock."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._inside: Context = set_span_in_context(span)
        self._num_children = 0
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def answer(self, status: int) -> None:
        """Record the status of the answer."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.fail(str(status))

    def fail(self, error: str, message: str = "") -> None:
        """Record that the server failed on the request."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(Status(StatusCode.ERROR, message or None))

    def describe(self, attributes: Attributes) -> None:
        """Add attributes to the span of the request."""
        self._span.set_attributes(attributes)

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Add the span of an ended phase; ignore phases after the first MAX_CHILDREN."""
        self._num_children += 1
        if self._num_children <= MAX_CHILDREN:
            span = self._tracer.start_span(name, self._inside, attributes=attributes, start_time=self._unix_ns(start_s))
            span.end(self._unix_ns(end_s))

    def end(self) -> None:
        """End the span of the request."""
        self._span.end()

    def _unix_ns(self, time_s: float) -> int:
        return self._offset_ns + int(time_s * 1e9)


def open_tracing(endpoint: str) -> Tracing | None:
    """Return the tracing of a server, or None without an endpoint. Raises ConfigError."""
    try:
        return Tracing(endpoint) if endpoint else None
    except ConfigError:
        raise
    except Exception as error:  # many types are possible, since different parts of the SDK read the variables
        raise ConfigError(f"the OpenTelemetry SDK takes no traces with these OTEL_* variables: {error}") from error


def _new_exporter(endpoint: str) -> SpanExporter:
    """Make the exporter of the protocol that OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names, by default gRPC."""
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), "")
    protocol = os.environ[variable] if variable else GRPC
    url = urlsplit(endpoint)
    if protocol == GRPC or url.scheme == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=url.scheme != "https")
    if protocol != HTTP:
        raise ConfigError(f"{variable} is {brief(protocol)}, but must be {GRPC} or {HTTP}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint if url.path.strip("/") else url._replace(path=HTTP_PATH).geturl())


def _quieten(endpoint: str) -> None:
    """Log the warnings of the SDK and its exporters rarely, and in one line each.

    Warnings about clients' headers are dropped: they would take the place of the exporter's.
    """
    root = logging.getLogger("opentelemetry")
    root.handlers = [Complaints(endpoint)]
    root.propagate = False
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


class Complaints(logging.Handler):
    """Logs one warning in QUIET_S, since without its collector the exporter warns at each attempt."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._told_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= QUIET_S:
            self._told_s = now_s
            said = " ".join(record.getMessage().split())
            logger.warning("traces for %s: %s (said at most every %g s)", self._endpoint, said, QUIET_S)
