"""The repair fits vLLM 0.32.0, touches nothing before it is asked to, and the engine then really runs."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deepinfer_plugins.bench import engine_process, sizes, v4_repair
from vllm_deepinfer_plugins.bench.worker import REPAIRED

MLA = "vllm.v1.attention.backends.mla"


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "owner", "kernel", "repair"),
    [
        (
            "vllm.v1.attention.ops.metadata",
            None,
            ["query_start_loc", "output", "num_reqs", "num_mapped", "num_tokens"],
            v4_repair._requests_of_tokens,
        ),
        (
            f"{MLA}.sparse_swa",
            "ComputePrefillMetadataKernel",
            [
                "prefill_gather_lens_ptr",
                "seq_lens_ptr",
                "query_start_loc_ptr",
                "replay_start_ptr",
                "num_prefills",
                "num_decodes",
                "window_size",
                "BLOCK_SIZE",
            ],
            v4_repair._gather_lens,
        ),
        (
            f"{MLA}.compressor_utils",
            "CompressedSlotMappingKernel",
            [
                "compressed_slot_mapping_ptr",
                "slot_mapping_ptr",
                "query_start_loc_ptr",
                "seq_lens_ptr",
                "block_table_ptr",
                "block_table_stride",
                "block_size",
                "dcp_world_size",
                "cp_interleave",
                "COMPRESS_RATIO",
                "PAD_ID",
                "TRITON_BLOCK_SIZE",
            ],
            v4_repair._compressed_slots,
        ),
        (
            f"{MLA}.indexer",
            "BuildPrefillChunkMetadataKernel",
            [
                "query_start_loc_ptr",
                "uncompressed_seq_lens_ptr",
                "cu_compressed_seq_lens_ptr",
                "row_start_cu_compressed_seq_lens_ptr",
                "token_to_seq_ptr",
                "cu_compressed_seq_len_ks_ptr",
                "cu_compressed_seq_len_ke_ptr",
                "query_slice_start",
                "query_slice_stop",
                "DCP_RANK",
                "DCP_WORLD",
                "DCP_INTERLEAVE",
                "BLOCK_SIZE",
                "COMPRESS_RATIO",
            ],
            v4_repair._prefill_rows,
        ),
    ],
)
def test_each_repair_takes_what_its_kernel_takes(
    module: str, owner: str | None, kernel: list[str], repair: object
) -> None:
    """The registry passes arguments in the kernel's order: a parameter that moved would be a wrong one."""
    loaded = importlib.import_module(module)
    stock = getattr(loaded, owner).kernel if owner else loaded._token_request_mapping_kernel
    stock = getattr(stock, "arg_names", None) or parameters(getattr(stock, "func", stock))
    assert list(stock) == kernel
    taken = [name for name in parameters(repair) if name != "_launch"]
    assert len(taken) == len(kernel)


def test_the_cpu_class_reads_no_window_slots() -> None:
    """Why the repair may leave them out."""
    package = importlib.import_module("vllm.models.deepseek_v4.cpu")
    sources = "".join(path.read_text() for path in sorted(Path(package.__path__[0]).glob("*.py")))
    assert "DeepseekSparseSWAMetadata" in sources
    for unread in ("decode_swa_indices", "decode_swa_lens", "prefill_swa_indices", "prefill_swa_lens"):
        assert unread not in sources


def test_the_tile_scheduler_has_every_key_that_its_caller_reads() -> None:
    """Stock, the CPU builder lacks the two of V4.1, which the shared `build` reads: KeyError 'c1a'."""
    swa = importlib.import_module(f"{MLA}.sparse_swa")
    builder = importlib.import_module("vllm.models.deepseek_v4.cpu.cpu_mla")
    names = {getattr(swa, name) for name in dir(swa) if name.startswith("_LAYER_TYPE_")}
    assert v4_repair._no_tile_scheduler(None, 1) == dict.fromkeys(names)
    stock = builder.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler
    assert stock is not v4_repair._no_tile_scheduler, "importing the benchmark has repaired this process"
    assert set(stock(None, 1)) == names - {"c1a", "c2a"}, "vLLM has mended it: the repair can go"


def test_importing_the_plugins_or_the_benchmark_does_not_even_load_vllm() -> None:
    code = (
        "import sys, vllm_deepinfer_plugins.register, vllm_deepinfer_plugins.bench.model;"
        "import vllm_deepinfer_plugins.bench.v4_repair; sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cpu_without_its_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4_repair, "runs_here", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CPU with AVX-512"):
        v4_repair.apply()


@pytest.mark.slow
@pytest.mark.long
def test_the_repaired_engine_really_runs(tmp_path: Path) -> None:
    """Finite, varied, repeatable, and dependent on what reaches it through the compressed caches alone.

    2,400 tokens are more than 512 compressed positions of ratio 4, so the indexer really selects.
    """
    if not v4_repair.runs_here():
        pytest.skip("vLLM's build for this CPU lacks the kernels of its DeepSeek-V4 class.")
    (tmp_path / "config.json").write_text(json.dumps(sizes.v4_config()))
    command = engine_process.worker_command(REPAIRED, tmp_path)
    with engine_process.EngineProcess(REPAIRED, command) as engine:
        engine.wait_until_up()
        assert engine.state["model_class"] == "vllm.models.deepseek_v4.cpu.model.DeepseekV4ForCausalLM"
        assert engine.ask("check") == []
        assert engine.ask("check", head=300, tail=2100) == []
        assert engine.ask("decode", batch=3, context=20, outputs=5)["tokens"] == 12
