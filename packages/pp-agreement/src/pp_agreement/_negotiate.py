"""Start-up negotiation: flags are compared after an exchange that every rank makes anyway, so nobody can be left in it.

``contribution()`` makes this rank's part; it never raises, whatever the flags say: a malformed flag travels as it is and is
judged by ``negotiate()`` on every rank alike, after the exchange. With all flags off the contribution is ``None``: what
existing exchanges already carry stays byte-identical, and no exchange is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import NegotiationError

PROTOCOL_VERSION = 1
FLAG_NAMES = ("async_terminal", "async_ready")
Contribution = tuple[object, ...]
_TAG = "pp-agreement"


@dataclass(frozen=True, slots=True)
class AgreementMode:
    """What all ranks have asked for."""

    terminal: bool
    ready: bool

    @property
    def is_async(self) -> bool:
        """Whether an :class:`Agreement` is to be built at all."""
        return self.terminal or self.ready


def contribution(
    flags: Mapping[str, object],
    domain: Domain | None,
    config: AgreementConfig | None,
    *,
    topology: Mapping[str, object] | None = None,
) -> Contribution | None:
    """This rank's part of the exchange.

    Args:
        flags: ``async_terminal`` and ``async_ready``, each exactly "0" or "1" (bool and None count as such; a missing
            one is "0"). Anything else is carried as text and refused by everybody.
        domain: The domain that this rank would join; None when it could not be built.
        config: The bounds that it would use.
        topology: Facts that must be equal and qualified, for instance ``{"tensor_parallel": 1}``.

    Returns:
        A tuple of plain values for any codec, or None when both flags are off.
    """
    given = tuple(_flag_text(flags.get(name)) for name in FLAG_NAMES)
    if all(flag == "0" for flag in given):
        return None
    where = () if domain is None else (
        domain.domain_id, domain.epoch, tuple(domain.ranks), domain.scheduling_rank, domain.coordinator_rank,
    )  # fmt: skip
    bounds = () if config is None else config.describe()
    facts = tuple(sorted((_text(k, str), _text(v, repr)) for k, v in (topology or {}).items()))
    return (_TAG, PROTOCOL_VERSION, given, where, bounds, facts)


def _flag_text(value: object) -> str:
    if value is None or value is False:
        return "0"
    if value is True:
        return "1"
    return _text(value, str)


def _text(value: object, how: Callable[[object], str]) -> str:
    """At most 64 characters of ASCII, whatever it is: a rank that cannot encode its part would leave the others waiting."""
    try:
        return how(value)[:64].encode("ascii", "backslashreplace").decode("ascii")
    except Exception as error:  # noqa: BLE001 - a flag's own __str__ may raise anything
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"


def negotiate(contributions: Mapping[int, object], *, qualified: Mapping[str, object] | None = None) -> AgreementMode:
    """Compare every rank's contribution; pure, so every rank comes to the same result or the same error.

    Args:
        contributions: Rank to what it contributed, of all ranks.
        qualified: The topology facts that the asynchronous protocol is qualified for.

    Returns:
        The common mode; both off when nobody contributed anything.

    Raises:
        NegotiationError: Names the first rank, in rank order, and its field that differs or is not allowed.
    """
    if not contributions:
        raise NegotiationError(-1, "contributions", "there are none")
    parsed = {rank: _plain(contributions[rank]) for rank in sorted(contributions)}
    asked = [rank for rank, part in parsed.items() if part is not None]
    if not asked:
        return AgreementMode(terminal=False, ready=False)
    reference_rank = asked[0]
    for rank, part in parsed.items():
        if part is None:
            raise NegotiationError(rank, "flags", f"off, but rank {reference_rank} asked for the asynchronous protocol")
    reference = parsed[reference_rank] or ()
    for rank, part in parsed.items():
        _check(rank, part or (), reference, reference_rank)
    _check_domain(parsed, reference)
    if not reference[4]:
        raise NegotiationError(reference_rank, "config", "could not be built")
    facts = reference[5]
    if not isinstance(facts, tuple) or not all(isinstance(f, tuple) and len(f) == 2 for f in facts):
        raise NegotiationError(reference_rank, "topology", f"{str(facts)[:120]} are no facts")
    if qualified is not None:
        offered = {str(f[0]): f[1] for f in facts if isinstance(f, tuple)}
        for name, wanted in qualified.items():
            if offered.get(name) != _text(wanted, repr):
                raise NegotiationError(
                    reference_rank, name, f"{offered.get(name)}; the asynchronous protocol is qualified for {wanted!r}"
                )
    given = reference[2]
    return AgreementMode(terminal=given[0] == "1", ready=given[1] == "1") if isinstance(given, tuple) else _never()


def _never() -> AgreementMode:
    raise NegotiationError(-1, "flags", "malformed")


_FIELDS = ("tag", "protocol version", "flags", "domain", "config", "topology")


def _check(rank: int, part: tuple[object, ...], reference: tuple[object, ...], reference_rank: int) -> None:
    if len(part) != len(_FIELDS) or type(part[0]) is not str or part[0] != _TAG:
        raise NegotiationError(rank, "tag", f"{str(part)[:120]} is not a contribution of this protocol")
    if type(part[1]) is not int or part[1] != PROTOCOL_VERSION:
        raise NegotiationError(rank, "protocol version", f"{part[1]!r}; this is {PROTOCOL_VERSION}")
    given = part[2]
    if not isinstance(given, tuple) or len(given) != len(FLAG_NAMES):
        raise NegotiationError(rank, "flags", f"{given!r} are not {len(FLAG_NAMES)} flags")
    for name, flag in zip(FLAG_NAMES, given):
        if flag not in ("0", "1"):
            raise NegotiationError(rank, name, f"{flag!r} is neither '0' nor '1'")
    if len(reference) != len(_FIELDS):
        return
    for index, field in enumerate(_FIELDS):
        if part[index] == reference[index]:
            continue
        mine, theirs = part[index], reference[index]
        if field == "flags" and isinstance(theirs, tuple):
            for name, flag, other in zip(FLAG_NAMES, given, theirs):
                if flag != other:
                    raise NegotiationError(rank, name, f"{flag}, but {other} on rank {reference_rank}")
        if field in ("config", "topology") and isinstance(mine, tuple) and isinstance(theirs, tuple):
            for pair, other in zip(mine, theirs):
                if pair != other:
                    raise NegotiationError(
                        rank, f"{field} {_first(pair)}", f"{pair}, but {other} on rank {reference_rank}"
                    )
        raise NegotiationError(rank, field, f"{mine!r}, but {theirs!r} on rank {reference_rank}")


def _first(pair: object) -> object:
    return pair[0] if isinstance(pair, tuple) and pair else pair


def _check_domain(parsed: Mapping[int, tuple[object, ...] | None], reference: tuple[object, ...]) -> None:
    where = reference[3]
    if not isinstance(where, tuple) or len(where) != 5:
        raise NegotiationError(next(iter(parsed)), "domain", "could not be built")
    members = where[2]
    if not isinstance(members, tuple) or any(type(m) is not int or m not in parsed for m in members):
        raise NegotiationError(next(iter(parsed)), "domain", f"{members!r} are not all in the exchange")


def _plain(value: object) -> tuple[object, ...] | None:
    """Tuples again, whatever lists a codec made of them; foreign values stay visible as text, and compare as that."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(_deep(v) for v in value)
    return (_deep(value, 0),)


def _deep(value: object, depth: int = 0) -> object:
    if isinstance(value, (list, tuple)) and depth < 8:
        return tuple(_deep(v, depth + 1) for v in value)
    if value is None or type(value) in (bool, float, str) or (type(value) is int and value.bit_length() <= 64):
        return value
    return _text(value, repr)
