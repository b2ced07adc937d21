"""Simulate 8 to 1,024 replicas behind a dispatcher: hit rate of the prefix cache and TTFT of several policies.

    python -m benchmarks.routing --result routing.json

It is a simulation: no model runs, and times are those of the model of cost below. It compares policies; it does not say
how fast a server is. The cache-aware policy is the code that dispatches requests in Quire, not a copy of it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.replicas.dispatch import dispatch_cost
from quire.engine.client.replicas.prefix_index import PrefixIndex

BLOCK = 512  # tokens


@dataclass(frozen=True)
class Shape:
    """Shape of the requests, after what Mooncake's authors publish of their service: their traces have about 7,600
    tokens of input and 180 of output per request, half of the input could be reused at best, a few blocks are used by
    very many requests, and most by one. Requests here are generated; none of a trace is copied.
    """

    systems: int = 200  # system prompts, of which few are popular
    popularity: float = 1.2  # exponent of Zipf's law
    system_tokens: float = 1500.0  # median
    first_tokens: float = 2600.0  # median of the first turn: documents, with a long tail
    first_spread: float = 1.3  # of the logarithm
    next_tokens: float = 350.0  # median of later turns
    next_spread: float = 1.0
    output_tokens: float = 110.0  # median
    output_spread: float = 1.0
    more_turns: float = 0.66  # probability of another turn
    think_seconds: float = 20.0  # mean time between an answer and the next turn
    max_tokens: int = 120_000  # of a prompt


@dataclass(frozen=True)
class Costs:
    """Times of a replica, about those of an 8B model on one GPU of 80 GB.

    Prompts are computed one after the other; meanwhile the running sequences take their share of each step. A step has
    a fixed time, and some for each running sequence.
    """

    prompt_tokens_per_second: float = 9000.0
    decode_share: float = 0.004  # of the time of a prompt, for each running sequence
    step_seconds: float = 0.012
    sequence_seconds: float = 0.00012
    cache_tokens: int = 400_000


@dataclass(frozen=True)
class Request:
    """A request: its full blocks, its tokens, and those of its answer. `chance`: decides about its session."""

    arrival: float
    chance: random.Random
    blocks: tuple[int, ...]
    tokens: int
    output: int


class Trace:
    """Sessions that arrive at random; a turn comes some time after the answer to the one before.

    A session is the same for all policies: only the times of its later turns depend on the answers.
    """

    def __init__(self, shape: Shape, sessions_per_second: float, seconds: float, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._next_block = 0
        chance = random.Random(seed)
        self._systems = [self._fresh(self._lognormal(chance, shape.system_tokens, 0.8)) for _ in range(shape.systems)]
        weights = [1 / rank**shape.popularity for rank in range(1, shape.systems + 1)]
        self._cumulative = list(accumulate(weights))
        self._rate, self._seconds = sessions_per_second, seconds
        self._arrivals = chance

    def first_turns(self) -> Iterator[Request]:
        """The first turns of all sessions, in order of time."""
        shape, now, session = self._shape, 0.0, 0
        while (now := now + self._arrivals.expovariate(self._rate)) < self._seconds:
            chance = random.Random(self._seed << 32 | session)
            system = chance.choices(self._systems, cum_weights=self._cumulative)[0]
            tokens = len(system) * BLOCK + self._lognormal(chance, shape.first_tokens, shape.first_spread)
            yield self._request(now, chance, system, tokens)
            session += 1

    def next_turn(self, request: Request, answered: float) -> Request | None:
        """The turn after one that was answered; None if it was the last, or the trace is over."""
        shape, chance = self._shape, request.chance
        if chance.random() > shape.more_turns:
            return None
        now = answered + chance.expovariate(1 / shape.think_seconds)
        tokens = request.tokens + request.output + self._lognormal(chance, shape.next_tokens, shape.next_spread)
        if now > self._seconds or tokens > shape.max_tokens:
            return None
        return self._request(now, chance, request.blocks, tokens)

    def _request(self, now: float, chance: random.Random, before: tuple[int, ...], tokens: int) -> Request:
        blocks = before + self._fresh(tokens - len(before) * BLOCK)
        output = self._lognormal(chance, self._shape.output_tokens, self._shape.output_spread)
        return Request(now, chance, blocks, tokens, output)

    def _lognormal(self, chance: random.Random, median: float, spread: float) -> int:
        return min(self._shape.max_tokens // 2, max(1, int(chance.lognormvariate(math.log(median), spread))))

    def _fresh(self, tokens: int) -> tuple[int, ...]:
        """Blocks of text that nobody has sent before; only full ones can be reused."""
        count = tokens // BLOCK
        self._next_block += count
        return tuple(range(self._next_block - count, self._next_block))


class Index:
    """Which replicas hold which blocks, as far as their events have arrived."""

    def __init__(self, replicas: int) -> None:
        self._holders: dict[int, int] = {}  # bits of replicas
        self._bytes = (replicas + 7) // 8
        self._replicas = replicas

    def store(self, replica: int, blocks: Sequence[int]) -> None:
        """Take note of an event: a replica holds blocks."""
        bit, holders = 1 << replica, self._holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def remove(self, replica: int, blocks: Sequence[int]) -> None:
        """Take note of an event: a replica has evicted blocks."""
        bit, holders = 1 << replica, self._holders
        for block in blocks:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def leading(self, blocks: Sequence[int]) -> NDArray[np.float64]:
        """How many of a prompt's first blocks each replica holds."""
        held = np.zeros(self._bytes * 8)
        mask, depth = -1, 0
        for block in blocks:
            still = mask & self._holders.get(block, 0)
            if still != mask and mask != -1:
                held += depth * self._array(mask & ~still)
            mask = still
            if not mask:
                break
            depth += 1
        if mask > 0:
            held += depth * self._array(mask)
        return held[: self._replicas]

    def _array(self, mask: int) -> NDArray[np.uint8]:
        content = np.frombuffer(mask.to_bytes(self._bytes, "little"), np.uint8)
        return np.unpackbits(content, bitorder="little")


@dataclass(frozen=True)
class Policy:
    """A way to dispatch.

    Attributes:
        name: for the table.
        by_load: the replica with the least to do gets a request; False: the next one.
        by_cache: what a replica holds is no work for it.
        delay: seconds until an event of a replica's cache arrives.
        remembers: what was dispatched counts as held at once, before events say so.
    """

    name: str
    by_load: bool = True
    by_cache: bool = False
    delay: float = 0.0
    remembers: bool = False


POLICIES = (
    Policy("round robin", by_load=False),
    Policy("least tokens"),
    Policy("cache-aware, events at once", by_cache=True),
    Policy("cache-aware, events after 1 s", by_cache=True, delay=1.0),
    Policy("cache-aware, events after 10 s", by_cache=True, delay=10.0),
    Policy("cache-aware, after 10 s, with own dispatches", by_cache=True, delay=10.0, remembers=True),
    Policy("cache-aware, no events, own dispatches", by_cache=True, delay=math.inf, remembers=True),
)
_ANSWER = 180 / BLOCK  # blocks of a usual answer


class Replicas:
    """The replicas and their dispatcher, in simulated time."""

    def __init__(self, count: int, policy: Policy, costs: Costs) -> None:
        cache_blocks = costs.cache_tokens // BLOCK
        self.count, self.policy, self.costs = count, policy, costs
        self.held = [PrefixIndex(cache_blocks, cache_blocks) for _ in range(count)]
        self.index = Index(count)
        self.queued = np.zeros(count)  # blocks that are not computed yet, as the dispatcher believes
        self.running = np.zeros(count)
        self.given = np.zeros(count)
        self.free_at = [0.0] * count
        self.decoding = [0] * count
        self._turn = 0
        self._believed = [PrefixIndex(cache_blocks) for _ in range(count)] if policy.remembers else []

    def choose(self, request: Request) -> tuple[int, float]:
        """Return the replica of a request, and the blocks that the dispatcher believes it to compute."""
        blocks = float(len(request.blocks))
        if not self.policy.by_load:
            self._turn = (self._turn + 1) % self.count
            return self._turn, blocks
        new: NDArray[np.float64] = np.full(self.count, blocks)
        if self.policy.by_cache:
            new -= self.index.leading(request.blocks)
        # Among equals those with fewer requests and fewer blocks, as in `ranked`.
        costs = dispatch_cost(self.queued + _ANSWER * self.running, new) + self.running * 1e-6 + self.given * 1e-12
        replica = int(np.argmin(costs))
        self.given[replica] += new[replica]
        if self._believed:
            known = self._believed[replica]
            missing = [block for block in request.blocks if block not in known]
            evicted = known.add(request.blocks)
            self.index.store(replica, missing)
            self.index.remove(replica, evicted)
        return replica, float(new[replica])

    def compute(self, replica: int, request: Request, now: float) -> tuple[int, float]:
        """Return the tokens that are cached, and when the prompt is computed."""
        cached = self.held[replica].matched(request.blocks) * BLOCK
        tokens = max(1, request.tokens - cached)
        share = 1 + self.costs.decode_share * self.decoding[replica]
        begins = max(now, self.free_at[replica])
        self.free_at[replica] = begins + tokens / self.costs.prompt_tokens_per_second * share
        return cached, self.free_at[replica]

    def keep(self, replica: int, request: Request) -> tuple[list[int], list[int]]:
        """Keep a prompt's blocks in the cache; return those that are new and those that were evicted."""
        held = self.held[replica]
        new = [block for block in request.blocks if block not in held]
        return new, held.add(request.blocks)


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    replicas: int
    policy: str
    requests: int
    hit_rate: float
    ttft_p50: float
    ttft_p99: float
    busiest: float  # prompts computed by the busiest replica, against the mean
    microseconds: float  # of this machine, for each request: the simulation with the dispatcher


class Simulation:
    """Replicas, their dispatcher and a trace, in simulated time. The first third of it is not measured."""

    def __init__(self, replicas: int, policy: Policy, costs: Costs, trace: Trace, seconds: float) -> None:
        self._policy, self._costs, self._trace = policy, costs, trace
        self._replicas = Replicas(replicas, policy, costs)
        self._measured_from = seconds / 3
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._ttfts: list[float] = []
        self._prompt_tokens = self._cached_tokens = self._requests = 0
        self._computed = np.zeros(replicas)

    def run(self) -> Outcome:
        """Simulate until the last request has ended."""
        began = time.perf_counter()
        sessions = self._trace.first_turns()
        upcoming = next(sessions, None)
        while self._events or upcoming is not None:
            if upcoming is not None and (not self._events or upcoming.arrival <= self._events[0][0]):
                self._at(upcoming.arrival, partial(self._arrive, upcoming))
                upcoming = next(sessions, None)
            when, _, do = heapq.heappop(self._events)
            do(when)
        p50, p99 = np.percentile(self._ttfts, [50, 99])
        return Outcome(
            replicas=self._replicas.count,
            policy=self._policy.name,
            requests=self._requests,
            hit_rate=round(self._cached_tokens / self._prompt_tokens, 4),
            ttft_p50=round(float(p50), 3),
            ttft_p99=round(float(p99), 3),
            busiest=round(float(self._computed.max() / self._computed.mean()), 2),
            microseconds=round((time.perf_counter() - began) / self._requests * 1e6, 1),
        )

    def _at(self, when: float, do: Callable[[float], None]) -> None:
        self._serial += 1  # what happens at the same time happens in order
        heapq.heappush(self._events, (when, self._serial, do))

    def _arrive(self, request: Request, now: float) -> None:
        self._requests += 1
        replica, expected = self._replicas.choose(request)
        self._replicas.queued[replica] += expected
        self._replicas.running[replica] += 1
        cached, ready = self._replicas.compute(replica, request, now)
        if now > self._measured_from:
            self._prompt_tokens += request.tokens
            self._cached_tokens += cached
            self._computed[replica] += request.tokens - cached
            self._ttfts.append(ready - now)
        self._at(ready, partial(self._finish_prompt, request, replica, expected))

    def _finish_prompt(self, request: Request, replica: int, expected: float, now: float) -> None:
        self._replicas.queued[replica] -= expected
        new, evicted = self._replicas.keep(replica, request)
        if self._policy.by_cache and self._policy.delay < math.inf and (new or evicted):
            self._at(now + self._policy.delay, partial(self._note, replica, new, evicted))
        self._replicas.decoding[replica] += 1
        step = self._costs.step_seconds + self._costs.sequence_seconds * self._replicas.decoding[replica]
        self._at(now + request.output * step, partial(self._end, request, replica))

    def _note(self, replica: int, new: list[int], evicted: list[int], _: float) -> None:
        self._replicas.index.store(replica, new)
        self._replicas.index.remove(replica, evicted)

    def _end(self, request: Request, replica: int, now: float) -> None:
        self._replicas.decoding[replica] -= 1
        self._replicas.running[replica] -= 1
        following = self._trace.next_turn(request, now)
        if following is not None:
            self._at(following.arrival, partial(self._arrive, following))


def simulate(replicas: int, policy: Policy, shape: Shape, costs: Costs, rate: float, seconds: float) -> Outcome:
    """Simulate one policy. `rate`: sessions per second and replica."""
    trace = Trace(shape, rate * replicas, seconds, seed=1)
    return Simulation(replicas, policy, costs, trace, seconds).run()


def upper_bound(shape: Shape, costs: Costs, rate: float, replicas: int, seconds: float) -> Outcome:
    """One replica that is as fast as all together, and whose cache is as large as all together."""
    large = Costs(
        costs.prompt_tokens_per_second * replicas,
        costs.decode_share / replicas,
        costs.step_seconds,
        costs.sequence_seconds / replicas,
        costs.cache_tokens * replicas,
    )
    return simulate(1, Policy(f"one replica of the size of {replicas}"), shape, large, rate * replicas, seconds)


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=120.0, help="of simulated time")
    parser.add_argument("--rate", type=float, default=0.28, help="sessions per second and replica")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    shape, costs = Shape(), Costs()
    outcomes = []
    print(f"{'replicas':>8}  {'policy':46} {'requests':>8} {'hit rate':>8} {'TTFT p50':>8} {'p99':>8} {'busiest':>7}")
    for replicas in options.replicas:
        load = options.rate, options.seconds
        runs = [partial(upper_bound, shape, costs, options.rate, replicas, options.seconds)]
        runs += [partial(simulate, replicas, policy, shape, costs, *load) for policy in POLICIES]
        for run in runs:
            outcome = run()
            outcomes.append(outcome)
            print(
                f"{replicas:8}  {outcome.policy:46} {outcome.requests:8} {outcome.hit_rate:8.3f} "
                f"{outcome.ttft_p50:8.3f} {outcome.ttft_p99:8.3f} {outcome.busiest:7.2f}",
                flush=True,
            )
            if options.result is not None:  # each time, as the largest take minutes
                _write(options.result, options.seconds, options.rate, shape, costs, outcomes)


def _write(path: Path, seconds: float, rate: float, shape: Shape, costs: Costs, outcomes: Sequence[Outcome]) -> None:
    result = {
        "command": f"python -m benchmarks.routing --seconds {seconds:g} --rate {rate:g}",
        "shape": asdict(shape),
        "costs": asdict(costs),
        "block": BLOCK,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
