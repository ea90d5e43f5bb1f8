"""Other engines behind the interface of `create_inference_engine`."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.generation.sequence import Response, SamplingParams
from megatron_rl.inference import Prompts, TextEngine, token_ids, with_end_ids
from megatron_rl.models.gpt import DTYPES
from megatron_rl.text import TextTokenizer


def create(
    backend: str, path: str | Path, tensor_parallel_size: int, dtype: str, trust_remote_code: bool
) -> TextEngine:
    """The "huggingface" or "vllm" engine over a Hugging Face folder.

    Raises:
        ValueError: if the package is missing, or the back end can't cut a model.
    """
    if backend == "huggingface":
        if tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size}: the huggingface back end runs on "
                "one rank; use 1, or backend='megatron'"
            )
        return HuggingFaceTextEngine(path, dtype, trust_remote_code)
    return VLLMTextEngine(path, tensor_parallel_size, dtype, trust_remote_code)


class HuggingFaceTextEngine:
    """transformers' own `generate`, one batch per call."""

    def __init__(self, path: str | Path, dtype: str, trust_remote_code: bool) -> None:
        import transformers

        self.tokenizer = TextTokenizer(path, trust_remote_code=trust_remote_code)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], trust_remote_code=trust_remote_code,
            local_files_only=True,
        )  # fmt: skip
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @torch.no_grad()
    def generate(
        self, prompts: Prompts, sampling: SamplingParams | None = None, *, n: int = 1
    ) -> list[Response]:
        """See TextEngine. The draws are transformers' own, seeded by `sampling.seed`."""
        sampling = with_end_ids(sampling, self.tokenizer)
        ids = [p for p in token_ids(prompts, self.tokenizer) for _ in range(n)]
        longest = max(map(len, ids))
        pad = self.tokenizer.end_ids[0]
        grid = torch.tensor([[pad] * (longest - len(p)) + p for p in ids], device=self.model.device)
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in ids], device=self.model.device
        )
        torch.manual_seed(sampling.seed)
        out = self.model.generate(
            grid, attention_mask=mask, return_dict_in_generate=True, output_logits=True,
            output_scores=True, **self._options(sampling, longest, pad),
        )  # fmt: skip
        new_BL = out.sequences[:, longest:]
        kept, full = (
            torch.stack([_chosen(s, new_BL[:, i]) for i, s in enumerate(stack)], dim=1)
            for stack in (out.scores, [x / (sampling.temperature or 1.0) for x in out.logits])
        )
        return [
            self._response(i, ids[i], new_BL[i].tolist(), kept[i], full[i], sampling)
            for i in range(len(ids))
        ]

    def _options(self, sampling: SamplingParams, longest: int, pad: int) -> dict[str, object]:
        limits = (sampling.max_new_tokens, (sampling.max_length or 2**31) - longest)
        greedy = sampling.temperature == 0
        options: dict[str, object] = dict(
            max_new_tokens=min(limits), do_sample=not greedy, pad_token_id=pad,
            min_new_tokens=min(limits) if sampling.ignore_eos else sampling.min_new_tokens,
            eos_token_id=None if sampling.ignore_eos else list(sampling.stop_token_ids),
        )  # fmt: skip
        if not greedy:
            options |= dict(
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
        if sampling.stop:
            options |= dict(
                stop_strings=list(sampling.stop), tokenizer=self.tokenizer.huggingface_tokenizer
            )
        return options

    def _response(
        self, number: int, prompt: list[int], tokens: list[int], kept: Tensor, full: Tensor,
        sampling: SamplingParams,
    ) -> Response:  # fmt: skip
        ends = [] if sampling.ignore_eos else sampling.stop_token_ids
        length = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        stopped = length < len(tokens) or tokens[length - 1] in ends
        return Response(
            request=number, prompt_ids=prompt, token_ids=tokens[:length],
            logprobs=kept[:length].tolist(), full_logprobs=full[:length].tolist(),
            finish_reason="stop" if stopped else "length",
        )  # fmt: skip


def _chosen(scores_BV: Tensor, token_B: Tensor) -> Tensor:
    return scores_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]


class VLLMTextEngine:
    """vLLM's engine, imported only here."""

    def __init__(
        self, path: str | Path, tensor_parallel_size: int, dtype: str, trust_remote_code: bool
    ) -> None:
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise ValueError(
                f"backend 'vllm' needs the vllm package ({error}); "
                "pip install 'megatron-rl[vllm]', or use backend='megatron'"
            ) from error
        names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        self._vllm = vllm
        self.tokenizer = TextTokenizer(path, trust_remote_code=trust_remote_code)
        self._llm = vllm.LLM(
            model=str(path), tensor_parallel_size=tensor_parallel_size, dtype=names[dtype],
            trust_remote_code=trust_remote_code,
        )  # fmt: skip

    def generate(
        self, prompts: Prompts, sampling: SamplingParams | None = None, *, n: int = 1
    ) -> list[Response]:
        """See TextEngine. Log-probs are those of the full distribution, as vLLM reports them."""
        sampling = with_end_ids(sampling, self.tokenizer)
        params = self._vllm.SamplingParams(
            n=n, temperature=sampling.temperature, top_k=sampling.top_k or -1, top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens, min_tokens=sampling.min_new_tokens,
            stop=list(sampling.stop), stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos, seed=sampling.seed, logprobs=0,
        )  # fmt: skip
        ids = token_ids(prompts, self.tokenizer)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in ids], params)
        responses = []
        for prompt, output in zip(ids, outputs, strict=True):
            for sample in output.outputs:
                tokens = list(sample.token_ids)
                logprobs = [s[t].logprob for s, t in zip(sample.logprobs, tokens, strict=True)]
                responses.append(
                    Response(
                        request=len(responses), prompt_ids=prompt, token_ids=tokens,
                        logprobs=logprobs, full_logprobs=logprobs,
                        finish_reason=sample.finish_reason,
                    )
                )  # fmt: skip
        return responses
