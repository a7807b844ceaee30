"""The models of a server: each is loaded at its first request and has a separate engine."""

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


@dataclass(frozen=True)
class Served:
    """A loaded model with its engine's thread, which delivers events in the event loop."""

    name: str
    llm: LLM
    thread: EngineThread
    loaded_at: datetime = field(default_factory=lambda: datetime.now(UTC))


# Called with a model that has just been loaded; the function it returns is called before unloading.
Watcher = Callable[[Served], Callable[[], None]]


async def end(last: list[Served], before: "asyncio.Task[None] | None", for_good: bool) -> None:
    """Stop a model's engine after `before`; `for_good` also ends the workers with its shards.

    `last` holds the only reference to the model, so that its memory is free afterwards.
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
    gc.collect()  # the parts of an engine form reference cycles


logger = logging.getLogger(__name__)

FOREVER = 100 * 365 * 86_400.0  # seconds: anything longer means forever, since dates have a maximum


class HostedModel:
    """A model that the server offers, loaded or not. It belongs to one event loop.

    An idle model is unloaded after `keep_alive` seconds; with None, or more than a century, it
    stays loaded forever. A model that `stays`, because it cannot be loaded again, ignores
    `keep_alive` values of requests.
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

    def count_user(self, change: int) -> None:
        """Count a user more or less. A model stays loaded while it has any."""
        self.num_users += change
        self._rest()

    @property
    def broken(self) -> WorkerError | None:
        """The error of a worker process with a shard of the loaded model, if one has ended."""
        error = None if self.served is None else self.served.thread.error
        return error if isinstance(error, WorkerError) else None

    def keep_for(self, seconds: float | None) -> None:
        """Set the idle time in seconds before unloading, until the next load; None means never."""
        self.keep_alive = None if self.stays else _within_a_century(seconds)
        self._rest()

    async def unload(self) -> None:
        """Unload the model and free its memory; requests in flight get an `EngineStoppedError`."""
        self._begin_unloading()
        if self._unloading is not None:
            await asyncio.shield(self._unloading)

    async def loaded(self) -> Served:
        """Load the model if necessary; concurrent callers share one load.

        Raises `ApiError` (503) if the model cannot be loaded; the next call tries again. Raises
        `EngineStoppedError` if it is `broken`.
        """
        if self.served is not None and self.served.thread.is_alive:
            return self.served
        if self.broken is not None:
            raise EngineStoppedError("A shard of the model is lost.") from self.broken
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(self._has_loaded)
        return await asyncio.shield(self._loading)  # other requests wait for the same load

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
        loop = asyncio.get_running_loop()
        self.served = Served(self.name, llm, EngineThread(llm.engine, loop.call_soon_threadsafe))
        self._forget = [watch(self.served) for watch in self.watchers]
        return self.served

    def _load_warm(self, loaded: list[LLM]) -> None:
        """Append the model to `loaded`.

        A return value would stay referenced by the pool's thread until its next task, and so keep
        the memory of an unloaded model.
        """
        llm = self._load_llm()
        warm_up(llm)
        loaded.append(llm)

    def _has_loaded(self, loading: "asyncio.Task[Served]") -> None:
        self._loading = None
        if not loading.cancelled():
            loading.exception()  # read, so that asyncio does not log it if no request waits for it
        self._rest()

    def _rest(self) -> None:
        """Start the idle timer if no request uses the model."""
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
        logger.info("the model %s is unloaded: no request has used it for a while", self.name)
        self._begin_unloading(for_good=True)

    def _begin_unloading(self, for_good: bool = False) -> None:
        self._stop_timer()
        if self.served is None:
            return
        served, self.served = self.served, None
        forgets, self._forget = self._forget, []  # they reference the model
        for forget in forgets:
            forget()
        self._unloading = asyncio.create_task(end([served], self._unloading, for_good))


class ModelHost:
    """The models of a server by name; requests without a model name use the first.

    `loads` has a function for each name that loads the model; it runs in a separate thread. Use
    `stay` for models that cannot be loaded twice: no client can then unload them. Raises
    `OptionError` if there are no models.
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
        """Load the first model and set `is_ready`, or store the error in `first_error`."""
        try:
            async with self.lease(None):
                pass
        except Exception as error:
            self.first_error = error

    def find(self, name: str | None) -> HostedModel:
        """Return the model of this name (None: the first). Raises `ApiError` (404) if unknown."""
        if name is None:
            return self.first
        if name not in self.models:
            raise ApiError(
                f"The model {name!r} does not exist here; choose one of {', '.join(self.models)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return self.models[name]

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Served]:
        """Load the model of this name if necessary, and keep it loaded while the block runs.

        Raises `ApiError`: 404 for an unknown name, 503 if the model cannot be loaded or the server
        is shutting down.
        """
        model = self.find(name)
        if self.draining:
            raise ApiError(
                "The server is shutting down: running requests finish, new ones are rejected.",
                status=503,
                kind="server_error",
                code="server_draining",
                retry_after=5,
            )
        model.count_user(1)
        try:
            served = await model.loaded()
            self.is_ready = True
            yield served
        finally:
            model.count_user(-1)

    @property
    def failure(self) -> Exception | None:
        """The error that makes the server stop: the first model failed to load, or lost a shard."""
        broken = (model.broken for model in self.models.values())
        return self.first_error or next(filter(None, broken), None)

    @property
    def num_users(self) -> int:
        """The number of requests that use a model or wait for one to be loaded."""
        return sum(model.num_users for model in self.models.values())

    @property
    def num_waiting(self) -> int:
        """The number of sequences that no engine has started yet."""
        live = [
            sequence
            for model in self.models.values()
            if model.served is not None
            for sequence in list(model.served.llm.engine.live.values())  # an atomic copy
        ]
        return sum(sequence.num_cached is None for sequence in live)

    def drain(self) -> None:
        """Reject new requests from now on."""
        self.draining = True

    async def close(self) -> None:
        """Stop all engines; requests in flight get an `EngineStoppedError`."""
        self.draining = True
        for model in self.models.values():
            await model.unload()


def warm_up(llm: LLM) -> None:
    """Run everything that compiles at first use, so that no request waits for compilation."""
    with suppress(CapacityError):  # only in tests is the KV cache too small for this
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True)
            llm.generate([0], params, progress=False)


def _within_a_century(seconds: float | None) -> float | None:
    return seconds if seconds is not None and seconds < FOREVER else None
