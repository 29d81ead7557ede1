"""What `--speculative-config` may say for this project's V4.1 class, and what an engine with it needs."""

from __future__ import annotations

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_deepinfer.checkpoint.config import ConfigError, V41Config
from vllm_deepinfer.errors import UserError

from .load import check

PROPOSER = "vllm_deepinfer_plugins.draft.proposer.DSparkProposer"
WORKER = "vllm_deepinfer_plugins.draft.worker.DraftWorker"
SCHEDULER = "vllm_deepinfer_plugins.verification.scheduler.VerifyingScheduler"
PLATFORM_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker")
OURS = f'{{"method": "custom_class", "model": "{PROPOSER}", "num_speculative_tokens": 5}}'
WITHOUT_WEIGHTS = ("custom_class", "ngram", "suffix")
"""Methods that need nothing of the target but its tokens."""


class SpeculationError(UserError):
    """A combination that this engine cannot run."""


def uses_dspark(vllm_config: Any) -> bool:
    """Whether the engine drafts with the target's own DSpark blocks, by this project's proposer."""
    speculative = vllm_config.speculative_config
    return bool(
        speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER
    )


def settle(vllm_config: Any) -> None:
    """Refuse what cannot run, and choose the worker for the drafter.

    Raises:
        SpeculationError, ConfigError: One sentence that names what to write.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    _refuse_method(speculative)
    if not uses_dspark(vllm_config):
        _refuse_proposer(speculative)
        return
    config = V41Config.from_dict(vllm_config.model_config.hf_config.to_dict()).text_config
    check(config)
    count = speculative.num_speculative_tokens
    if not 1 <= count <= config.dspark_block_size:
        raise ConfigError(
            f"num_speculative_tokens is {count}, and the checkpoint's blocks draft "
            f"{config.dspark_block_size} tokens: write 1 to {config.dspark_block_size}"
        )
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in (*PLATFORM_WORKERS, WORKER):
        raise SpeculationError(
            f"--worker-cls is {parallel.worker_cls}, which hands the drafter no temperatures: leave it out"
        )
    if vllm_config.use_v2_model_runner:
        raise SpeculationError(
            'this drafter runs in model runner V1 only: write "method": "dspark", which is vLLM\'s own'
        )
    parallel.worker_cls = WORKER
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None and not scheduler.async_scheduling:
        scheduler.scheduler_cls = SCHEDULER


def _refuse_proposer(speculative: Any) -> None:
    """vLLM looks for a class of one's own only when the weights are there."""
    if speculative.method != "custom_class":
        return
    try:
        resolve_obj_by_qualname(speculative.model)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpeculationError(
            f"--speculative-config has the model {speculative.model}, which is no class ({error}): this "
            f"project's drafter is {PROPOSER}"
        ) from error


def _refuse_method(speculative: Any) -> None:
    if speculative.method not in WITHOUT_WEIGHTS and not speculative.uses_draft_model():
        raise SpeculationError(
            f"--speculative-config has the method {speculative.method}, which the portable DeepSeek-V4.1 "
            f"class cannot serve: write {OURS}, or ngram"
        )
    if speculative.rejection_sample_method == "synthetic":
        raise SpeculationError(
            "--speculative-config has the rejection_sample_method synthetic, which accepts drafts that the "
            "model would not write: leave it out"
        )
