"""Fit a scalar reward head on rated texts, on the frozen trunk of a language model.

    python -m megatron_rl.rewards.fit --model FOLDER --train FILE --heldout FILE --to FOLDER

Both files hold one JSON object a line, with a text and a number that says how good it is. The
trunk's first layers run once over the texts; the head is then a weighted least squares fit of the
ratings on the hidden states of the last token, which takes seconds. Nothing is trained by
gradients, so a laptop does it in minutes. The result is a sequence classifier with one label:
transformers loads it, and `model.reward.path` takes it as it is.

A length limit cuts responses anywhere, so the head is also fitted at one random token in the second
half of every text, with a smaller weight.

Shapes: N texts, M = 2 N fitted rows (every text's last token, then its inner token), E hidden size,
B texts of a batch, L longest text of it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.models.families import read_architecture
from megatron_rl.rollout.records import open_records
from megatron_rl.text import TextTokenizer

PENALTIES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
INNER_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rated:
    """Texts as token ids, and their ratings `[N]` (float64)."""

    ids: list[list[int]]
    rating_N: Tensor


def read_rated(
    path: Path, tokenizer: TextTokenizer, *, text_key: str, rating_key: str, limit: int | None
) -> Rated:
    """The first `limit` rows of a JSONL or Parquet file of rated texts.

    Raises:
        ValueError: for a missing or empty file, or naming the first row that has no text or no
            number.
    """
    ids, ratings = [], []
    for number, row in enumerate(islice(open_records(path).scan(), limit), 1):
        try:
            text, rating = row[text_key], float(row[rating_key])
            ids.append(tokenizer.encode(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, row {number}: expected a text {text_key!r} and a number {rating_key!r} "
                f"({type(error).__name__}: {error}); fix that row"
            ) from error
        if not ids[-1]:
            raise ConfigError(f"{path}, row {number}: the text is empty; remove the row")
        ratings.append(rating)
    if not ids:
        raise ConfigError(f"{path} is empty; give one rated text per row")
    return Rated(ids=ids, rating_N=torch.tensor(ratings, dtype=torch.float64))


def hidden_states(
    trunk: torch.nn.Module, ids: Sequence[list[int]], places: Sequence[Sequence[int]], *,
    batch_tokens: int, progress: Progress, label: str,
) -> Tensor:  # fmt: skip
    """Final hidden states at chosen tokens, fp32 `[N, P, E]`.

    Args:
        places: P token positions of each text.
        batch_tokens: tokens of a batch, padding included; texts of similar length go together.
    """
    device = next(trunk.parameters()).device
    out_NPE = torch.zeros(len(ids), len(places[0]), trunk.config.hidden_size)
    task = progress.add_task(label, total=len(ids))
    for batch in _batches([len(x) for x in ids], batch_tokens):
        longest = max(len(ids[i]) for i in batch)
        # Padding stands on the right, where a causal model's real tokens can't see it.
        tokens_BL = torch.tensor([ids[i] + [0] * (longest - len(ids[i])) for i in batch])
        with torch.no_grad():
            hidden_BLE = trunk(tokens_BL.to(device)).last_hidden_state.float().cpu()
        for row, i in enumerate(batch):
            out_NPE[i] = hidden_BLE[row, list(places[i])]
        progress.advance(task, len(batch))
    return out_NPE


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in order of length, cut where the padded batch would exceed the budget."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def ridge(x_ME: Tensor, y_M: Tensor, weight_M: Tensor, penalty: float) -> Tensor:
    """argmin_w Σ weight (x·w − y)² + penalty |w|², float64 `[E]`; there is no intercept, since a
    sequence classifier has none."""
    x_ME = x_ME.double()
    weighted_ME = x_ME * weight_M[:, None]
    gram_EE = weighted_ME.T @ x_ME + penalty * torch.eye(x_ME.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram_EE, weighted_ME.T @ y_M)


def fit_head(hidden_NPE: Tensor, rating_N: Tensor) -> tuple[Tensor, float]:
    """Head weights `[E]` in float64 and the penalty, which a fifth of the texts decides."""
    count, places = hidden_NPE.shape[:2]
    weights_P = torch.tensor([1.0] + [INNER_WEIGHT] * (places - 1), dtype=torch.float64)

    def fit(rows: slice, penalty: float) -> Tensor:
        x_NPE, y_N = hidden_NPE[rows], rating_N[rows]
        return ridge(
            x_NPE.flatten(0, 1), y_N.repeat_interleave(places), weights_P.repeat(len(y_N)), penalty
        )

    cut = count - max(count // 5, 1)
    errors = {
        penalty: float(
            (hidden_NPE[cut:, 0].double() @ fit(slice(cut), penalty) - rating_N[cut:])
            .square()
            .mean()
        )
        for penalty in PENALTIES
    }
    best = min(errors, key=errors.__getitem__)
    return fit(slice(None), best), best


def sign_accuracy(score_N: Tensor, rating_N: Tensor) -> float:
    """Share of the texts rated other than 0 whose score has the rating's sign."""
    rated = rating_N != 0
    return float(((score_N > 0) == (rating_N > 0))[rated].double().mean())


def _inner_places(ids: Sequence[list[int]], seed: int) -> list[tuple[int, int]]:
    """The last token of each text and a random one of its second half."""
    generator = random.Random(seed)
    return [(len(x) - 1, generator.randrange(len(x) // 2, len(x))) for x in ids]


def fit_reward_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fits, measures on the held-out texts, and writes the folder.

    Returns:
        `accuracy`, `correlation` (held-out) and `penalty`.
    """
    tokenizer = TextTokenizer(arguments.model)
    keys = {"text_key": arguments.text_key, "rating_key": arguments.rating_key}
    train = read_rated(Path(arguments.train), tokenizer, limit=arguments.examples, **keys)
    limit = arguments.heldout_examples
    heldout = read_rated(Path(arguments.heldout), tokenizer, limit=limit, **keys)
    model = _classifier(Path(arguments.model), arguments.layers)
    with Progress(console=Console(stderr=True)) as progress:
        run = {"batch_tokens": arguments.batch_tokens, "progress": progress}
        hidden_NPE = hidden_states(
            model.model, train.ids, _inner_places(train.ids, arguments.seed),
            label="texts to fit", **run,
        )  # fmt: skip
        last = [(len(x) - 1,) for x in heldout.ids]
        held_NPE = hidden_states(model.model, heldout.ids, last, label="held-out texts", **run)
    weight_E, penalty = fit_head(hidden_NPE, train.rating_N)
    with torch.no_grad():
        model.score.weight.copy_(weight_E[None])
    scores_N = held_NPE[:, 0].double() @ weight_E
    _write(model.cpu(), Path(arguments.model), Path(arguments.to))
    pairs = torch.stack((scores_N, heldout.rating_N))
    return {
        "accuracy": sign_accuracy(scores_N, heldout.rating_N), "penalty": penalty,
        "correlation": float(torch.corrcoef(pairs)[0, 1]), "heldout": len(heldout.ids),
    }  # fmt: skip


def _classifier(folder: Path, layers: int | None) -> Any:
    """The trunk's first layers under an empty scalar head.

    The final norm's gains are set to one: they were learnt for the last layer's output, and a
    least squares fit needs none.
    """
    from transformers import AutoModelForSequenceClassification, logging

    arch = read_architecture(folder)
    if layers is not None and not 1 <= layers <= arch.layers:
        raise ConfigError(
            f"--layers is {layers}, but the model in {str(folder)!r} has {arch.layers} layers; "
            f"use 1 … {arch.layers}"
        )
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports the layers and the head that are meant to differ
    logging.disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(
        str(folder), num_labels=1, num_hidden_layers=layers or arch.layers, dtype=torch.float32,
        local_files_only=True,
    )  # fmt: skip
    logging.set_verbosity(level)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _write(model: Any, source: Path, folder: Path) -> None:
    """Model and tokenizer files; the folder is whole or as it was before."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
        for file in source.glob(pattern):
            shutil.copy2(file, partial / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.rewards.fit",
        description="Fit a scalar reward head on rated texts, on a language model's frozen trunk.",
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder of the language model")
    add("--train", required=True, help="JSONL or Parquet file of rated texts")
    add("--heldout", required=True, help="the same, of texts that the fit never sees")
    add("--to", required=True, help="folder of the reward model; an older one there is replaced")
    add("--layers", type=int, help="first layers of the trunk to keep (default: all)")
    add("--examples", type=int, help="texts of --train to use (default: all)")
    add("--heldout-examples", type=int, help="texts of --heldout to use (default: all)")
    add("--text-key", default="text", help="key of the text (default: %(default)s)")
    add("--rating-key", default="rating", help="key of the number (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, help="tokens per batch (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the inner tokens (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit code 2 for wrong input, with one sentence."""
    parsed = parse(arguments)
    try:
        found = fit_reward_model(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"held-out accuracy {100 * found['accuracy']:.1f} % of {found['heldout']} texts have the "
        f"rating's sign; correlation {found['correlation']:.2f}, penalty {found['penalty']:g}"
    )
    print(f"reward model: {parsed.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
