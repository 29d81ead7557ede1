"""Virtual time: timers in order, no waiting, sockets still work."""

from __future__ import annotations

import asyncio
import time

import pytest

from vllm_deepinfer.engine.clock import LoopClock, VirtualTimeLoop, run_virtual


def test_an_hour_passes_in_no_time_and_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        seen = []

        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(after("c", 3_600), after("a", 0.5), after("b", 0.5), after("zero", 0))
        return seen

    begin = time.monotonic()
    seen = run_virtual(main())
    assert time.monotonic() - begin < 60
    assert [name for name, _ in seen] == ["zero", "a", "b", "c"]
    assert [at for _, at in seen] == pytest.approx([0, 0.5, 0.5, 3_600])


def test_timeouts_are_virtual_too() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 100)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(100)


def test_both_ends_of_a_socket_on_one_loop_keep_order_with_timers() -> None:
    async def main() -> tuple[bytes, float]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            question = await reader.readline()
            await asyncio.sleep(2)
            writer.write(question.upper())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello\n")
        got = await asyncio.wait_for(reader.readline(), 3)
        writer.close()
        server.close()
        return got, asyncio.get_running_loop().time()

    got, at = run_virtual(main())
    assert got == b"HELLO\n"
    assert at == pytest.approx(2)


def test_the_loop_clock_answers_from_outside_once_it_knows_its_loop() -> None:
    clock = LoopClock()
    with pytest.raises(RuntimeError):
        clock.now()
    loop = VirtualTimeLoop()

    async def main() -> float:
        start = clock.now()
        await clock.sleep(4)
        return clock.now() - start

    assert loop.run_until_complete(main()) == pytest.approx(4)
    assert clock.now() == pytest.approx(4)
    loop.close()
