"""Loading and checking in one list, with lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.samples import RECIPES
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes import RecipeError
from vllm_deepinfer.recipes.cluster_view import ClusterView, NodeView
from vllm_deepinfer.recipes.inspect import corrected, inspect_recipe, located
from vllm_deepinfer.recipes.schema import Ray
from vllm_deepinfer.recipes.yaml_lines import parse

ONE_CORE = ClusterView((NodeView("small", 1, memory_gib=8),))
LAPTOP = next(path for path in RECIPES if path.stem == "laptop")


def told(text: str, folder: Path, cluster: ClusterView | None = None) -> list[str]:
    file = folder / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as raised:
        inspect_recipe(file, lambda ray: cluster)
    return [fault.removeprefix(f"{file}: ") for fault in raised.value.faults]


def test_a_sound_recipe_comes_back_with_its_cluster() -> None:
    asked: list[Ray] = []

    def look(ray: Ray) -> ClusterView:
        asked.append(ray)
        return ClusterView((NodeView("n", 4, memory_gib=16),))

    recipe, cluster = inspect_recipe(LAPTOP, look)
    assert recipe.name == "laptop"
    assert cluster is not None and cluster.nodes[0].cpus == 4
    assert asked == [recipe.ray]
    assert inspect_recipe(LAPTOP)[1] is None


def test_a_cluster_that_is_not_there_is_the_callers_error() -> None:
    def look(ray: Ray) -> ClusterView:
        raise UserError("no cluster.")

    with pytest.raises(UserError, match=r"^no cluster\.$"):
        inspect_recipe(LAPTOP, look)


def test_an_unknown_key_hides_nothing(tmp_path: Path) -> None:
    text = (
        "name: test\nmodel: {tiny: {}}\npools:\n  all:\n    role: aggregated\n    replicsa: 3\n"
        "    nonsense: 1\ntransfer: {kind: nixl}\n"
    )
    assert told(text, tmp_path, ONE_CORE) == [
        "line 6: pools.all.replicsa is no key of a recipe: did you mean replicas?",
        "line 7: pools.all.nonsense is no key of a recipe: the keys here are role, engine, replicas, "
        "resources, placement, model_path, engine_args, simulated, env, cpu_binds, kv_gib, max_ongoing, "
        "autoscaling.",
        "line 8: transfer.kind is nixl, but an aggregated pool hands nothing over: leave transfer out.",
        "line 4: pools.all needs 3 CPU at the start (3 bundles of 1), but its nodes have 1: write fewer "
        "replicas, or add nodes.",
    ]


def test_a_value_of_the_wrong_type_hides_what_depends_on_it(tmp_path: Path) -> None:
    pools = "pools: {all: {role: aggregated, replicas: x}}"
    text = f"name: test\nmodel: {{tiny: {{}}}}\n{pools}\ntransfer: {{kind: nixl}}\n"
    assert told(text, tmp_path) == [
        "line 3: pools.all.replicas is 'x': write a whole number, or {min, max, initial}."
    ]


def test_a_key_twice_is_told_beside_the_rest(tmp_path: Path) -> None:
    text = "name: test\nname: test\nmodel: {tiny: {}}\npools: {p: {role: prefill}}\n"
    assert told(text, tmp_path) == [
        "line 2 has the key name again, first on line 1: drop one.",
        "line 4: pools has a prefill pool and no decode pool: add one of the role decode.",
    ]


def test_sentences_are_located_by_their_first_word() -> None:
    document = parse("pools:\n  a:\n    env:\n      X: 1\n")
    assert located("pools.a.env.X is wrong.", document) == "line 4: pools.a.env.X is wrong."
    assert located("pools.a: no node.", document) == "line 2: pools.a: no node."
    assert located("pools.a.cpu_binds[0] is x.", document) == "line 2: pools.a.cpu_binds[0] is x."
    assert located("gateway.port is 1.", document) == "gateway.port is 1."


def test_correcting_renames_drops_and_leaves_free_keys_alone() -> None:
    document = parse(
        "nam: x\nname: y\npools:\n  p: {rol: decode, env: {ROL: a}, engine_args: {seeed: 1}, junk: 1}\n"
    )
    assert corrected(document).value == {
        "name": "y",
        "pools": {"p": {"env": {"ROL": "a"}, "engine_args": {"seeed": 1}, "role": "decode"}},
    }
    assert document.value["pools"]["p"]["rol"] == "decode"  # the original is not touched
