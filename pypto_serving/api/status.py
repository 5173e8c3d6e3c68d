"""Serve information for operators, probes, load balancers and clients: health, load, models, and the server itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving import __version__
from pypto_serving.api.common.described import Answer
from pypto_serving.api.common.respond import answer_json
from pypto_serving.api.service import Service
from pypto_serving.engine.metrics import CONTENT_TYPE
from pypto_serving.errors import RequestError
from pypto_serving.types.tier import TIERS


class HealthState(Answer):
    status: Literal["ready", "loading", "draining", "stalled", "silent", "dead"]
    detail: str
    last_step_age_s: float


class Load(Answer):
    """`server_load`: requests in the server. `kv_usage`: share of blocks in use, in the fullest KV group."""

    server_load: int
    num_running: int
    num_waiting: int
    kv_usage: float


class KVGroupInfo(Answer):
    name: str
    block_size: int
    num_blocks: int


KVGroupInfo.__name__ = "KVGroup"
"""Its name in /openapi.json."""


class ServerInfo(Answer):
    version: str
    served_model_names: list[str]
    architecture: str
    replicas: int
    max_body_bytes: int
    default_sampling: dict[str, float]
    backend: str
    dtype: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_queued_requests: int
    kv_groups: list[KVGroupInfo]


class Version(Answer):
    version: str


class Model(Answer):
    """OpenAI's object, with context length, vocabulary and sampling defaults added."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    vocab_size: int
    default_sampling: dict[str, float]


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Answer):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


PROBES = frozenset({"/health", "/ready", "/ping"})
"""Paths that need no API key."""


async def health(request: Request) -> Response:
    """Answer 200 while the engine makes progress and admits requests, else 503; the body gives the reason."""
    service: Service = request.app.state.service
    state = service.health()
    body = {"status": state.status, "detail": state.detail, "last_step_age_s": round(state.age_s, 3)}
    return answer_json(body, 200 if state.ok else 503)


async def ready(request: Request) -> Response:
    """Answer like /health, but with a 429 while the queue is full: tells load balancers whether to send requests."""
    service: Service = request.app.state.service
    if service.health().ok:
        service.require_admission(1)
    return await health(request)


async def load(request: Request) -> Response:
    """Answer with the number of requests in the server, and their states in the replicas."""
    service: Service = request.app.state.service
    stats = [engine.stats for engine in service.engine.engines]
    answer = Load(
        server_load=service.admission.in_flight,
        num_running=sum(one.num_running for one in stats),
        num_waiting=sum(one.num_waiting for one in stats),
        kv_usage=max((usage for one in stats for usage in one.kv_usage), default=0.0),
    )
    return answer_json(answer)


async def server_info(request: Request) -> Response:
    """Answer with the model of this server, and its limits."""
    service: Service = request.app.state.service
    serving, config = service.serving, service.engine.config
    groups = zip(config.cache.groups, config.cache.num_blocks, strict=True)
    answer = ServerInfo(
        version=__version__,
        served_model_names=list(serving.served_model_names),
        architecture=serving.architecture,
        replicas=len(service.engine.engines),
        max_body_bytes=serving.max_body_bytes,
        default_sampling=serving.default_sampling.effective(),
        backend=config.worker.backend,
        dtype=config.model.dtype,
        max_model_len=config.limits.max_model_len,
        vocab_size=config.model.vocab_size,
        max_num_seqs=config.limits.max_num_seqs,
        max_queued_requests=config.scheduler.max_queued_requests,
        kv_groups=[KVGroupInfo(group.name, group.block_size, num_blocks) for group, num_blocks in groups],
    )
    return answer_json(answer)


async def list_models(request: Request) -> Response:
    """List every name of the served model; in Anthropic's form for clients that send `anthropic-version`."""
    service: Service = request.app.state.service
    names = service.serving.served_model_names
    if _is_anthropic(request):
        listed = [_anthropic_model(service, name) for name in names]
        return answer_json({"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return answer_json(ModelList("list", [_model(service, name) for name in service.serving.served_model_names]))


async def retrieve_model(request: Request) -> Response:
    """Describe the model under one of its names. Raises UnknownModelError for any other name."""
    service: Service = request.app.state.service
    name = service.serving.resolve_model(request.path_params["model_id"])
    return answer_json(_anthropic_model(service, name) if _is_anthropic(request) else _model(service, name))


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _anthropic_model(service: Service, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = service.engine.config.limits.max_model_len
    return AnthropicModel("model", name, name, created, most, most)


def _model(service: Service, name: str) -> Model:
    config, serving = service.engine.config, service.serving
    return Model(
        id=name,
        object="model",
        created=service.created,
        owned_by="pypto-serving",
        root=serving.model_dir,
        max_model_len=config.limits.max_model_len,
        vocab_size=config.model.vocab_size,
        default_sampling=serving.default_sampling.effective(),
    )


async def show_version(request: Request) -> Response:
    """Answer with the version of this server."""
    return answer_json(Version(__version__))


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached blocks of all tiers, or of the tiers in the query, such as `?tier=device&tier=host`."""
    service: Service = request.app.state.service
    names = request.query_params.getlist("tier")
    for name in names:
        if name not in TIERS:
            raise RequestError(f"the tier is {name[:200]!r}, but must be one of {', '.join(TIERS)}", param="tier")
    service.engine.clear_cache([tier for tier in TIERS if not names or tier in names])
    return Response(media_type="text/plain")


async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})
