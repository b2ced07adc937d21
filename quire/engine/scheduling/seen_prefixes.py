"""SeenPrefixes: which tokens were computed before, and why they have to be computed again."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.engine.scheduling.request import BlockHash, Hasher

logger = logging.getLogger(__name__)
_MOST_BLOCKS = 1 << 16  # whose hashes are kept: about 15 MB
_MOST_CHATS = 1024
_MOST_MESSAGES = 128  # of a chat that are compared
_LOG_EVERY = 60.0  # seconds


class SeenPrefixes:
    """The hashes of blocks that were computed lately, whether they are cached or not."""

    def __init__(self) -> None:
        self._had_snapshot: OrderedDict[BlockHash, bool] = OrderedDict()  # one that was evicted; oldest block first

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """Note the blocks of a prompt, or an answer."""
        for key in reversed(hashes):  # so that the last blocks are forgotten before the first
            self._had_snapshot.setdefault(key, False)
            self._had_snapshot.move_to_end(key)
        while len(self._had_snapshot) > _MOST_BLOCKS:
            self._had_snapshot.popitem(last=False)

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first blocks of a prompt were computed before."""
        return next((index for index, key in enumerate(hashes) if key not in self._had_snapshot), len(hashes))

    def evicted(self, keys: Iterable[BlockHash]) -> None:
        """Note that the snapshots behind some blocks were evicted."""
        for key in keys:
            if key in self._had_snapshot:
                self._had_snapshot[key] = True

    def had_snapshot(self, hashes: Iterable[BlockHash]) -> bool:
        """Return whether there was a snapshot behind one of some blocks that was evicted since."""
        return any(self._had_snapshot.get(key, False) for key in hashes)

    def clear(self) -> None:
        """Forget everything."""
        self._had_snapshot.clear()


class Chats:
    """The messages of recent chats, to notice that a client or a template changes what the next prompt repeats."""

    def __init__(self, hasher: Hasher, clock: Callable[[], float] = time.monotonic) -> None:
        self._hasher = hasher
        self._clock = clock
        self._messages: OrderedDict[BlockHash, tuple[list[BlockHash], list[int]]] = OrderedDict()  # by the first two
        self._log_at = 0.0

    def compare(self, root: BlockHash, tokens: bytes, ends: Sequence[int]) -> int:
        """Compare a prompt with the last one that has the same two first messages, and keep it.

        Args:
            root: only chats with the same one are compared.
            tokens: int32.
            ends: positions behind the messages.

        Returns:
            The tokens of messages of the earlier prompt that the new one does not have in the same place, although it
            goes on behind them; 0 if only its last message is another, or none is.
        """
        ends, keys, begin = ends[:_MOST_MESSAGES], list[BlockHash](), 0
        for end in ends:
            keys.append(self._hasher((keys[-1] if keys else root) + tokens[begin * 4 : end * 4]))
            begin = end
        if len(keys) < 2:
            return 0
        before, before_ends = self._messages.pop(keys[1], ([], []))
        self._messages[keys[1]] = keys, list(ends)
        if len(self._messages) > _MOST_CHATS:
            self._messages.popitem(last=False)
        pairs = zip(keys, before, strict=False)
        common = next((index for index, (new, old) in enumerate(pairs) if new != old), min(len(keys), len(before)))
        if common >= min(len(before) - 1, len(keys)):
            return 0
        lost = before_ends[-1] - before_ends[common - 1]
        self._log(common + 1, lost)
        return lost

    def _log(self, message: int, lost: int) -> None:
        if self._clock() < self._log_at:
            return
        self._log_at = self._clock() + _LOG_EVERY
        logger.info(
            "message %d of a chat differs from that of the earlier prompt of the same conversation: %d tokens "
            "from there on were computed for nothing. The client has changed it, or the chat template writes it "
            "differently once others follow",
            message,
            lost,
        )
