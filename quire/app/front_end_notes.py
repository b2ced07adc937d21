"""What the parent of several front ends tells them, and what they tell it, through pipes (--api-server-count)."""

from __future__ import annotations

import msgspec


class CoreSeat(msgspec.Struct, frozen=True):
    """A core as a front end gets to know it that is started.

    Attributes:
        rank: its number among the replicas.
        address: of its socket, or of that of the last process with this rank.
        has_entered: it may get requests.
        is_leaving: it gets no more.
        death: why it does not run; None: it runs.
    """

    rank: int
    address: str
    has_entered: bool
    is_leaving: bool
    death: str | None


class Signalled(msgspec.Struct, frozen=True, tag="signal"):
    """The server has got a signal."""

    number: int


class OtherEnded(msgspec.Struct, frozen=True, tag="other_ended"):
    """Another front end has ended."""

    identity: str


class CoreEnded(msgspec.Struct, frozen=True, tag="core_ended"):
    """A core has ended. `restarts`: another one is started in its place; else the server stops."""

    rank: int
    reason: str
    restarts: bool


class CoreStarted(msgspec.Struct, frozen=True, tag="core_started"):
    """Another core loads the model, in place of one that has ended, or as a new replica."""

    rank: int
    address: str


class CatchUp(msgspec.Struct, frozen=True, tag="catch_up"):
    """The front end is to make a core, which all have seen loaded, as the other replicas are."""

    rank: int


class CoreEntered(msgspec.Struct, frozen=True, tag="core_entered"):
    """A core may get requests."""

    rank: int


class CoresLeave(msgspec.Struct, frozen=True, tag="cores_leave"):
    """Cores get no more requests, and are removed once they have none; or they go on after all."""

    ranks: list[int]
    is_leaving: bool


class CoresRemoved(msgspec.Struct, frozen=True, tag="cores_removed"):
    """Cores are removed."""

    ranks: list[int]


class Scaling(msgspec.Struct, frozen=True, tag="scaling"):
    """Whether the number of replicas is being changed."""

    is_scaling: bool


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """The end of a change of the number of replicas, for the front end that has asked for it.

    Attributes:
        error: why there are as many as before; None: the change is done.
        timed_out: requests have not ended in time.
    """

    error: str | None = None
    timed_out: bool = False


OfCores = OtherEnded | CoreEnded | CoreStarted | CatchUp | CoreEntered | CoresLeave | CoresRemoved | Scaling | Scaled
ToFrontEnd = Signalled | OfCores


class Listens(msgspec.Struct, frozen=True, tag="listens"):
    """The front end serves.

    Attributes:
        max_model_len: the context that requests are checked for, if the KV cache may have reduced it.
        cache_bytes: of the KV cache of a core.
    """

    max_model_len: int | None
    cache_bytes: int


class CoreLoaded(msgspec.Struct, frozen=True, tag="core_loaded"):
    """The front end has seen that a core is loaded: what it asks of all replicas is asked of this one as well."""

    rank: int


class CaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """A core is as the other replicas are."""

    rank: int


class EndCore(msgspec.Struct, frozen=True, tag="end_core"):
    """A core does not answer, or cannot become as the others are: it is to be started again."""

    rank: int
    reason: str


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The front end has no requests in the cores that leave."""


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Change the number of replicas. It is answered with `Scaled`. `drain_timeout`: seconds."""

    size: int
    drain_timeout: float


class GiveUpScaling(msgspec.Struct, frozen=True, tag="give_up_scaling"):
    """Leave the number of replicas as it was: nobody waits for the change that the front end has asked for."""


FromFrontEnd = Listens | CoreLoaded | CaughtUp | EndCore | Drained | Scale | GiveUpScaling
