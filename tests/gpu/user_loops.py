"""Training loops as users write them, each under plain torch.compile and under graphoffload with no option but a budget.

    PYTHONPATH=tests python tests/gpu/user_loops.py CASE [SHARE]      one row of a table; exits with 1 if something is wrong
    PYTHONPATH=tests python tests/gpu/user_loops.py CASE --tiny --device cpu       the same loop in small: its losses alone

user_runs.py trains and compares them. Each function here builds one loop, on the device that is current:

    gpt2    accumulation of 4, clipping, autocast, dropout      by blocks
    vit     float16 with a GradScaler                           as a whole
    resnet  timm, channels_last, SGD with momentum, eager loss  as a whole
    t5      lengths that change from step to step               as a whole
    lora    adapters of peft on a frozen Llama                  by blocks
    qwen    accumulation of 2, evaluations between steps        by blocks
    own     the same with an update of the user's own           by blocks
    two_models   a student and its frozen teacher               each as a whole
    gan     two networks in turn, two optimizers                each as a whole

user_recipes.py has those of later stages and of other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu import user_recipes
from gpu.user_parts import BATCHES, decoder, loader, norm_of, pictures, trained, words
from gpu.user_runs import Case, Loop, main
from torch import Tensor, nn

from graphoffload.bench.nets import EncoderBlock, VisionTransformer


def gpt2(device: torch.device, tiny: bool) -> Loop:
    """Float32 parameters, bfloat16 autocast, four microbatches a step, clipping, AdamW; dropout as by default; by blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Any = GPT2Config
    config = make(n_layer=2, n_embd=64, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0) if tiny else make()
    model: Any = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    batch, accumulate = words(device, config.vocab_size, *((2, 32) if tiny else (16, 1024))), 4

    def step(number: int) -> tuple[float, float]:
        total = 0.0
        for micro in range(accumulate):
            (ids,) = batch(accumulate * number + micro)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / accumulate
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return Loop(list(model.transformer.h), step)


def vit(device: torch.device, tiny: bool) -> Loop:
    """Float32 parameters, float16 autocast, GradScaler, clipping, AdamW, gradients that stay between steps; as a whole."""
    sizes = {"layers": 2, "dim": 32, "heads": 2} if tiny else {"layers": 24, "dim": 1024, "heads": 16}
    side, classes = (32, 10) if tiny else (224, 1000)
    model = VisionTransformer(**sizes, image=side, patch=8 if tiny else 14, classes=classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler, batch = torch.amp.GradScaler(device.type), pictures(device, 4 if tiny else 64, side, classes)

    def step(number: int) -> tuple[float, float]:
        images, labels = batch(number)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = model(images, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), norm.item()

    return Loop([model], step)


def resnet(device: torch.device, tiny: bool) -> Loop:
    """timm's ResNet-50, channels_last, bfloat16 autocast, SGD with momentum, the loss in eager code; as a whole."""
    import timm

    classes = 10 if tiny else 1000
    model: nn.Module = timm.create_model("resnet18" if tiny else "resnet50", pretrained=False, num_classes=classes)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    batch = pictures(device, 4 if tiny else 512, 64 if tiny else 224, classes)

    def step(number: int) -> tuple[float, float]:
        images, labels = batch(number)
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        return trained(model, optimizer, loss)

    return Loop([model], step)


def t5(device: torch.device, tiny: bool) -> Loop:
    """T5 of the base's width, bfloat16 autocast, AdamW, dropout as by default, three lengths that take turns; as a whole.

    The second length is the largest: what torch compiles for any length is planned for that one (docs/training.md).
    """
    from transformers import T5Config, T5ForConditionalGeneration

    make: Any = T5Config
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 256}
    base = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 4, "num_heads": 12}
    config = make(**(sizes if tiny else base), decoder_start_token_id=0)
    model: Any = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows, lengths = (2, (24, 32, 16)) if tiny else (16, (384, 512, 256))

    def make_batch(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        source, target = (rows, lengths[number]), (rows, lengths[number] // 4)
        return tuple(torch.randint(1, config.vocab_size, shape, generator=generator) for shape in (source, target))

    batch = loader(device, make_batch)

    def step(number: int) -> tuple[float, float]:
        ids, labels = batch(number)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        return trained(model, optimizer, loss)

    return Loop([model], step)


def lora(device: torch.device, tiny: bool) -> Loop:
    """Adapters of peft on every linear of a frozen bfloat16 Llama, in float32 as by default, autocast, AdamW; by blocks."""
    import peft

    base = decoder("LlamaConfig", tiny)
    adapters = peft.LoraConfig(r=4 if tiny else 16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = words(device, base.config.vocab_size, *((2, 32) if tiny else (8, 4096)))

    def step(number: int) -> tuple[float, float]:
        (ids,) = batch(number)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return trained(model, optimizer, loss)

    return Loop(list(base.model.layers), step)


def qwen(device: torch.device, tiny: bool) -> Loop:
    """Qwen3 in bfloat16, two microbatches a step, AdamW, an evaluation after every other step; by blocks."""
    return qwen_with(device, tiny, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4))


def own(device: torch.device, tiny: bool) -> Loop:
    """The same with an update of the user's own."""
    return qwen_with(device, tiny, OwnUpdate)


class OwnUpdate:
    """Plain descent in a few lines: no optimizer of torch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rate = model, 0.02

    @torch.no_grad()
    def step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p -= self.rate * p.grad

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None


def qwen_with(device: torch.device, tiny: bool, make_update: Callable[[nn.Module], Any]) -> Loop:
    model = decoder("Qwen3Config", tiny, head_dim=16 if tiny else 128)
    update, accumulate = make_update(model), 2
    batch = words(device, model.config.vocab_size, *((2, 32) if tiny else (4, 2048)))

    def step(number: int) -> tuple[float, float]:
        total = 0.0
        for micro in range(accumulate):
            (ids,) = batch(accumulate * number + micro)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / accumulate
            loss.backward()
            total += loss.item()
        norm = norm_of(model)
        update.step()
        update.zero_grad()
        return total, norm

    def evaluate(number: int) -> None:
        if number % 2:
            model.eval()
            with torch.no_grad():
                (ids,) = batch(number)
                model(input_ids=ids, labels=ids, use_cache=False).loss.item()
            model.train()

    return Loop(list(model.model.layers), step, evaluate)


class Classifier(nn.Module):
    """Scores of a sequence of tokens."""

    def __init__(self, *, layers: int, dim: int, vocabulary: int, length: int, classes: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, dim), nn.Parameter(torch.randn(length, dim) * 0.02)
        self.layers = nn.ModuleList(EncoderBlock(dim, dim // 32 if dim < 256 else dim // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x).mean(1))
        return scores


def two_models(device: torch.device, tiny: bool) -> Loop:
    """A student learns from a frozen teacher in the same process; bfloat16 autocast, AdamW; both compiled, each as a whole."""
    length, rows = (32, 2) if tiny else (512, 32)
    shared = {"vocabulary": 256 if tiny else 8192, "length": length, "classes": 10 if tiny else 1000}
    teacher = Classifier(layers=2, dim=64, **shared) if tiny else Classifier(layers=12, dim=1280, **shared)
    student = Classifier(layers=2, dim=32, **shared) if tiny else Classifier(layers=8, dim=1024, **shared)
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    batch, heat = words(device, shared["vocabulary"], rows, length), 2.0

    def step(number: int) -> tuple[float, float]:
        (ids,) = batch(number)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(ids)
            scores = student(ids)
            soft = F.kl_div(F.log_softmax(scores / heat, -1), F.softmax(wanted / heat, -1), reduction="batchmean")
            loss = heat**2 * soft + F.cross_entropy(scores, wanted.argmax(-1))
        loss.backward()
        norm = norm_of(student)
        optimizer.step()
        return loss.item(), norm

    return Loop([student, teacher], step)


def gan(device: torch.device, tiny: bool) -> Loop:
    """A DCGAN in float32: the critic's step on a real and a made batch, then the generator's through the critic; two Adams."""
    rows, width, levels = (16, 4, 3) if tiny else (256, 64, 4)
    generator, critic = Generator(width, levels), Critic(width, levels)
    of_critic, of_generator = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (critic, generator))
    batch, judged = pictures(device, rows, 4 * 2 ** (levels + 1), 10), nn.BCEWithLogitsLoss()
    seeds = torch.randn(BATCHES, rows, 16 * width)

    def step(number: int) -> tuple[float, float]:
        real, _ = batch(number)
        true, false = torch.ones(rows, device=device), torch.zeros(rows, device=device)
        made = generator(seeds[number % BATCHES])
        critic.zero_grad()
        loss = judged(critic(real), true) + judged(critic(made.detach()), false)
        loss.backward()
        norm = norm_of(critic)
        of_critic.step()
        generator.zero_grad()
        fooled = judged(critic(made), true)
        fooled.backward()
        of_generator.step()
        return loss.item() + fooled.item(), norm + norm_of(generator)

    return Loop([generator, critic], step)


class Generator(nn.Module):
    """Images of side 4 * 2 ** (levels + 1) from vectors of 16 * width.

    The first layer is linear: under torch 2.11 the compiled backward of a transposed convolution of one pixel fails.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sides = [width * 2**level for level in reversed(range(levels))]
        first = nn.Linear(16 * width, 16 * 2 * sides[0], bias=False)
        layers: list[nn.Module] = [first, nn.Unflatten(1, (2 * sides[0], 4, 4))]
        for inputs, outputs in zip([2 * sides[0], *sides], sides, strict=False):
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(True), nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)]
        last = (nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        self.layers = nn.Sequential(*layers, *last)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.layers(noise)
        return images


class Critic(nn.Module):
    """One score for each such image."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        for level in range(levels):
            inputs, outputs = width * 2**level, width * 2 ** (level + 1)
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width * 2**levels, 1, 4))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores.flatten()


CASES = {
    "gpt2": Case(gpt2, share=0.9, needs=("transformers",)),  # most of its peak are the logits of an eager loss
    "vit": Case(vit),
    "resnet": Case(resnet, needs=("timm",)),
    "t5": Case(t5, needs=("transformers",)),
    "lora": Case(lora, needs=("transformers", "peft")),
    "qwen": Case(qwen, needs=("transformers",)),
    "own": Case(own, needs=("transformers",)),
    "two_models": Case(two_models),
    "gan": Case(gan, compared=6),
    **user_recipes.CASES,
}

if __name__ == "__main__":
    main(CASES)
