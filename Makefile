# `make serve` and `make test` do all the set-up that is missing; a second run starts in seconds.
# PYTHON=/path/to/python chooses the interpreter of the set-up; PORT the port, RECIPE the recipe of `make serve`.

BIN := .venv/bin
PORT ?= 8000
RECIPE ?= recipes/laptop.yaml

.PHONY: help setup serve serve-one test test-long test-fast check format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup: ## .venv with both packages and vLLM's CPU stack
	@sh tools/set_up.sh

serve: setup ## gateway, prefill pool and decode pool with a tiny DeepSeek-V4.1 on 127.0.0.1:PORT
	@$(BIN)/vllm-deepinfer serve $(RECIPE) --port $(PORT)

serve-one: setup ## the same model on one engine, without Ray
	@$(BIN)/python -m tools.serve --port $(PORT)

test: check ## lint, types, then all tests but the longest and those that need a GPU
	@$(BIN)/python -m pytest -m "not long and not gpu"

test-long: setup ## the longest tests: kills under load, a soak, whole pools of engines, schedules of whole engines
	@$(BIN)/python -m pytest -m "long and not gpu"

test-fast: setup ## the tests that start no engine and no Ray
	@$(BIN)/python -m pytest -m "not slow and not ray and not gpu"

check: setup ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup ## let ruff repair what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## remove .venv and .cache
	rm -rf .venv .cache
