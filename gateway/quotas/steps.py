"""The working time of a coroutine: the time of its steps, without its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator


class Steps:
    """Await a coroutine. `worked_s` is the time that its steps have taken so far."""

    def __init__(
        self, coroutine: Coroutine[object, None, object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._coroutine = coroutine
        self._clock = clock
        self.worked_s = 0.0

    def __await__(self) -> Generator[object, None, object]:
        step = _sending(self._coroutine, None)
        while True:
            began_s = self._clock()
            try:
                awaited = step()
            except StopIteration as ended:
                return ended.value
            finally:
                self.worked_s += self._clock() - began_s
            try:
                sent = yield awaited
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as thrown:  # noqa: BLE001 - the coroutine receives whatever is thrown in
                step = _throwing(self._coroutine, thrown)
            else:
                step = _sending(self._coroutine, sent)


def _sending(coroutine: Coroutine[object, None, object], sent: None) -> Callable[[], object]:
    return lambda: coroutine.send(sent)


def _throwing(coroutine: Coroutine[object, None, object], thrown: BaseException) -> Callable[[], object]:
    return lambda: coroutine.throw(thrown)
