"""Another recipe for a running application: who is told what, what is refused, and the change in real Ray."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.application.applications import SPLIT, processes, running, running_replicas, until, written
from tests.cluster.application.traffic import Traffic
from vllm_deepinfer.cluster.application.command import update
from vllm_deepinfer.cluster.application.updates import (
    changed_pools,
    for_gateway,
    for_pool,
    refuse_changes,
)
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes import Recipe, load_recipe


def recipe(**changes: Any) -> Recipe:
    """Prefill and decode; `decode__max_ongoing=3` changes a pool, other names the recipe."""
    pools: dict[str, dict[str, Any]] = {
        role: {"role": role, "replicas": 2, "resources": {"cpus": 1}} for role in ("prefill", "decode")
    }
    whole: dict[str, Any] = {
        "name": "app",
        "model": {"tiny": {}},
        "transfer": {"kind": "nixl"},
        "pools": pools,
    }
    for name, value in changes.items():
        pool, _, key = name.partition("__")
        if key:
            pools[pool][key] = value
        else:
            whole[name] = value
    return Recipe.model_validate(whole)


PLAIN = recipe()


@pytest.mark.parametrize(
    "changes",
    [
        {"decode__engine_args": {"max_num_seqs": 3}},
        {"decode__env": {"X": "1"}},
        {"decode__kv_gib": 3.0},
        {"decode__replicas": 5},
        {"description": "new"},
    ],
)
def test_who_does_not_change_is_told_the_same(changes: dict[str, Any]) -> None:
    new = recipe(**changes)
    assert for_pool(new, "prefill") == for_pool(PLAIN, "prefill")
    assert for_gateway(new) == for_gateway(PLAIN)
    only_numbers = set(changes) <= {"decode__replicas", "description"}
    assert (for_pool(new, "decode") == for_pool(PLAIN, "decode")) is only_numbers


def test_what_is_told_can_be_read_and_has_what_is_used() -> None:
    told = Recipe.model_validate_json(for_pool(PLAIN, "decode").model_dump_json())
    assert list(told.pools) == ["decode"] and told.transfer == PLAIN.transfer and told.ray == PLAIN.ray
    told = Recipe.model_validate_json(
        for_gateway(recipe(decode__replicas={"min": 0, "max": 3})).model_dump_json()
    )
    assert {name: (pool.role, pool.replicas.min) for name, pool in told.pools.items()} == {
        "prefill": ("prefill", 1),
        "decode": ("decode", 0),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "other"}, "name"),
        ({"model": {"tiny": {"layers": 4}}}, "model"),
        ({"transfer": {"kind": "nixl", "timeout_s": 1.0}}, "transfer"),
        ({"store": {"url": "/kv"}}, "store"),
        ({"gateway": {"port": 9}, "ray": {"num_cpus": 3}}, "gateway and ray"),
    ],
)
def test_what_cannot_change(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_changes(PLAIN, recipe(**changes))
    assert str(caught.value).startswith(f"{named} cannot change while the application runs: ")


def test_pools_cannot_come_or_go() -> None:
    with pytest.raises(UserError, match=r"^pools' names and roles cannot change"):
        refuse_changes(PLAIN, recipe(pools={"main": {"role": "aggregated"}}))
    refuse_changes(PLAIN, recipe(decode__replicas=7, prefill__max_ongoing=3, targets={"itl_ms": 40.0}))


def test_which_pools_change() -> None:
    assert changed_pools(PLAIN, recipe(description="new")) == {}
    assert changed_pools(PLAIN, recipe(decode__replicas=5)) == {"decode": False}
    new = recipe(decode__replicas=5, decode__max_ongoing=3, prefill__resources={"cpus": 2})
    assert changed_pools(PLAIN, new) == {"decode": True, "prefill": True}


class Fake:
    """Takes a recipe, or not."""

    def __init__(self, error: UserError | None = None) -> None:
        self.error, self.recipes = error, list[Recipe]()

    def update(self, new: Recipe) -> None:
        if self.error is not None:
            raise self.error
        self.recipes.append(new)


def test_a_recipe_with_a_mistake_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, said, fake = written(tmp_path, SPLIT), list[str](), Fake()
    update(fake, file, lambda given: given, said.append)  # type: ignore[arg-type]
    assert [one.name for one in fake.recipes] == ["app"] and said[-1] == "the recipe is served as it is now"
    file.write_text(file.read_text().replace("role: decode", "roll: decode"), encoding="utf-8")
    update(fake, file, lambda given: given, said.append)  # type: ignore[arg-type]
    assert len(fake.recipes) == 1 and "roll" in capsys.readouterr().err
    update(Fake(UserError("no place.")), written(tmp_path, SPLIT), lambda given: given, said.append)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "vllm-deepinfer: no place.\n" and said[-1].startswith("reading")


@pytest.mark.ray
@pytest.mark.slow
def test_a_change_under_load_loses_nothing(tmp_path: Path) -> None:
    """Decode replicas are replaced, prefill gets one more, gateways and the old prefill replicas stay."""
    file = written(tmp_path, SPLIT)
    with running(file) as application:
        before = {name: processes(application, name) for name in ("prefill", "decode", "gateway")}
        with Traffic(application.urls, "app", streams=6, prompts=8).flowing() as traffic:
            text = file.read_text(encoding="utf-8")
            head, decode = text.split("  decode:")
            decode = decode.replace("simulated: *sizes", "simulated: {max_model_len: 4096, max_num_seqs: 32}")
            file.write_text(
                f"{head.replace('replicas: 2', 'replicas: 3')}  decode:{decode}", encoding="utf-8"
            )
            application.update(load_recipe(file))
            until(lambda: running_replicas(application) == {"prefill": 3, "decode": 2, "gateway": 1})
            answered = traffic.counts["answered"]
            until(lambda: traffic.counts["answered"] > answered + 20)
        after = {name: processes(application, name) for name in before}
        assert not set(after["decode"].values()) & set(before["decode"].values())
        assert set(after["prefill"].values()) > set(before["prefill"].values())
        assert after["gateway"] == before["gateway"]
        assert traffic.counts - Counter(["answered"] * traffic.counts["answered"]) == {}, traffic.errors
        with pytest.raises(UserError, match=r"^gateway cannot change"):
            changed = application.recipe.gateway.model_copy(update={"max_waiting": 3})
            application.update(application.recipe.model_copy(update={"gateway": changed}))
