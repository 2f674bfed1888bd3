"""When a proxy sends a batch, from an instance's configuration."""

from __future__ import annotations

from meta_executor.config import InstanceSpec
from rpc_batch_submit import BatchSubmitConfig


def batching_of(instance: InstanceSpec) -> BatchSubmitConfig:
    """The batcher's settings; off where the configuration says nothing."""
    rpc = instance.config.rpc
    return BatchSubmitConfig(
        batch_max=rpc.submit_batch_max or 1,
        delay_ms=0.5 if rpc.submit_batch_delay_ms is None else rpc.submit_batch_delay_ms,
    )
