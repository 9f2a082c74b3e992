"""Train the demo's target: a byte-level Llama of 1.5 M parameters on the novels in ``text.txt``.

Writes ``target/config.json`` and ``target/model.safetensors`` (fp16, about 3 MB) in Hugging Face's layout. The last
5 % of the corpus are held out: the demo measures acceptance there. A thousand steps take about a quarter of an hour on
two idle cores and end at 1.09 nats per held-out byte.

    python train_target.py --threads 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
HELD_OUT = 0.05
VOCABULARY = 256


def build() -> LlamaForCausalLM:
    """An untrained target: eight layers, so that the default aux layers 1, 3 and 4 are distinct."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def windows(data: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """``[batch, length]`` int64: random windows of the byte tensor ``data``."""
    starts = torch.randint(0, data.numel() - length, (batch, 1), generator=generator)
    return data[starts + torch.arange(length)].long()


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-byte cross entropy, in nats."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz steps: halves the steps a small transformer needs.

    ``torch.optim.Muon`` works in bf16, which CPUs without bf16 units emulate slowly; this one stays in fp32 and takes
    all matrices of one shape together.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = torch.stack([p.grad for p in group["params"]])
            state = self.state[group["params"][0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradients))
            momentum.lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(momentum, group["momentum"]))
            rows, columns = update.shape[-2:]
            scale = max(1.0, rows / columns) ** 0.5
            for parameter, delta in zip(group["params"], update, strict=True):
                parameter.add_(delta, alpha=-group["lr"] * scale)


def orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Pushes the singular values of every matrix in ``[count, rows, columns]`` towards one."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: torch.Tensor, length: int) -> float:
    """Loss over consecutive windows of the held-out text."""
    usable = data[: 64 * length].view(-1, length).long()
    return float(loss_of(model, usable))


def rate(step: int, steps: int, warm_up: int = 30) -> float:
    """Share of the peak learning rate: a linear rise, then a linear fall to 2 % over the last 70 % of the run."""
    return min((step + 1) / warm_up, 1.0, 0.02 + 0.98 * (steps - step) / (0.7 * steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "target")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    text = torch.frombuffer(bytearray((HERE / "text.txt").read_bytes()), dtype=torch.uint8)
    split = int(text.numel() * (1 - HELD_OUT))
    train, held_out = text[:split], text[split:]
    model = build()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {train.numel():,} bytes of training text")

    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    optimizers = [Muon(inner, lr=arguments.lr), torch.optim.AdamW(outer, lr=arguments.lr / 5, betas=(0.9, 0.98))]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, arguments.steps))
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(arguments.seed)
    begun = time.monotonic()
    for step in range(arguments.steps):
        loss = loss_of(model, windows(train, arguments.batch, arguments.seq_len, generator))
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step + 1 == arguments.steps:
            seconds = time.monotonic() - begun
            tail = ""
            if step % 250 == 0 or step + 1 == arguments.steps:
                tail = f"  held-out {held_out_loss(model, held_out, arguments.seq_len):.3f}"
            print(f"step {step:5d}  loss {loss.item():.3f}{tail}  {seconds:.0f} s", flush=True)
    model.half().save_pretrained(arguments.out, safe_serialization=True)
    (arguments.out / "generation_config.json").unlink(missing_ok=True)
    print(f"saved to {arguments.out}")


if __name__ == "__main__":
    main()
