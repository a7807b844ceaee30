"""Models of a server: loaded once on first use, unloaded when idle, loaded again when broken."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minigen import LLM, SamplingParams
from minigen.errors import ModelNotFoundError, OptionError, RequestError
from minigen.server.errors import ApiError
from minigen.server.metrics import MetricsPage, metrics_watcher
from minigen.server.models import ModelHost, Served
from minigen.trace.events import EventKind, Recorder
from tests.waiting import PATIENCE


class Loads:
    """Loads a tiny model, and counts the loads; fails while `broken`."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.num_loads = 0
        self.broken = False
        self.main = threading.get_ident()

    def __call__(self) -> LLM:
        assert threading.get_ident() != self.main, "the loop must go on meanwhile"
        self.num_loads += 1
        time.sleep(0.05)
        if self.broken:
            raise ModelNotFoundError("There is no such file.")
        return LLM.load(self._directory, weights="float32", max_num_seqs=4)


@pytest.fixture
def loads(tiny_directory: Path) -> Loads:
    return Loads(tiny_directory)


class Keeping(ThreadPoolExecutor):
    """Keeps the results of its functions for a while, as each thread does on a busy machine."""

    def __init__(self) -> None:
        super().__init__(max_workers=4)
        self.kept: list[Future[Any]] = []

    def submit(self, *arguments: Any, **options: Any) -> "Future[Any]":
        self.kept.append(super().submit(*arguments, **options))
        return self.kept[-1]


@asynccontextmanager
async def closing(host: ModelHost) -> AsyncIterator[ModelHost]:
    try:
        yield host
    finally:
        await host.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await asyncio.sleep(0.005)


async def use(host: ModelHost, name: str | None = None) -> Served:
    async with host.lease(name) as served:
        return served


def test_simultaneous_first_requests_load_the_model_once(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads})) as host:
            impatient = asyncio.create_task(use(host))
            await asyncio.sleep(0)
            all_served = asyncio.gather(*(use(host, "a") for _ in range(5)))
            await asyncio.sleep(0.01)
            impatient.cancel()  # the others must still get their model
            assert len(set(map(id, await all_served))) == 1
            await use(host)
        assert loads.num_loads == 1

    asyncio.run(play())


def test_a_model_has_compiled_all_its_kernels_before_it_is_ready(
    tiny_directory: Path,
) -> None:
    seen = Recorder(1000)

    def load() -> LLM:
        llm = LLM.load(tiny_directory, weights="float32", max_num_seqs=4)
        llm.trace.subscribe(seen)
        return llm

    async def play() -> None:
        async with closing(ModelHost({"a": load})) as host:
            await host.load_first()
            assert host.is_ready

    asyncio.run(play())
    tokens = [event for event in seen.events if event.kind is EventKind.NEW_TOKEN]
    assert len(tokens) == 4, "a prompt and a step after it, greedy and drawn"


def test_a_model_that_cannot_be_loaded_fails_only_its_own_requests(loads: Loads) -> None:
    async def play() -> None:
        other = Loads(loads._directory)
        other.broken = True
        async with closing(ModelHost({"a": loads, "b": other})) as host:
            for _ in range(2):
                with pytest.raises(
                    ApiError, match="'b' could not be loaded: There is no"
                ) as caught:
                    await use(host, "b")
                assert caught.value.status == 503
            assert (await use(host, "a")).name == "a"
            other.broken = False
            assert (await use(host, "b")).name == "b"
        assert other.num_loads == 3

    asyncio.run(play())


def test_an_idle_model_is_unloaded_and_one_in_use_is_not(loads: Loads) -> None:
    seen: list[str] = []

    def watch(served: Served) -> Callable[[], None]:
        seen.append(f"{served.name} comes")
        return lambda: seen.append(f"{served.name} goes")

    async def play() -> None:
        async with closing(ModelHost({"a": loads}, keep_alive=0.05, watchers=[watch])) as host:
            async with host.lease("a") as served:
                await asyncio.sleep(0.15)
                assert host.first.served is served
                assert host.first.idle_until is None
            assert host.first.idle_until is not None
            await until(lambda: host.first.served is None)
            await until(lambda: not served.thread.is_alive)
            assert (await use(host)) is not served
            host.first.keep_for(None)
            await asyncio.sleep(0.15)
            assert host.first.served is not None
        assert seen == ["a comes", "a goes"] * 2
        assert loads.num_loads == 2

    asyncio.run(play())


def test_an_unloaded_model_frees_its_memory_though_its_metrics_were_shown(
    loads: Loads,
) -> None:
    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(Keeping())
        page = MetricsPage()
        async with closing(ModelHost({"a": loads}, watchers=[metrics_watcher(page)])) as host:
            runner: Any = (await use(host)).llm.engine.runner
            memory = weakref.ref(runner.pool)
            del runner
            assert memory() is not None
            await host.first.unload()
            assert memory() is None

    asyncio.run(play())


def test_a_model_that_cannot_be_loaded_again_stays_whatever_a_client_asks(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads}, stay=True)) as host:
            served = await use(host)
            host.first.keep_for(0)
            await asyncio.sleep(0.05)
            assert host.first.served is served
            assert host.first.idle_until is None

    asyncio.run(play())


def test_a_keep_alive_of_one_request_does_not_apply_to_the_next(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads})) as host:
            await use(host)
            host.first.keep_for(0)
            await until(lambda: host.first.served is None)
            served = await use(host)
            await asyncio.sleep(0.05)
            assert host.first.served is served, "this request did not set it"

    asyncio.run(play())


def test_an_engine_whose_thread_has_ended_is_loaded_again(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads})) as host:
            served = await use(host)
            served.thread.close()
            assert (await use(host)).thread.is_alive
        assert loads.num_loads == 2

    asyncio.run(play())


def test_a_draining_host_accepts_no_new_requests(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads})) as host:
            async with host.lease(None):
                host.drain()
                assert host.num_users == 1
                with pytest.raises(ApiError) as caught:
                    await use(host)
                assert (caught.value.status, caught.value.code) == (503, "server_draining")
            assert host.num_users == 0

    asyncio.run(play())


def test_a_server_needs_a_model() -> None:
    with pytest.raises(OptionError, match="at least one model"):
        ModelHost({})


def test_a_served_model_cannot_be_run_by_others_until_it_is_free(loads: Loads) -> None:
    async def play() -> None:
        async with closing(ModelHost({"a": loads})) as host:
            llm = (await use(host)).llm
            for ask in (llm.generate, partial(next, llm.stream("abc"))):
                with pytest.raises(RequestError, match="in its own thread"):
                    ask("abc")
            await host.close()
            assert llm.generate("abc", SamplingParams(max_tokens=3)).text is not None

    asyncio.run(play())
