"""Loading: what the schema refuses, in sentences with lines, and where relative paths lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.samples import RECIPES, load_faults
from vllm_deepinfer.recipes import RecipeError, load_recipe
from vllm_deepinfer.recipes.load import local

MINIMAL = "name: test\nmodel: {tiny: {}}\npools:\n  all: {role: aggregated}\n"


def test_defaults_of_a_minimal_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL)
    recipe = load_recipe(file)
    pool = recipe.pools["all"]
    assert (pool.engine, pool.replicas.at_start, pool.replicas.scales) == ("vllm", 1, False)
    assert (pool.resources.cpus, pool.resources.gpus) == (1.0, 0.0)
    assert (recipe.transfer.kind, recipe.store, recipe.ray.address) == ("none", None, "local")
    assert (recipe.gateway.host, recipe.gateway.port) == ("127.0.0.1", 8000)
    assert recipe.served_names == ("test",)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_ours_loads_under_the_name_of_its_file(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.description


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["write keys and values, such as name: my-cluster."]),
        ("- 1\n", ["write keys and values, such as name: my-cluster."]),
        ("a: [", ["this is no YAML: line 1: expected the node content, but found '<stream end>'."]),
        (MINIMAL + "name: again\n", ["line 5 has the key name again, first on line 1: drop one."]),
        (MINIMAL.replace("tiny", "tniy"), ["line 2: model.tniy is no key of a recipe: did you mean tiny?"]),
        (
            MINIMAL.replace("role", "roll"),
            ["line 4: pools.all.roll is no key of a recipe: did you mean role?"],
        ),
        (
            MINIMAL.replace("{role: aggregated}", "{}"),
            ["line 4: pools.all.role is missing: write prefill, decode or aggregated."],
        ),
        (
            MINIMAL + "xyz: 1\n",
            [
                "line 5: xyz is no key of a recipe: the keys here are name, description, model, pools, "
                "transfer, store, targets, gateway, ray."
            ],
        ),
        (
            MINIMAL.replace("aggregated", "everything"),
            [
                "line 4: pools.all.role is 'everything': input should be 'prefill', 'decode', "
                "'aggregated' or "
                "'encoder'."
            ],
        ),
        (
            MINIMAL.replace("name: test", "name: Test Cluster"),
            [
                "line 1: name is 'Test Cluster': write at most 31 lower-case letters, digits and dashes, a "
                "letter first."
            ],
        ),
        (
            MINIMAL + "gateway: {port: '80'}\n",
            ["line 5: gateway.port is '80': write a whole number."],
        ),
        (MINIMAL + "gateway: {port: true}\n", ["line 5: gateway.port is True: write a whole number."]),
        (
            MINIMAL + "gateway: {thinking: 1}\n",
            ["line 5: gateway.thinking is 1: write true or false."],
        ),
        (
            MINIMAL + "targets: {ttft_ms: .inf}\n",
            ["line 5: targets.ttft_ms is inf: write a finite number."],
        ),
        (
            MINIMAL.replace("aggregated}", "aggregated, replicas: two}"),
            ["line 4: pools.all.replicas is 'two': write a whole number, or {min, max, initial}."],
        ),
        (
            MINIMAL.replace("aggregated}", "aggregated, env: {A: 1}}"),
            ["line 4: pools.all.env.A is 1: write text, in quotes if it looks like a number."],
        ),
        (
            MINIMAL.replace("{tiny: {}}", "{tiny: {layers: '8', experts: 1.5}}"),
            [
                "line 2: model.tiny.layers is '8': write a whole number.",
                "line 2: model.tiny.experts is 1.5: write a whole number.",
            ],
        ),
        (
            "name: test\nmodel: {tiny: {}}\npools: {}\n",
            ["line 3: pools is {}: dictionary should have at least 1 item after validation, not 0."],
        ),
        (
            "name: test\nmodel: {tiny: {}}\npools:\n  All: {role: aggregated}\n",
            [
                "line 4: pools.All is 'All': write at most 31 lower-case letters, digits and dashes, a "
                "letter "
                "first."
            ],
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(text: str, faults: list[str], tmp_path: Path) -> None:
    assert load_faults(text, tmp_path) == faults


def test_all_mistakes_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "name: test\nmodl: {tiny: {}}\npools:\n  p:\n    role: prefill\n    replicas: 1.5\n"
        "    resources: {cpu: 1}\n  d:\n    rol: decode\ngateway: {port: 70000}\n"
    )
    assert load_faults(text, tmp_path) == [
        "line 2: modl is no key of a recipe: did you mean model?",
        "line 6: pools.p.replicas is 1.5: write a whole number, or {min, max, initial}.",
        "line 7: pools.p.resources.cpu is no key of a recipe: did you mean cpus?",
        "line 9: pools.d.rol is no key of a recipe: did you mean role?",
        "line 10: gateway.port is 70000: input should be less than or equal to 65535.",
    ]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    for name, content, reason in (("none", None, "there is no such file."), ("bytes", b"\xff", "no UTF-8")):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(RecipeError, match=reason):
            load_recipe(file)
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: test\nmodel: {path: ./model, tokenizer: tok}\n"
        "pools: {all: {role: aggregated, model_path: /data/model}}\n"
        "gateway: {api_keys: keys.yaml, response_db: /tmp/x.sqlite}\n"
    )
    recipe = load_recipe(file)
    assert recipe.model.path == str(tmp_path / "model")
    assert recipe.model.tokenizer == tmp_path / "tok"
    assert recipe.pools["all"].model_path == "/data/model"
    assert recipe.gateway.api_keys == tmp_path / "keys.yaml"
    assert recipe.gateway.response_db == Path("/tmp/x.sqlite")
    assert recipe.served_names == ("model",)


def test_a_hugging_face_id_stays_unless_there_is_such_a_folder(tmp_path: Path) -> None:
    assert local("org/name", tmp_path) == "org/name"
    assert local("./org/name", tmp_path) == str(tmp_path / "org/name")
    assert local("a/b/c", tmp_path) == str(tmp_path / "a/b/c")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local("org/name", tmp_path) == str(tmp_path / "org/name")
