"""The exception tree. Every message says what, where, expected, got and how to fix it.

``EvenEPError`` catches everything. The branches answer one question each:

* ``ConfigError``: refused at construction. Nothing was built.
* ``InputError``: an argument of one call is wrong. Nothing was queued; call again, corrected.
* ``StateError``: calls in the wrong order, on a closed or poisoned object.
* ``CheckpointError``: the files do not hold what the model needs.
* ``TransportError``: the ranks could not meet, agree or hear each other.
"""

from __future__ import annotations

_ABSENT = object()  # None is something one can get


def explain(
    what: str, *, where: str = "", expected: object = None, got: object = _ABSENT, fix: str = ""
) -> str:
    """Compose the house's error text: ``where: what (expected …, got …). Fix: …``."""
    text = f"{where}: {what}" if where else what
    facts = []
    if expected is not None:
        facts.append(f"expected {expected}")
    if got is not _ABSENT:
        facts.append(f"got {got}")
    if facts:
        text += f" ({', '.join(facts)})"
    text += "."
    if fix:
        text += f" Fix: {fix}."
    return text


class EvenEPError(Exception):
    """Base of everything EvenEP raises on purpose."""


class ConfigError(EvenEPError, ValueError):
    """A size or choice is refused at construction; nothing was built."""


class UnsupportedError(ConfigError):
    """A well-formed combination that ``evenep.support`` lists as refused."""


class InputError(EvenEPError, ValueError):
    """An argument of a call has the wrong dtype, shape or values; nothing was queued."""


class PlanError(EvenEPError, ValueError):
    """A plan breaks an invariant (C2), or no plan exists for the asked policy and budget."""


class StateError(EvenEPError, RuntimeError):
    """A call in the wrong order, or on a closed object; nothing was queued."""


class LeaseError(StateError):
    """A zero-copy view was used after the step that owned it ended."""


class PoisonedError(StateError):
    """An earlier step failed after work was queued; only a collective ``reset()`` helps."""


class UnfetchedSlotError(StateError):
    """A slot was about to be computed before its expert's bytes had arrived."""


class CheckpointError(EvenEPError):
    """A checkpoint is missing something, has something extra, or something of the wrong kind."""


class TransportError(EvenEPError, RuntimeError):
    """The ranks could not meet, agree or hear each other."""


class BootstrapError(TransportError):
    """A rank never arrived at construction, or shared memory could not be made or mapped."""


class AgreementError(TransportError):
    """Ranks came to the same step with different configurations, layers or policies."""


class StoreLostError(TransportError):
    """The store through which ranks meet and leave word of failures no longer answers."""


class PeerError(TransportError):
    """A peer is gone. Names who noticed, who is missing, and exactly where in the step.

    Attributes:
        rank: the rank that raises this.
        peer: the rank at fault (the root cause, also when others failed because of it).
        phase: ``counts``, ``dispatch``, ``fetch``, ``combine``, ``construct`` or ``reset``.
        layer: MoE layer of the step, -1 outside a step.
        epoch: the step's number since construction, -1 outside a step.
    """

    kind = "failed"

    def __init__(
        self, *, rank: int, peer: int, phase: str, layer: int, epoch: int, detail: str = ""
    ) -> None:
        self.rank, self.peer, self.phase = rank, peer, phase
        self.layer, self.epoch, self.detail = layer, epoch, detail
        text = (
            f"rank {rank}: peer {peer} {self.kind} in phase '{phase}' "
            f"(layer {layer}, epoch {epoch})"
        )
        super().__init__(f"{text}: {detail}" if detail else text)

    def __reduce__(self) -> tuple[object, ...]:
        fields = ("rank", "peer", "phase", "layer", "epoch", "detail")
        made_of = {name: getattr(self, name) for name in fields}
        return _rebuild_peer_error, (type(self), made_of), dict(self.__dict__)


def _rebuild_peer_error(cls: type[PeerError], fields: dict[str, object]) -> PeerError:
    return cls(**fields)  # type: ignore[arg-type]


class PeerTimeout(PeerError):
    """The peer did not arrive within the deadline (stopped, stuck, or not calling)."""

    kind = "did not arrive"


class PeerDied(PeerError):
    """The peer's process or connection is gone."""

    kind = "died"


class PeerFailed(PeerError):
    """The peer raised an error of its own and said so before leaving."""

    kind = "raised an error"


class LaunchError(EvenEPError, RuntimeError):
    """One or more ranks of ``evenep.launch`` failed.

    Attributes:
        failures: ``{rank: exception}`` for every rank that did not return.
    """

    def __init__(self, failures: dict[int, BaseException]) -> None:
        self.failures = failures
        lines = [f"  rank {r}: {type(e).__name__}: {e}" for r, e in sorted(failures.items())]
        super().__init__(f"{len(failures)} rank(s) failed:\n" + "\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return LaunchError, (self.failures,)
