"""Train the tiny reasoner from a seed, on CPU or GPU.

    python scripts/train_tiny_reasoner.py --out out/tiny-reasoner

Writes a model directory that vLLM and transformers load as it is: weights, config, tokenizer,
chat templates and ``training.json`` with seed, steps and the loss curve.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from meridian_patch.demo.tokenizer import save_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent / "lab"))
from tiny_reasoner.corpus import Corpus, Example

IGNORE = -100
BUCKET = 64
WARM_UP_STEPS = 100


def build_model(vocab_size: int, eos_id: int, pad_id: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.8 M parameters."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=pad_id,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


def batches(corpus: Corpus, tokens_per_batch: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, about ``tokens_per_batch`` padded tokens."""
    rng = random.Random(seed)
    while True:
        pool = sorted((corpus.draw() for _ in range(2048)), key=lambda e: len(e.ids))
        groups: list[list[Example]] = [[]]
        for example in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > tokens_per_batch:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from groups


def collate(batch: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, both ``[rows, length]`` int64; labels are -100 where no loss applies."""
    length = math.ceil(max(len(e.ids) for e in batch) / BUCKET) * BUCKET
    ids = torch.full((len(batch), length), pad_id)
    labels = torch.full((len(batch), length), IGNORE)
    for row, example in enumerate(batch):
        n = len(example.ids)
        ids[row, :n] = torch.tensor(example.ids)
        labels[row, example.first_loss : n] = ids[row, example.first_loss : n]
    return ids, labels


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats, over the labelled tokens."""
    # Right padding under a causal mask never reaches a labelled position: no attention mask.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    chosen = targets != IGNORE
    logits = model.lm_head(hidden[:, :-1][chosen])
    return torch.nn.functional.cross_entropy(logits.float(), targets[chosen])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine to 2 % of the peak."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    parser.add_argument("--peak-lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--stop-after", type=int, help="stop early; the schedule stays as planned")
    parser.add_argument("--init-from", type=Path, help="model directory to start from")
    parser.add_argument("--cut-share", type=float, default=0.25, help="share of cut thoughts")
    parser.add_argument("--recovery-share", type=float, default=0.0, help="share of recoveries")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(args.out)
    vocab_size = math.ceil(len(tokenizer) / 8) * 8
    model = build_model(vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if args.init_from:
        model = Qwen3ForCausalLM.from_pretrained(args.init_from)
    model.to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {args.device}")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    corpus = Corpus(tokenizer, args.seed, args.cut_share, args.recovery_share)
    stream = batches(corpus, args.tokens_per_batch, args.seed)
    curve: list[tuple[int, float]] = []
    started = time.monotonic()
    recent: list[float] = []
    last = min(args.steps, args.stop_after or args.steps)
    for step in range(last):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak_lr)
        ids, labels = collate(next(stream), tokenizer.pad_token_id)
        ids, labels = ids.to(args.device), labels.to(args.device)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = loss_of(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(recent) / len(recent)
            curve.append((step + 1, round(mean, 5)))
            recent.clear()
            pace = (time.monotonic() - started) / (step + 1)
            left = pace * (last - step - 1) / 60
            print(f"step {step + 1}/{args.steps}  loss {mean:.4f}  {left:.0f} min left", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == last:
            model.save_pretrained(args.out)
            record = {"seed": args.seed, "steps": step + 1, "planned_steps": args.steps}
            record |= {"tokens_per_batch": args.tokens_per_batch, "peak_lr": args.peak_lr}
            record |= {"cut_share": args.cut_share, "recovery_share": args.recovery_share}
            record |= {"init_from": str(args.init_from or "")}
            record |= {"device": args.device, "torch": torch.__version__, "loss": curve}
            (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
