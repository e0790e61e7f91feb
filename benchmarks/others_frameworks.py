"""Programs with Accelerate, DeepSpeed, Lightning and transformers, for others_rank.py. The programs don't mention
ProxyCCL. Models have random weights. Each program takes a `World`.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads this variable at its import

import torch
import torch.distributed as dist
from others_rank import World
from torch import Tensor, nn


def llama(world: World) -> Any:
    """Returns a Llama of 8 layers, tiny on CPUs, with the same weights on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, words = (2048, 8, 32000) if world.on_gpus else (64, 2, 128)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if width < 128 else width // 128,
        num_key_value_heads=width // 16 if width < 128 else width // 128,
        max_position_embeddings=2048,
    )
    with world.device:
        return LlamaForCausalLM(config).to(world.dtype)


def tokens_for(world: World, model: Any, seed: int) -> Tensor:
    """Returns a batch of random tokens."""
    size = (4, 512) if world.on_gpus else (2, 16)
    generator = torch.Generator(world.device).manual_seed(seed)
    return torch.randint(model.config.vocab_size, size, device=world.device, generator=generator)


def accelerate_llama(world: World, *, sharded: bool) -> None:
    """Trains a Llama by Accelerate's FSDP2 or DDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(cpu=not world.on_gpus, fsdp_plugin=plugin)
    if sharded and not accelerator.is_fsdp2:
        raise RuntimeError("Accelerate would not shard this model")
    model = llama(world)
    tokens = tokens_for(world, model, seed=world.rank)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in world.steps():
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        world.keep(loss)


def deepspeed_llama(world: World, *, stage: int) -> None:
    """Trains a Llama by DeepSpeed's ZeRO, which shards gradients at stage 2, and parameters too at stage 3."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if world.on_gpus else "cpu")
    import deepspeed

    model = llama(world)
    tokens = tokens_for(world, model, seed=world.rank)
    config = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "bf16": {"enabled": world.on_gpus},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,  # an optimizer of DeepSpeed would be compiled first
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in world.steps():
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        world.keep(loss)
    engine.destroy()


def lightning_ddp(world: World) -> None:
    """Trains a small convolution net for 64 steps by Lightning's DDP with SyncBatchNorm. Logs the mean loss."""
    import pytorch_lightning as lightning

    class Net(lightning.LightningModule):  # type: ignore[misc,unused-ignore]  # the package may be missing
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            width = 64 if world.on_gpus else 4
            layers: list[nn.Module] = [nn.Conv2d(3, width, 3)]
            for _ in range(3):
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3)]
            self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    steps = world.steps(64)

    class Timed(lightning.Callback):  # type: ignore[misc,unused-ignore]
        def on_train_batch_start(self, *_: Any) -> None:
            next(steps, None)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            world.keep(trainer.callback_metrics["loss"])

    batches, size = (64, 64) if world.on_gpus else (64, 4)
    torch.manual_seed(10 + world.rank)
    images = torch.utils.data.TensorDataset(
        torch.randn(batches * size, 3, 32, 32), torch.randint(10, (batches * size,))
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if world.on_gpus else "cpu",
        devices=world.size,
        strategy="ddp",
        sync_batchnorm=world.on_gpus,  # torch has no SyncBatchNorm for CPUs
        max_steps=64,
        callbacks=[Timed()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(images, batch_size=size))
    next(steps, None)


def llama_tp(world: World, *, what: str, compiled: bool) -> None:
    """Runs inference by transformers' tensor parallelism. The model is saved first, because transformers splits a model
    only while loading it.
    """
    from transformers import AutoModelForCausalLM

    folder = world.folder / "llama"
    if world.rank == 0 and not folder.exists():
        llama(world).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=world.dtype).to(world.device)
    tokens = tokens_for(world, model, seed=0)
    if compiled:
        model.forward = torch.compile(model.forward)
    for _ in world.steps(16 if what == "forward" else 10):
        with torch.no_grad():
            if what == "forward":
                world.keep(model(input_ids=tokens).logits)
                continue
            made = model.generate(
                tokens, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            world.keep(made.logits[0])
            world.keep(made.logits[1])
