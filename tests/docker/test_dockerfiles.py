"""The Dockerfiles by the official parser: pinned, unprivileged, with layers that change as seldom as "
"they can."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import dockerfile
import pytest

from tools.set_up.image import PARTS

ROOT = Path(__file__).parents[2]
FILES = {name: dockerfile.parse_file(str(ROOT / "docker" / f"Dockerfile.{name}")) for name in ("cpu", "cuda")}
BOTH = pytest.mark.parametrize("name", FILES)


def words(name: str, instruction: str) -> list[tuple[str, ...]]:
    """The words of every such instruction."""
    return [tuple(one.value) for one in FILES[name] if one.cmd.upper() == instruction]


def position(name: str, text: str) -> int:
    """Of the first instruction that holds the text."""
    return next(place for place, one in enumerate(FILES[name]) if text in one.original)


@BOTH
def test_the_base_is_pinned_to_a_release(name: str) -> None:
    ((base,),) = words(name, "FROM")
    image, _, tag = base.partition(":")
    assert image in ("debian", "vllm/vllm-openai")
    assert re.fullmatch(r"v?\d+\.\d+(\.\d+)?(-slim)?", tag), f"{base} is not pinned to a release"


def test_the_cuda_image_is_of_the_vllm_that_the_plugins_pin() -> None:
    extras = tomllib.loads((ROOT / "plugins" / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    ((base,),) = words("cuda", "FROM")
    assert base.rpartition(":v")[2] == extras["cuda"][0].partition("==")[2]


@BOTH
def test_it_runs_as_a_user_who_owns_only_the_cache(name: str) -> None:
    assert words(name, "USER") == [("10001",)]
    (made,) = [value for (value,) in words(name, "RUN") if "useradd" in value]
    assert "--uid 10001" in made and "--shell /usr/sbin/nologin" in made
    assert re.findall(r"(/\S+)", made.split("--group=deepinfer")[1]) == ["/var/cache/deepinfer"]
    assert words(name, "VOLUME") == [("/var/cache/deepinfer",)]
    assert position(name, "USER") > position(name, "image ")  # nothing is built as that user


@BOTH
def test_it_has_a_health_check_that_asks_a_gateway(name: str) -> None:
    (check,) = [one for one in FILES[name] if one.cmd.upper() == "HEALTHCHECK"]
    assert {flag.split("=")[0] for flag in check.flags} == {
        "--interval",
        "--timeout",
        "--start-period",
        "--retries",
    }
    assert "http://127.0.0.1:8000/health" in check.value[-1]
    compile(check.value[-1], "health check", "exec")
    assert words(name, "EXPOSE") == [("8000",)]


@BOTH
def test_it_starts_a_recipe_that_exists_under_an_init(name: str) -> None:
    assert words(name, "ENTRYPOINT") == [("tini", "--", "vllm-deepinfer")]
    ((verb, recipe),) = words(name, "CMD")
    assert verb == "serve" and (ROOT / recipe).is_file()


@BOTH
def test_every_step_of_ours_is_a_part_of_the_set_up(name: str) -> None:
    parts = re.findall(r"tools\.set_up\.image (\w+)", " ".join(one.original for one in FILES[name]))
    assert len(parts) == 2 and set(parts) <= set(PARTS)


@BOTH
def test_sources_come_after_the_large_layer(name: str) -> None:
    large, small = (
        position(name, f"image {part}")
        for part in {"cpu": ("engine", "ours"), "cuda": ("requirements", "packages")}[name]
    )
    for folder in ("COPY vllm_deepinfer", "COPY plugins plugins", "COPY LICENSE"):
        assert large < position(name, folder) < small
    assert position(name, "COPY pyproject.toml") < large


@BOTH
def test_layers_hold_no_caches(name: str) -> None:
    for one in FILES[name]:
        if "apt-get install" in one.original:
            assert "--no-install-recommends" in one.original and "rm -rf /var/lib/apt/lists/*" in one.original
        if "tools.set_up.image" in one.original:
            assert "--mount=type=cache" in one.original or "rm -rf build plugins/build .cache" in one.original


@BOTH
def test_what_is_copied_exists_and_passes_the_ignore_file(name: str) -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    kept = [rule[1:].removesuffix("/**") for rule in rules if rule.startswith("!")]
    for *sources, _ in words(name, "COPY"):
        for source in sources:
            assert (ROOT / source).exists()
            assert any(source == rule or source.startswith(f"{rule}/") for rule in kept), source


def test_secrets_and_leftovers_stay_out_of_the_context() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "**"
    for name in (".git", ".venv", ".cache", "keys.yaml", "tests"):
        assert not any(fnmatch.fnmatch(name, rule[1:]) for rule in rules if rule.startswith("!"))
