"""Instances register themselves, fronts find them: run each line in a shell of its own, on any hosts that share the store.

    python discovery.py instance /shared/registry http://10.0.0.5:8000
    python discovery.py front /shared/registry

The store is a folder (a file system that the hosts share) or the URL of an etcd.
"""

import argparse
import asyncio
import signal
import socket

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    EndpointOwner,
    EndpointRecord,
    FileLeaseStore,
    LeaseStore,
)


def open_store(place: str) -> LeaseStore:
    """An etcd by its URL, else a folder."""
    if not place.startswith(("http://", "https://")):
        return FileLeaseStore(place)
    from endpoint_lifecycle.etcd import EtcdLeaseStore

    return EtcdLeaseStore(place)


async def instance(store: LeaseStore, url: str, ended: asyncio.Event) -> None:
    """One lifetime: publish, stay registered while we live, drain and withdraw when told to end."""
    owner = EndpointOwner(f"ctx-{url}", socket.gethostname(), "context")
    record = owner.finalize().publish(["tcp://127.0.0.1:7000"])
    async with AsyncLeasePublisher(store, owner, url, ttl_s=6.0) as publisher:
        await publisher.wait_registered(timeout_s=10.0)
        print("registered", url, record.generation, flush=True)
        await ended.wait()
        await publisher.drain(10.0)


async def front(store: LeaseStore, ended: asyncio.Event) -> None:
    """Follow the store; where the record is registered, nothing is fetched."""

    async def fetch(server: str) -> EndpointRecord:
        raise ConnectionRefusedError(f"{server}: this example serves no HTTP")

    async with AsyncEndpointDirectory(fetch) as directory, AsyncReconciler(store, directory) as reconciler:
        await reconciler.wait_synced(timeout_s=10.0)
        shown = None
        while not ended.is_set():
            found = tuple((server, directory.status(server).value) for server in directory.servers("context"))
            if found != shown:
                shown = found
                print("servers", *(f"{server} {status}" for server, status in found), flush=True)
            await asyncio.sleep(0.1)


async def main() -> None:
    """Read the command line and play the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("instance", "front"))
    parser.add_argument("store")
    parser.add_argument("url", nargs="?", default="")
    given = parser.parse_args()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    store = open_store(given.store)
    await (instance(store, given.url, ended) if given.part == "instance" else front(store, ended))
    await store.aclose()


if __name__ == "__main__":
    asyncio.run(main())
