"""When a session should end before the run does: a signal, the session's limit, a step."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from nanogpt_tpu import env

EXIT_INTERRUPTED = 130


class Stopper:
    """A context in which Ctrl-C and SIGTERM ask for a clean stop; a second one ends the process."""

    def __init__(self, stop_after_step: int | None, session_hours: float | None) -> None:
        self._step = stop_after_step
        self._limit_s = None if session_hours is None else session_hours * 3600
        self._signalled = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(EXIT_INTERRUPTED)
        self._signalled = True
        print("\nStopping after this step, saving; again to end at once.", file=sys.stderr)

    def reason(self, step: int, reserve_s: float) -> str | None:
        """Why to stop after `step`: "signal", "session", "step", or None to go on.

        Args:
            step: optimizer steps finished.
            reserve_s: seconds needed for one more step and the last save.
        """
        if self._signalled:
            return "signal"
        if self._limit_s is not None and env.session_s() + reserve_s > self._limit_s:
            return "session"
        if self._step is not None and step >= self._step:
            return "step"
        return None
