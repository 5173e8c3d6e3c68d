"""DeepSeek V4 on the CPU kernels: the step recorded once, operation by operation. Torch-free."""

from __future__ import annotations

from pypto_serving.kernels import Engine, NativeCollectives, Recording
from pypto_serving.model.deepseek_v4.buffers import Arenas, DeepseekV4Buffers, layer_spans
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.deepseek_v4.recorder import LayerRecorder, ModelPart
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.rope import rope_tables
from pypto_serving.model.shares import AttentionShare
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans


class NativeDeepseekV4:
    """Owns packed weights, the arenas of all KV groups and the recorded step of a DeepSeek V4 model, or a rank's part.

    A block is laid out by tensor, then layer, then row. Residual streams, compressor states, hyper-connections and
    routing are float32. `logits` is float32 [max_logits, vocab]. `draft_step` computes draft layers for one token of
    each row, whose logits are those of the token after the next; None without draft layers. They are in the last stage,
    which has the streams and the output layer; `draft_step` of other stages is empty.
    """

    layout = "block, tensor, layer, row"
    """Order of the dimensions of a block's pages; part of the fingerprint."""

    @staticmethod
    def name(model: DeepseekV4Config, config: EngineConfig) -> str:
        """Name program and arithmetic, for the fingerprint."""
        return f"deepseek-v4-native-2 {model.storage.name}".rstrip()

    @staticmethod
    def kv_spans(model: DeepseekV4Config, config: EngineConfig, rank: Rank) -> list[Spans]:
        """Return which bytes of a block of each KV group a rank reads and writes: all heads share them."""
        layers = rank.layers(model.num_layers)
        end = model.drafts.stop if rank.projects else layers.stop
        return [layer_spans(group, range(layers.start, end)) for group in config.cache.groups]

    def __init__(
        self,
        model: DeepseekV4Config,
        weights: PackedWeights,
        engine: Engine,
        config: EngineConfig,
        rank: Rank | None = None,
        peers: NativeCollectives | None = None,
    ) -> None:
        inventory = DeepseekV4Inventory(model, weights.headers)
        weights.require(inventory.expected(), inventory.ignores, inventory.schemes(), inventory.sizes())
        rank, peers = rank or Rank(), peers or NativeCollectives()
        self.step = Recording(engine)
        self.draft_step = Recording(engine) if model.drafts else None
        arenas, attention = Arenas(config, peers), AttentionShare(rank, peers)
        self._buffers, ropes = (
            DeepseekV4Buffers(model, config, attention, peers),
            rope_tables(model.ropes(), config.limits.max_model_len),
        )
        self.arenas, self.logits = arenas.blocks, self._buffers.logits
        self._record(config, ModelPart(model, weights, rank, peers, attention, self._buffers, arenas, ropes))
        weights.finish()

    def _record(self, config: EngineConfig, part: ModelPart) -> None:
        b, model, rank = part.buffers, part.model, part.rank
        record = LayerRecorder(self.step, part, config)
        if rank.embeds:
            record.embed(b.streams)
        part.peers.begin_stage(self.step, b.streams)
        for layer in rank.layers(model.num_layers):
            record.layer(layer)
        if rank.projects:
            if model.drafts:
                record.store_streams()
            record.logits()
            for layer in model.drafts:
                record.draft_input(layer)
                record.draft_rows(layer)
        part.peers.end_stage(self.step, b.streams, b.logits)
        if self.draft_step is not None and rank.projects:
            self._record_drafting(LayerRecorder(self.draft_step, part, config), part)

    def _record_drafting(self, record: LayerRecorder, part: ModelPart) -> None:
        """Record a step that drafts. Its streams stand where the token's will, so that the next draft can use them."""
        (layer,) = part.model.drafts
        record.draft_input(layer)
        record.layer(layer)
        record.store_streams()
        record.logits(part.model.prefix(layer))
        part.peers.hand_over(record.step, part.buffers.logits)
