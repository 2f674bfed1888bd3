"""Start-up negotiation: pure, after an exchange that everybody enters anyway."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp_agreement import AgreementConfig, AgreementMode, Domain, NegotiationError, contribution, negotiate

DOMAIN, CONFIG = Domain(1, (0, 1, 2)), AgreementConfig()
TOPOLOGY = {"tensor_parallel": 1, "context_parallel": 1, "attention_dp": False}
ON = {"async_terminal": "1", "async_ready": "1"}


def part(flags=ON, domain=DOMAIN, config=CONFIG, topology=TOPOLOGY):
    return contribution(flags, domain, config, topology=topology)


def test_flags_off_contribute_nothing():
    """What existing exchanges carry stays byte-identical."""
    assert part({}) is None and part({"async_terminal": "0", "async_ready": "0"}) is None
    assert negotiate(dict.fromkeys(range(3))) == AgreementMode(terminal=False, ready=False)
    assert not negotiate(dict.fromkeys(range(3))).is_async


@pytest.mark.parametrize("terminal", ["0", "1"])
@pytest.mark.parametrize("ready", ["0", "1"])
def test_mode_matrix(terminal, ready):
    flags = {"async_terminal": terminal, "async_ready": ready}
    mode = negotiate({r: part(flags) for r in range(3)}, qualified=TOPOLOGY)
    assert (mode.terminal, mode.ready) == (terminal == "1", ready == "1")
    assert mode.is_async == ("1" in (terminal, ready))


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        (None, "flags"),
        (part({"async_terminal": "1", "async_ready": "0"}), "async_ready"),
        (part({"async_terminal": "yes", "async_ready": "1"}), "async_terminal"),
        (part(domain=Domain(1, (0, 2, 1))), "domain"),
        (part(domain=None), "domain"),
        (part(config=AgreementConfig(credits=7)), "config credits"),
        (part(topology={**TOPOLOGY, "tensor_parallel": 2}), "topology tensor_parallel"),
        (("other protocol",), "tag"),
        (b"legacy endpoint", "tag"),
        (("pp-agreement", 99, ("1", "1"), (), (), ()), "protocol version"),
    ],
)
def test_a_mixed_group_fails_on_every_rank_alike(odd, field):
    """Each rank gets the same error, naming the rank and the field; none waits for another."""
    contributions = {0: part(), 1: odd, 2: part()}
    errors = set()
    for _rank in range(3):
        with pytest.raises(NegotiationError) as caught:
            negotiate(contributions)
        errors.add((caught.value.rank, caught.value.field, str(caught.value)))
    assert len(errors) == 1
    rank, named, _text = errors.pop()
    assert rank == 1 and named == field


def test_a_contribution_survives_json():
    """Codecs turn tuples into lists."""
    parts = {r: json.loads(json.dumps(part())) for r in range(3)}
    assert negotiate(parts) == AgreementMode(terminal=True, ready=True)


def test_unqualified_topology_is_named():
    parts = {r: part(topology={**TOPOLOGY, "tensor_parallel": 2}) for r in range(3)}
    with pytest.raises(NegotiationError) as caught:
        negotiate(parts, qualified=TOPOLOGY)
    assert caught.value.field == "tensor_parallel"


def test_domain_members_must_be_in_the_exchange():
    with pytest.raises(NegotiationError, match="exchange"):
        negotiate({0: part(), 1: part()})


class Nasty:
    """Cannot be printed, compared or asked for its truth."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None

    def __str__(self):
        raise RuntimeError("printed")

    __repr__ = __str__


@pytest.mark.parametrize(
    "flag",
    ["\udcff", "1\n", "1 ", "y" * 10_000, 10**5000, Nasty(), float("nan"), [1], {}, object(), b"1", -0.0],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_with_any_flag_can_take_part(flag):
    """A contribution that its rank cannot encode would leave the others in the exchange for ever."""
    odd = part({"async_terminal": flag, "async_ready": "1"}, topology={**TOPOLOGY, "backend": flag})
    sent = json.dumps(odd, ensure_ascii=False).encode("utf-8")
    assert len(sent) < 4096
    for _rank in range(2):
        with pytest.raises(NegotiationError) as caught:
            negotiate({0: part(topology={**TOPOLOGY, "backend": "x"}), 1: json.loads(sent), 2: part()})
        assert (caught.value.rank, caught.value.field) == (1, "async_terminal")


@pytest.mark.parametrize(
    ("index", "value", "field"),
    [
        (0, Nasty(), "tag"), (0, [TOPOLOGY], "tag"), (0, 10**5000, "tag"), (1, True, "protocol version"),
        (1, 1.0, "protocol version"), (1, 10**5000, "protocol version"), (2, None, "flags"),
        (2, ("1", "1", "1"), "flags"), (2, ("1", Nasty()), "async_ready"), (3, (), "domain"), (3, None, "domain"),
        (3, (1, 0, ({},), 0, 0), "domain"), (3, (1, 0, 7, 0, 0), "domain"), (3, (1, 0, (0, True), 0, 0), "domain"),
        (4, (), "config"), (4, None, "config"), (5, None, "topology"), (5, "facts", "topology"), (5, (("a",),), "topology"),
        (5, {}, "topology"),
    ],
    ids=lambda value: value if type(value) is str else type(value).__name__,
)  # fmt: skip
def test_what_all_ranks_lack_alike_is_refused_too(index, value, field):
    """Equal on every rank is not enough: malformed facts are not qualified, missing bounds are no bounds."""
    forged = list(part())
    forged[index] = value
    for _rank in range(3):
        with pytest.raises(NegotiationError) as caught:
            negotiate(dict.fromkeys(range(3), tuple(forged)), qualified=TOPOLOGY)
        assert caught.value.field == field


def test_a_rank_without_bounds_is_named():
    with pytest.raises(NegotiationError) as caught:
        negotiate({0: part(), 1: part(config=None), 2: part()})
    assert (caught.value.rank, caught.value.field) == (1, "config")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)
near = st.tuples(
    st.just("pp-agreement") | anything, st.just(1) | anything, st.just(("1", "1")) | anything,
    st.just(part()[3]) | anything, st.just(part()[4]) | anything, st.just(part()[5]) | anything,
)  # fmt: skip


@given(st.lists(near, min_size=1, max_size=3))
def test_nearly_right_contributions_are_judged_alike(parts):
    """One field of six may be anything, on one rank or on all."""
    told = set()
    for _rank in range(2):
        try:
            told.add(str(negotiate(dict(enumerate(parts)), qualified=TOPOLOGY)))
        except NegotiationError as error:
            told.add(str(error))
    assert len(told) == 1


@given(st.dictionaries(st.integers(0, 5), anything, max_size=5))
def test_nothing_but_its_own_error(parts):
    """Whatever arrives: a mode or a NegotiationError, on every rank alike."""
    try:
        first = negotiate(parts)
    except NegotiationError:
        with pytest.raises(NegotiationError):
            negotiate(dict(reversed(parts.items())))
    else:
        assert negotiate(dict(reversed(parts.items()))) == first


@given(st.dictionaries(st.sampled_from(["async_terminal", "async_ready"]), anything))
def test_a_contribution_is_never_an_error(flags):
    contribution(flags, DOMAIN, CONFIG)
