"""The API of one instance in one process: its HTTP server, the door of the front's stream, and their one way to the worker.

The process is rank 0's (the worker is a thread of it, and is called directly) or one of its own (the worker is reached by RPC):
the same parts, put together here once.
"""

from __future__ import annotations

import msgspec

from meta_executor.addresses import Place, place_of
from meta_executor.api.batching import batching_of
from meta_executor.api.door import Door, DoorServer
from meta_executor.api.endpoint import Endpoint
from meta_executor.api.server import ApiServer, ServerThread
from meta_executor.api.worker_client import WorkerClient
from meta_executor.config import InstanceSpec, RunSpec
from meta_executor.listener.credentials import api_keys
from meta_executor.listener.descriptors import within_descriptors


def worker_address(spec: RunSpec, instance: InstanceSpec) -> str:
    """Where rank 0's worker listens: in the run's folder, because only processes of its host call it."""
    return f"ipc://{spec.path('ipc', f'{instance.owner_id}.w')}"


def door_place(spec: RunSpec, instance: InstanceSpec) -> Place:
    """Where the front's stream ends.

    Raises:
        OSError: The instance's hostname cannot be resolved.
    """
    config = instance.config
    return place_of(config.hostname, config.advertised_host, spec.path("ipc", f"{instance.owner_id}.s"))


def client_of(spec: RunSpec, instance: InstanceSpec, address: str) -> WorkerClient:
    """A way to the instance's worker, with its configured fast path."""
    return WorkerClient(address, spec.key(), fast_path=bool(instance.config.rpc.local_fastpath))


class InstanceApi:
    """See the module. Construction serves; returns when requests are accepted.

    Args:
        spec, instance: Which one.
        worker: The worker's RPC address.
        endpoint: Whether requests may come in; told where the front's stream ends.

    Raises:
        RuntimeError: The HTTP server did not start.
        RpcError: The door's address cannot be taken.
        OSError: The hostname cannot be resolved, or is none of this machine.
    """

    def __init__(
        self,
        spec: RunSpec,
        instance: InstanceSpec,
        worker: str,
        endpoint: Endpoint,
    ) -> None:
        self._worker = client_of(spec, instance, worker)
        place = door_place(spec, instance)
        self._door = DoorServer(Door(self._worker), place.address, spec.key(), instance.owner_id)
        endpoint.service_address = place.announced(self._door.address)
        api = ApiServer(
            self._worker,
            batching_of(instance),
            endpoint,
            spec.key().hex(),
            config=msgspec.structs.replace(instance.config, http=within_descriptors(instance.config.http)),
            keys=api_keys(spec.service.front),
            drain_timeout_s=spec.service.drain_timeout_s,
        )
        self._server = ServerThread(api, instance.config.hostname, instance.port)
        self._server.start()
        self.url = self._server.url

    def close(self) -> None:
        """Let out what the worker has said last, answer what is pending, then end."""
        self._door.close()
        self._server.stop()
        self._worker.close()
