"""Other engines on the same device, dtype, shape and requests, for benchmarks/generation.py.

static    transformers' `generate`: a static, compiled cache on CUDA, its default one on a CPU; all
          requests of a batch run as long as the longest
batch     transformers' continuous batching (what `generate_batch` uses), each request with its own
          length; on CUDA with the settings that it chooses itself
megatron  Megatron-Core's static inference engine on its own GPTModel (its layers without
          Transformer Engine), with random weights, also for --model. Its dynamic engine is not
          here: its attention calls flash-attn's paged kernels, which have no CPU version and are
          not in the environment that we measure in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from megatron_rl.models.architecture import Architecture
from megatron_rl.models.gpt import DTYPES, ParallelModel

# generate(prompts, lengths): sampling at temperature 1, each response of exactly its length.
Generate = Callable[[list[list[int]], list[int]], None]
PAGE = 256


def peer(name: str, model: ParallelModel, options: argparse.Namespace) -> Generate:
    """A peer of our model, ready to be called several times."""
    return {"static": static, "batch": continuous, "megatron": megatron}[name](model, options)


def groups(
    prompts: list[list[int]], lengths: list[int], size: int
) -> Iterator[list[tuple[list[int], int]]]:
    """The requests in batches of a static engine."""
    requests = list(zip(prompts, lengths, strict=True))
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def transformers_model(model: ParallelModel, options: argparse.Namespace) -> torch.nn.Module:
    import transformers

    dtype = DTYPES[options.dtype]
    if options.model:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, local_files_only=True
        )
    else:
        arch = model.arch
        config = transformers.LlamaConfig(
            hidden_size=arch.hidden, num_hidden_layers=arch.layers, vocab_size=arch.vocab,
            num_attention_heads=arch.heads, num_key_value_heads=arch.kv_heads,
            head_dim=arch.head_dim, intermediate_size=arch.ffn, tie_word_embeddings=arch.tied,
            max_position_embeddings=arch.max_positions,
        )  # fmt: skip
        with torch.device(model.device):
            theirs = transformers.LlamaForCausalLM(config).to(dtype)
    return theirs.to(model.device).eval()


def static(model: ParallelModel, options: argparse.Namespace) -> Generate:
    theirs = transformers_model(model, options)
    kwargs = dict(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    if model.device.type == "cuda":
        kwargs["cache_implementation"] = "static"

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        for group in groups(prompts, lengths, options.max_running):
            ids = torch.tensor([prompt for prompt, _ in group], device=model.device)
            longest = max(length for _, length in group)
            # What lets Megatron-Core run without a GPU intercepts torch's functions: not here.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                out = theirs.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest,
                    min_new_tokens=longest, **kwargs,
                )  # fmt: skip
            assert out.shape[1] == ids.shape[1] + longest, out.shape

    return generate


def continuous(model: ParallelModel, options: argparse.Namespace) -> Generate:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    theirs = transformers_model(model, options)
    sampling = GenerationConfig(
        do_sample=True, top_k=0, temperature=1.0, max_new_tokens=options.new, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    config = ContinuousBatchingConfig()
    if model.device.type != "cuda":
        # By itself it takes most of the machine's memory, which takes minutes to touch.
        pages = -(-(options.prompt + max(options.new, 1024)) // PAGE)
        running = min(max(options.batch, default=1), options.max_running)
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=running * pages + 1,
            max_batch_tokens=max(running, options.prompt) + 1,
        )  # fmt: skip

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        missing = dict(enumerate(lengths))
        with theirs.continuous_batching_context_manager(
            generation_config=sampling, continuous_batching_config=config,
            persistent_manager=True, timeout=60,
        ) as manager:  # fmt: skip
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=length)
            while missing:
                result = manager.get_result(timeout=1)
                if result is None:
                    assert manager.is_running(), "transformers' generation thread has ended"
                elif result.is_finished():
                    wanted = missing.pop(int(result.request_id))
                    assert result.error is None and len(result.generated_tokens) == wanted, result

    return generate


class _Numbers:
    """A tokenizer whose text is the ids themselves."""

    eod, bos, pad = -1, 0, 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def megatron_model(arch: Architecture, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Megatron-Core's GPTModel of the shape, as its own specification without TE builds it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=arch.layers, hidden_size=arch.hidden, num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads, kv_channels=arch.head_dim, ffn_hidden_size=arch.ffn,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, use_cpu_initialization=device.type == "cpu",
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=arch.vocab,
        max_sequence_length=arch.max_positions, position_embedding_type="rope",
        share_embeddings_and_output_weights=arch.tied,
    )  # fmt: skip
    return model.to(device).to(dtype).eval()


def megatron(model: ParallelModel, options: argparse.Namespace) -> Generate:
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt import gpt_inference_wrapper
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    dtype = DTYPES[options.dtype]
    theirs = megatron_model(model.arch, dtype, model.device)
    tokenizer = _Numbers(model.arch.vocab)

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        for group in groups(prompts, lengths, options.max_running):
            longest = max(length for _, length in group)
            limits = InferenceWrapperConfig(
                hidden_size=model.arch.hidden, params_dtype=dtype,
                inference_batch_times_seqlen_threshold=-1, padded_vocab_size=model.arch.vocab,
                inference_max_requests=len(group),
                inference_max_seq_length=max(len(prompt) for prompt, _ in group) + longest,
            )  # fmt: skip
            wrapper = gpt_inference_wrapper.GPTInferenceWrapper(
                theirs, limits, StaticInferenceContext.from_config(limits)
            )
            controller = text_generation_controller.TextGenerationController(wrapper, tokenizer)
            engine = StaticInferenceEngine(controller, max_batch_size=len(group), legacy=True)
            sampling = SamplingParams(
                temperature=1.0, num_tokens_to_generate=longest, termination_id=-1
            )
            texts = [tokenizer.detokenize(prompt) for prompt, _ in group]
            done = engine.generate(prompts=texts, sampling_params=sampling)
            assert all(len(request.generated_tokens) == longest for request in done)

    return generate
