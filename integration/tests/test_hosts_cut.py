"""A link between two hosts of a service is cut: network namespaces of this machine, KV over UCX's tcp."""

from __future__ import annotations

import shutil
import time

import pytest

from service_on_hosts import body

pytestmark = [
    pytest.mark.service(seconds=40),
    pytest.mark.etcd,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("etcd") is None, reason="NO COVERAGE: no etcd binary (Debian: apt-get install etcd-server)"
    ),
]

#: How long a link between two ranks may be away where one is cut (s); it is 30 at most, and no longer than a transfer may take.
AWAY_S = 10.0
#: A client hears of what cannot be finished within this time (s): a link's silence, 5, how long it may be away, and 10 more.
TOLD_WITHIN_S = 5.0 + AWAY_S + 10.0


def test_a_link_that_is_cut_in_the_middle_of_transfers_frees_nothing_unproven_and_serves_again_when_healed(site):
    """Between the instances nothing passes any more: clients are told, destinations stay owned; afterwards all comes back."""
    site.configured(
        engine={"kind": "synthetic", "synthetic": {"layer_count": 8, "kv_head_count": 8, "head_dim": 32}},
        conditional_disagg_config={"max_local_prefill_length": 0},
        transceiver={"transfer_timeout_s": AWAY_S},
    )
    site.serve()
    prompts = [f"{name} " * 400 for name in ("one", "two", "three")]
    expected = [one["choices"][0]["text"] for one in site.ask(*map(body, prompts))]
    site.wait_unused(time.monotonic() + 30.0)
    site.network.slow("gen", 20.0)
    before = site.network.received_bytes("gen")
    result = site.asking(*map(body, prompts))
    while site.network.received_bytes("gen") - before < 1 << 20:
        time.sleep(0.01)
    site.network.cut("ctx", "gen")
    told = result()
    assert [one["status"] for one in told] == [502] * len(prompts), told
    assert max(one["took_s"] for one in told) < TOLD_WITHIN_S, told
    assert max(site.blocks_used()) > 0, "a destination was given back that a peer may still write to"
    site.network.fast("gen")
    site.network.heal()
    deadline = time.monotonic() + 60.0
    while True:
        told = site.ask(*map(body, prompts))
        if [one["status"] for one in told] == [200] * len(prompts):
            break
        assert time.monotonic() < deadline, told
    assert [one["choices"][0]["text"] for one in told] == expected
    site.wait_unused(deadline)
    site.end()
