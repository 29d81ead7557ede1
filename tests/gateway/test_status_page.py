"""The status page in a real headless Chromium: it shows what happens while it happens."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.gateway.harness import MODEL, Gateway, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium and chromedriver on PATH; Debian has them as chromium and chromium-driver.",
    ),
]

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
]  # fmt: skip
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Browser:
    """A page in Chromium; every call is a round trip, so it runs in a thread beside the gateway."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in [*FLAGS, f"--user-data-dir={folder}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(30)

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def text(self, element: str) -> str:
        return await asyncio.to_thread(lambda: self.driver.find_element(By.ID, element).text)

    async def until(self, element: str, accept: Any) -> str:
        """Wait until an element's text is as wanted."""
        async with asyncio.timeout(60):
            while not accept(text := await self.text(element)):
                await asyncio.sleep(0.1)
        return text

    def complaints(self) -> list[str]:
        return [
            entry["message"] for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]
        ]


@pytest_asyncio.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    os.environ.setdefault("SE_OFFLINE", "true")  # selenium must not look for browsers elsewhere
    found = await asyncio.to_thread(Browser, tmp_path / "profile")
    yield found
    await asyncio.to_thread(found.driver.quit)


async def ask(gateway: Gateway, **change: Any) -> int:
    return (await gateway.http.post("/v1/chat/completions", json=ASK | change)).status_code


async def test_the_page_shows_load_latency_hits_and_errors_live(browser: Browser) -> None:
    async with running("word " * 1500) as gateway:
        await browser.open(f"{gateway.url}/")
        assert browser.driver.title == "vLLM-DeepInfer gateway"
        await browser.until("state", lambda text: text == "ready")
        assert await browser.until("active", lambda text: text == "0") == "0"
        assert (
            await browser.text("ttft") == "–"
        )  # nothing measured yet, and no zero that looks like a measurement

        seen, taken = asyncio.Event(), 0

        async def streaming() -> None:
            """Again, until the page, which asks once a second, has shown all three at once."""
            nonlocal taken
            while not seen.is_set():
                answered = await ask(gateway, stream=True) == 200
                taken += answered
                await asyncio.sleep(0.01)

        streams = [asyncio.create_task(streaming()) for _ in range(3)]
        await browser.until("active", lambda text: text == "3")
        await browser.until("running", lambda text: text == "3")
        await browser.until("ttft", lambda text: text.startswith("≤ ") and text.endswith(" ms"))
        await browser.until("itl", lambda text: text.startswith("≤ "))
        await browser.until("kv", lambda text: int(text.replace(",", "")) > 100)
        seen.set()
        await asyncio.gather(*streams)
        await browser.until("active", lambda text: text == "0")
        await browser.until("tokens", lambda text: float(text.replace(",", "")) > 0)

        taken += await ask(gateway, max_tokens=1) == 200
        await browser.until("hits", lambda text: float(text.removesuffix(" %")) > 0)

        gateway.engine.faults.fail_requests |= {taken + 1: 1}
        await ask(gateway)
        await browser.until("failed", lambda text: text == "1")
        assert await browser.text("errors") == "1"
        gateway.engine.crash("the engine crashed on purpose.")
        state = await browser.until("state", lambda text: text.startswith("dead"))
        assert "crashed on purpose" in state
        assert browser.complaints() == []
        points = browser.driver.find_element(By.CSS_SELECTOR, "#chart-tokens polyline").get_attribute(
            "points"
        )
        assert points and len(points.split()) >= 3


async def test_the_page_says_when_the_gateway_is_gone(browser: Browser) -> None:
    async with running() as gateway:
        await browser.open(f"{gateway.url}/status")
        await browser.until("state", lambda text: text == "ready")
    await browser.until("state", lambda text: text == "no answer from the gateway")


async def test_the_api_page_lists_every_operation(browser: Browser) -> None:
    async with running() as gateway:
        await browser.open(f"{gateway.url}/docs")
        text = await browser.until("paths", lambda text: "/v1/chat/completions" in text)
        for path in ("/v1/messages", "/v1/responses/{response_id}/cancel", "/tokenize", "/metrics"):
            assert path in text
        assert browser.complaints() == []
