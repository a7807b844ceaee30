"""Stands in for psutil where it is not installed: it knows no process, so none is found stopped."""

STATUS_STOPPED = "stopped"


class Error(Exception):
    """What psutil raises for a process that is gone."""


class Process:
    """A process that cannot be looked at."""

    def __init__(self, pid: int | None = None):
        raise Error(f"psutil is not installed, so nothing is known of process {pid}")
