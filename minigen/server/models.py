"""The models of a server: each is loaded at its first request, and has an engine of its own."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from minigen.engine.engine_thread import EngineThread
from minigen.errors import CapacityError, EngineStoppedError, OptionError, WorkerError
from minigen.llm import LLM
from minigen.sampling.params import SamplingParams
from minigen.server.errors import ApiError
from minigen.server.streaming import Bridge


@dataclass(frozen=True)
class Served:
    """A model that is loaded, with its engine's thread, and the way from there to the loop."""

    name: str
    llm: LLM
    thread: EngineThread
    bridge: Bridge
    loaded_at: datetime = field(default_factory=lambda: datetime.now(UTC))


# Called with a model that has just been loaded; what it returns is called before it is unloaded.
Watcher = Callable[[Served], Callable[[], None]]


async def end(last: list[Served], before: "asyncio.Task[None] | None", for_good: bool) -> None:
    """End a model after `before`, and, `for_good`, the processes that hold shares of it.

    `last` is where the model is mentioned last, so that its memory is free thereafter.
    """
    if before is not None:
        await before
    await asyncio.to_thread(_close, last, for_good)


def _close(last: list[Served], for_good: bool) -> None:
    served = last.pop()
    served.thread.close()
    if for_good:
        served.llm.close()
    del served
    gc.collect()  # an engine's parts know each other


logger = logging.getLogger(__name__)

FOREVER = 100 * 365 * 86_400.0  # seconds: who asks for longer asks for ever, and clocks end


class HostedModel:
    """One name that the server answers to: loaded or not, in use or idle. For one event loop.

    An idle model is unloaded after `keep_alive` seconds; None keeps it for ever, and so does more
    than a century. One that `stays`, since it cannot be loaded again, is never unloaded for that.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], LLM],
        keep_alive: float | None,
        watchers: SequenceOf[Watcher] = (),
        stays: bool = False,
    ):
        self.name, self.watchers, self.stays = name, watchers, stays
        self.keep_alive = self.usual_keep_alive = _within_a_century(keep_alive)
        self.served: Served | None = None
        self.num_users = 0
        self.idle_until: datetime | None = None
        self._load_llm = load
        self._loading: asyncio.Task[Served] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._forget: list[Callable[[], None]] = []

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Served]:
        """The loaded model, which stays loaded while the block runs; several load it once.

        Raises `ApiError` (503) if it cannot be loaded; the next request tries again. Raises
        `EngineStoppedError` if it is `broken`.
        """
        self.num_users += 1
        self._stop_timer()
        try:
            yield await self._loaded()
        finally:
            self.num_users -= 1
            self._rest()

    @property
    def broken(self) -> WorkerError | None:
        """What a process that held a share of the loaded model ended with, if one has ended."""
        error = None if self.served is None else self.served.thread.error
        return error if isinstance(error, WorkerError) else None

    def keep_for(self, seconds: float | None) -> None:
        """Unload it after so many idle seconds, until it is loaded anew; None never does."""
        self.keep_alive = None if self.stays else _within_a_century(seconds)
        self._rest()

    async def unload(self) -> None:
        """Give its memory back; requests that are under way get an `EngineStoppedError`."""
        self._begin_unloading()
        if self._unloading is not None:
            await asyncio.shield(self._unloading)

    async def _loaded(self) -> Served:
        if self.served is not None and self.served.thread.is_alive:
            return self.served
        if self.broken is not None:
            raise EngineStoppedError("A share of the model is gone.") from self.broken
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(self._has_loaded)
        return await asyncio.shield(self._loading)  # others wait for it, too

    async def _load(self) -> Served:
        await self.unload()  # an engine whose thread has ended, or one that is being unloaded
        try:
            loaded: list[LLM] = []
            await asyncio.to_thread(self._load_warm, loaded)
            llm = loaded.pop()
        except Exception as error:
            logger.error("the model %s could not be loaded: %s", self.name, error)
            raise ApiError(
                f"The model {self.name!r} could not be loaded: {error}",
                status=503,
                kind="server_error",
                code="model_not_loaded",
            ) from error
        self.keep_alive = self.usual_keep_alive
        thread = EngineThread(llm.engine)
        self.served = Served(self.name, llm, thread, Bridge(thread))
        self._forget = [watch(self.served) for watch in self.watchers]
        return self.served

    def _load_warm(self, loaded: list[LLM]) -> None:
        """Append the model to `loaded`.

        A thread of a pool keeps what its last function returned until the system runs it again,
        which would keep an unloaded model's memory.
        """
        llm = self._load_llm()
        warm_up(llm)
        loaded.append(llm)

    def _has_loaded(self, loading: "asyncio.Task[Served]") -> None:
        self._loading = None
        if not loading.cancelled():
            loading.exception()  # whoever waits for it gets it; perhaps nobody waits any more
        self._rest()

    def _rest(self) -> None:
        """Begin to count the idle time if nobody uses it."""
        self._stop_timer()
        idle = self.num_users == 0 and self.served is not None and self.broken is None
        if idle and self.keep_alive is not None:
            self._timer = asyncio.get_running_loop().call_later(self.keep_alive, self._idle)
            self.idle_until = datetime.fromtimestamp(time.time() + self.keep_alive, UTC)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.idle_until = None

    def _idle(self) -> None:
        logger.info("the model %s is unloaded: nobody has used it for a while", self.name)
        self._begin_unloading(for_good=True)

    def _begin_unloading(self, for_good: bool = False) -> None:
        self._stop_timer()
        if self.served is None:
            return
        served, self.served = self.served, None
        forgets, self._forget = self._forget, []  # which know the model, and would keep it
        for forget in forgets:
            forget()
        self._unloading = asyncio.create_task(end([served], self._unloading, for_good))


class ModelHost:
    """The models by name, the first of which answers where no name is given.

    `loads` are functions that load each, called in a thread of their own. Models that cannot be
    loaded twice should `stay`, whatever a client asks. Raises `OptionError` if there are none.
    """

    def __init__(
        self,
        loads: Mapping[str, Callable[[], LLM]],
        keep_alive: float | None = None,
        watchers: SequenceOf[Watcher] = (),
        stay: bool = False,
    ):
        if not loads:
            raise OptionError("A server needs at least one model.")
        self.models = {
            name: HostedModel(name, load, keep_alive, watchers, stay)
            for name, load in loads.items()
        }
        self.first = next(iter(self.models.values()))
        self.created = int(time.time())
        self.is_ready = False
        self.draining = False
        self.first_error: Exception | None = None

    async def load_first(self) -> None:
        """Load the first model, and be ready; or keep why not in `first_error`."""
        try:
            async with self.first.used():
                self.is_ready = True
        except Exception as error:
            self.first_error = error

    def find(self, name: str | None) -> HostedModel:
        """The model of a name, the first if it is None. Raises `ApiError` (404) for others."""
        if name is None:
            return self.first
        if name not in self.models:
            raise ApiError(
                f"The model {name!r} does not exist here; there is {', '.join(self.models)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return self.models[name]

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Served]:
        """The loaded model of a name, for as long as the block runs.

        Raises `ApiError`: 404 for a name that is not served, 503 if the model cannot be loaded or
        the server is about to end.
        """
        model = self.find(name)
        if self.draining:
            raise ApiError(
                "The server is about to end: it finishes what runs, and takes nothing new.",
                status=503,
                kind="server_error",
                code="server_draining",
                retry_after=5,
            )
        async with model.used() as served:
            self.is_ready = True
            yield served

    @property
    def failure(self) -> Exception | None:
        """What no server goes on after: no first model, or one that has lost a share of itself."""
        broken = (model.broken for model in self.models.values())
        return self.first_error or next(filter(None, broken), None)

    @property
    def num_users(self) -> int:
        """Requests that use a model, or wait for one to be loaded."""
        return sum(model.num_users for model in self.models.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that no engine has begun yet."""
        live = [
            sequence
            for model in self.models.values()
            if model.served is not None
            for sequence in list(model.served.llm.engine.live.values())  # at one instant
        ]
        return sum(sequence.num_cached is None for sequence in live)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.draining = True

    async def close(self) -> None:
        """End all engines; requests that are under way get an `EngineStoppedError`."""
        self.draining = True
        for model in self.models.values():
            await model.unload()


def warm_up(llm: LLM) -> None:
    """Run everything once that compiles itself at first use, so that no request waits for it."""
    with suppress(CapacityError):  # a pool of fewer tokens is a test's
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True)
            llm.generate([0], params, progress=False)


def _within_a_century(seconds: float | None) -> float | None:
    return seconds if seconds is not None and seconds < FOREVER else None
