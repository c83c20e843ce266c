"""The priority of a client process, so that a request that is due does not wait for a core behind other work."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import IntEnum

from megatoken.processes import usable_cores

NICENESS = -15
BUSY_SHARE = 0.6  # of a core in a second; a process that takes more does without, so that it starves no server


class Priority(IntEnum):
    """What a client process runs at, the lowest first."""

    USUAL = 0
    RAISED = 1  # niceness NICENESS
    REAL_TIME = 2  # SCHED_RR at its lowest priority


class OwnPriority:
    """The priority of the thread that creates this one. Threads and processes that it starts run at the usual one.

    The system permits more to root, with CAP_SYS_NICE, or within RLIMIT_RTPRIO and RLIMIT_NICE.
    """

    def __init__(self, processes: int) -> None:
        """``processes`` like this one share the machine: more than half as many as cores do not run in real time."""
        self._in_real_time = 2 * processes <= usable_cores()
        self._usual_niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.found = Priority.USUAL

    def hold(self, busy_share: float) -> Priority:
        """Takes the highest that is permitted, or the usual one after a second with ``busy_share`` of a core used."""
        if busy_share > BUSY_SHARE:
            self.give_back()
        elif self.found is Priority.USUAL:
            for wanted in (Priority.REAL_TIME, Priority.RAISED) if self._in_real_time else (Priority.RAISED,):
                with suppress(OSError):
                    self._take(wanted)
                    break
        return self.found

    def give_back(self) -> None:
        """Takes the usual one."""
        if self.found is not Priority.USUAL:
            self._take(Priority.USUAL)

    def _take(self, wanted: Priority) -> None:
        """Raises OSError: not permitted."""
        policy, level = os.SCHED_OTHER, 0
        if wanted is Priority.REAL_TIME:
            policy, level = os.SCHED_RR, os.sched_get_priority_min(os.SCHED_RR)
        os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(level))
        if policy == os.SCHED_OTHER:
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS if wanted is Priority.RAISED else self._usual_niceness)
        self.found = wanted
