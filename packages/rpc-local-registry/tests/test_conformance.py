"""Both paths, the same behaviour: results, errors, order, streaming, abort, hand-off, shutdown."""

from __future__ import annotations

import pytest

from rpc_local_registry import RpcConfig
from rpc_local_registry.testing import (
    CONFORMANCE_CHECKS,
    DIFFERENCES,
    OUTCOMES,
    PATHS,
    VERBS,
    HandOffGuard,
    HandOffViolation,
    Item,
    matrix_differences,
    matrix_table,
    open_pair,
    run_cell,
    run_conformance,
)


@pytest.mark.parametrize("name", CONFORMANCE_CHECKS)
@pytest.mark.parametrize("address", ["ipc://", "tcp://127.0.0.1:0"])
def test_remote_path(name: str, address: str) -> None:
    """Every check of the suite over a socket."""
    with open_pair(local=False, address=address) as pair:
        CONFORMANCE_CHECKS[name](pair)
        assert pair.client.statistics().local_calls == 0


@pytest.mark.parametrize("name", CONFORMANCE_CHECKS)
def test_local_path(name: str) -> None:
    """Every check of the suite on the fast path, which really took it."""
    with open_pair(local=True) as pair:
        CONFORMANCE_CHECKS[name](pair)
        statistics = pair.client.statistics()
        if name not in ("unknown_method",):
            assert statistics.local_calls > 0
        assert statistics.fallbacks["blocking_method"] == 0


def test_whole_suite_with_tight_limits() -> None:
    """A credit of one item and one thread per lane change nothing that a caller sees; the runner names every check."""
    names = run_conformance(local=False, config=RpcConfig(stream_credit=1, lane_threads=1))
    assert set(names) == set(CONFORMANCE_CHECKS)


def test_a_failing_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: a broken worker is told with the check's name."""
    from rpc_local_registry import testing

    monkeypatch.setattr(testing, "CONFORMANCE_CHECKS", {"results": testing.check_results, "order": _broken})
    with pytest.raises(AssertionError) as caught:
        run_conformance(local=True)
    assert "order, local path" in caught.value.__notes__[0]


def _broken(pair: object) -> None:
    raise AssertionError("broken")


@pytest.mark.parametrize("local", [False, True])
def test_mutation_after_hand_off_is_detected(local: bool) -> None:
    """A caller that changes a request after handing it over is caught, on both paths."""
    guard = HandOffGuard()
    with open_pair(local=local) as pair:
        request = guard.give(Item(1, [1, 2, 3]))
        pair.client.swap(request).remote()
        guard.verify()
        request.values.append(4)
        with pytest.raises(HandOffViolation):
            guard.verify()


def test_worker_that_mutates_is_detected() -> None:
    """On the local path a worker that changes the request is caught too; arrays refuse the write at once."""
    import numpy as np

    guard = HandOffGuard()
    request = guard.give(Item(1, [3, 1, 2]))
    request.values.sort()
    with pytest.raises(HandOffViolation):
        guard.verify()
    array = HandOffGuard().give(np.arange(3))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_verb_and_outcome(outcome: str) -> None:
    """Local path, ipc and tcp say the same of every verb, or differ for a documented reason; nothing hangs or escapes raw."""
    cells = {(verb, outcome): {path: run_cell(verb, outcome, path) for path in PATHS} for verb in VERBS}
    print(matrix_table(cells))
    assert matrix_differences(cells) == []
    assert not [told for cell in cells.values() for told in cell.values() if "raw" in told or told in ("hangs", "")]


def test_the_comparison_can_fail() -> None:
    """Sockets that disagree, an undocumented difference and a documented one that is none are each told."""
    same = dict.fromkeys(PATHS, "x")
    documented = next(iter(DIFFERENCES))
    assert matrix_differences({("remote", "value"): same}) == []
    assert len(matrix_differences({("remote", "value"): {**same, "tcp": "y"}})) == 1
    assert len(matrix_differences({("remote", "value"): {**same, "local": "y"}})) == 1
    assert len(matrix_differences({documented: same})) == 1
    assert matrix_differences({documented: {**same, "local": "y"}}) == []
