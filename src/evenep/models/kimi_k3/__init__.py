"""Kimi-K3: config, checkpoint, MoE block, oracle and fixtures."""

from .block import KimiK3MoE, MoEOutput
from .config import KimiK3Config
from .cover import Cover
from .index import CheckpointIndex, ReadPlan
from .reader import CheckpointReader
from .router import route
from .weights import BlockWeights, CheckpointWeights, checkpoint_weights, load_block_weights
from .writer import write_fixture, write_index

__all__ = [
    "BlockWeights",
    "CheckpointIndex",
    "CheckpointReader",
    "CheckpointWeights",
    "Cover",
    "KimiK3Config",
    "KimiK3MoE",
    "MoEOutput",
    "ReadPlan",
    "checkpoint_weights",
    "load_block_weights",
    "route",
    "write_fixture",
    "write_index",
]
