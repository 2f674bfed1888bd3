"""KV of one request from a prefilling process to a decoding one: real NIXL, real ZeroMQ, two processes.

    pip install "kv-bounce-planner[nixl,zmq]"
    python examples/two_processes.py [--tls tcp] [--tokens 4000] [--pull]

The prefilling side has blocks of 32 tokens, the decoding side blocks of 16; the plan follows from the two layouts. What an
engine would send in its own request (layout and block table of the decoding side) travels as the payload. With ``--pull`` the
decoding side reads: the prefilling side lends its blocks and says which they are (over tcp it would refuse to).
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import numpy as np

import kv_bounce_planner as kv
from kv_bounce_planner.sessions import events

KEY = b"a key that both sides were given"
GEN, CTX = kv.PeerId("gen", "generation-1", 0), kv.PeerId("ctx", "generation-1", 0)
LAYERS, HEADS, DIM, AXES = 4, 2, 64, ("kv", "block", "token", "head", "dim")
REQUEST = 7


def pool(blocks: int, block_tokens: int) -> list[np.ndarray]:
    return [np.zeros((2, blocks, block_tokens, HEADS, DIM), np.float16) for _ in range(LAYERS)]


def layout_of(tensors: list[np.ndarray]) -> kv.KVLayout:
    views = [kv.TensorView.of(tensor) for tensor in tensors]
    return kv.from_tensors(rank=0, layer_ids=range(LAYERS), tensors=views, axes=AXES, head_total=HEADS)


def open_session(me: kv.PeerId, tensors: list[np.ndarray], tls: str | None, bind: str | None) -> tuple:
    """Everything that is registered or bound: before any peer is introduced."""
    layout = layout_of(tensors)
    bounce = np.zeros(8 << 20, np.uint8)
    transport = kv.NixlTransport(me, config=kv.NixlConfig(tls=tls))
    regions = [kv.MemoryRegion(address, size) for address, size in layout.regions()]
    transport.register([*regions, kv.MemoryRegion(bounce.ctypes.data, bounce.nbytes)])
    channel = kv.ZmqControlChannel(me, KEY, bind)
    arena = kv.BounceArena(bounce.ctypes.data, bounce.nbytes)
    return layout, bounce, kv.SessionResources(transport, channel, arena=arena), channel, transport


def prefill(pipe: Connection, tls: str | None, tokens: int) -> None:
    """The context process: computes, then serves what is asked of it."""
    tensors = pool(256, 32)
    layout, _bounce, resources, channel, transport = open_session(CTX, tensors, tls, "tcp://127.0.0.1:*")
    sender = kv.Sender(CTX, resources)
    pipe.send((channel.address, kv.encode_layout(layout)))
    blocks = np.random.default_rng(1).permutation(256)[: -(-tokens // 32)]
    for number, tensor in enumerate(tensors):  # "prefill": every value says where it belongs
        for index, block in enumerate(blocks):
            positions = np.arange(index * 32, index * 32 + 32) % 2000
            tensor[0, block] = (positions + number)[:, None, None]
            tensor[1, block] = -(positions + number)[:, None, None]
    source = kv.InstanceLayout.single(layout)

    def resolve(asked: kv.ReceiveRequest) -> kv.WriterTransfer | kv.Loan:
        if asked.pulls:
            return kv.Loan(kv.encode_blocks(kv.RequestBlocks.single(blocks), kv.TokenRange(0, tokens)))
        size = int.from_bytes(asked.payload[:4], "little")
        target = kv.decode_layout(asked.payload[4 : 4 + size])
        target_blocks, wanted = kv.decode_blocks(asked.payload[4 + size :])
        transfer = kv.plan_writer(source, 0, kv.RequestBlocks.single(blocks), target, target_blocks, wanted)
        if transfer is None:
            raise ValueError("nothing to write")
        return transfer

    request = kv.RequestKey(REQUEST)
    sender.expect(request, 1)
    sender.ready(request, resolve, claim=blocks)
    while True:
        for event in sender.poll():
            print("  prefill:", type(event).__name__)
            if isinstance(event, events.RequestServed):
                sender.seal(event.request)
            elif isinstance(event, events.SourceReleased):
                kv.free(event.proven)  # the blocks may be used again
                while not pipe.poll(0):  # answer the peer until it has ended
                    sender.poll()
                sender.close()
                transport.close()
                return


def decode(tls: str | None, tokens: int, pull: bool) -> None:
    """The generation process: owns blocks, asks for the KV, gets it, gives the blocks back only with a proof."""
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=prefill, args=(there, tls, tokens))
    process.start()
    address, encoded = here.recv()
    tensors = pool(512, 16)
    layout, _bounce, resources, channel, transport = open_session(GEN, tensors, tls, None)
    receiver = kv.Receiver(GEN, resources)
    channel.connect(CTX, address)
    receiver.introduce([CTX])

    blocks = np.random.default_rng(2).permutation(512)[: -(-tokens // 16)]
    table, wanted = kv.RequestBlocks.single(blocks), kv.TokenRange(0, tokens)
    source = kv.InstanceLayout.single(kv.decode_layout(encoded))
    plan = kv.plan_destination(source, layout, table, wanted)
    mine = kv.encode_layout(layout)
    payload = len(mine).to_bytes(4, "little") + mine + kv.encode_blocks(table, wanted)

    def read_plan(offer: bytes) -> kv.WriterTransfer:
        """Where the lent blocks are: the same plan as the sender would make, seen from here."""
        theirs, _ = kv.decode_blocks(offer)
        transfer = kv.plan_writer(source, 0, theirs, layout, table, wanted)
        if transfer is None:
            raise ValueError("nothing to read")
        return transfer

    writer = plan.writers[0]
    if pull:
        asked = [kv.ExpectedOperation(CTX, writer.total_bytes, payload, writer, "pull", resolve=read_plan)]
    else:
        asked = [kv.ExpectedOperation(CTX, writer.total_bytes, payload, writer, "bounce")]
    began = time.monotonic()
    receiver.open(kv.TransferIdentity(REQUEST, 0, GEN.generation, 0), asked, claim=blocks)
    released = False
    while not released:
        for event in receiver.poll():
            print("  decode: ", type(event).__name__)
            if isinstance(event, events.TransferSucceeded):
                tier = event.tiers[0][1]
                took_ms = (time.monotonic() - began) * 1e3
                print(f"  {event.byte_count} bytes by {tier} in {took_ms:.1f} ms, first contact included")
            elif isinstance(event, events.TransferFailed | events.MemoryQuarantined):
                raise SystemExit(f"failed: {event.reason}")
            elif isinstance(event, events.MemoryReleased):
                kv.free(event.proven)
                released = True
    for number, tensor in enumerate(tensors):
        for index, block in enumerate(blocks):
            positions = np.arange(index * 16, min(index * 16 + 16, tokens)) % 2000
            if not (tensor[0, block, : len(positions), 0, 0] == positions + number).all():
                raise SystemExit(f"layer {number}, block {block}: wrong bytes")
    here.send("end")
    process.join(30)
    receiver.close()
    transport.close()
    print("every byte is in its place")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", help='"tcp" restricts UCX to tcp; by default it takes what the host has')
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--pull", action="store_true", help="the decoding side reads, instead of being written to")
    options = parser.parse_args()
    decode(options.tls, options.tokens, options.pull)
