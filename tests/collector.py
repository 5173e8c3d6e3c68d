"""A collector of OpenTelemetry: takes spans by HTTP and by gRPC, and decodes them with its own protobuf."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 20.0
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Collector(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A context manager. `spans` are those that came, `resource` says where from, `paths` has those of HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: list[str] = []
        self.resource: dict[str, Any] = {}
        self._came = threading.Condition()

    def __enter__(self) -> Collector:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        self._grpc.add_generic_rpc_handlers((self,))
        self.grpc_url = f"grpc://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self.http_url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(0)
        self._http.shutdown()
        self._http.server_close()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """What gRPC calls with the method of a call."""
        if call.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda data, _: self._take(data))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take, paths = self._take, self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                paths.append(self.path)
                take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _take(self, data: bytes) -> bytes:
        with self._came:
            for group in ExportTraceServiceRequest.FromString(data).resource_spans:
                self.resource = attributes_of(group.resource)
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            self._came.notify_all()
        return b""

    def wait_for(self, condition: Callable[[list[Span]], object]) -> list[Span]:
        """Return the spans once there are those that `condition` is about."""
        deadline_s = time.monotonic() + WAIT_S
        with self._came:
            while not condition(self.spans):
                assert self._came.wait(deadline_s - time.monotonic()), [span.name for span in self.spans]
            return list(self.spans)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {each.key: _value(each.value) for each in owner.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
