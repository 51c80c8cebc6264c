"""Fine-tuning of the whole network, with all labels or a stratified few.

Convolutional networks: SGD with Nesterov momentum, half-cosine schedule, no weight decay, batch norm in
training mode (ssl-transfer, arXiv 2011.13377). Vision transformers: AdamW, layer-wise rate decay, warm-up,
mean of patch tokens through a LayerNorm (MAE, arXiv 2111.06377, and its main_finetune.py). Differs: crop
and flip only, no mixup, cutmix, RandAugment, erasing, label smoothing or drop path; the backbone's own final
norm stays before the mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ssl_bench.distributed import batch_mean, is_distributed, rank, uneven_batches, world_size
from ssl_bench.errors import ConfigError, DivergedError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.features import run_on_store
from ssl_bench.evaluation.labels import label_subset
from ssl_bench.evaluation.loading import JoinedStore, view_batches
from ssl_bench.evaluation.protocol import Protocol, check_labels, missing_classes, rank_classes, register_protocol
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.batch_norm import convert_batch_norm
from ssl_bench.optim import ParameterGroup, apply_schedule, build_optimizer
from ssl_bench.random import epoch_permutation, normal, sample_keys
from ssl_bench.records import MetricRow, Recipe
from ssl_bench.results.store import write_json

HEAD_STD = 2e-5
MIN_STEPS = 200  # a few labels make epochs of one step: train longer than `epochs` then
BASE_LRS: Mapping[str, tuple[float, ...]] = {"cnn": (0.01, 0.03, 0.1, 0.3), "vit": (5e-4, 1e-3, 2e-3)}  # per 256 images
BLOCK = re.compile(r"(?:^|\.)(?:blocks|encoder_layer)[._](\d+)\.")
TOKEN = re.compile(r"(?:^|\.)(?:(?:cls|class|reg|dist|mask)_token|pos(?:ition)?_embed(?:ding)?)$")
PATCHES = re.compile(r"(?:^|\.)(?:patch_embed|conv_proj)\.")
LAST = re.compile(r"(?:^|\.)(?:norm|fc_norm|ln|head)\.")


class Classifier(nn.Module):
    """A backbone with a new linear head; the head starts near zero, so the first loss is ln C.

    Args:
        backbone: Trained together with the head. A ViT is read by the mean of its patch tokens.
        num_classes: C.
        seed: Seed of the head's weights.
    """

    def __init__(self, backbone: Backbone, num_classes: int, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.uses_tokens = backbone.kind == "vit"
        self.num_steps = 0
        self.norm = nn.LayerNorm(backbone.embed_dim, eps=1e-6) if self.uses_tokens else nn.Identity()
        self.head = nn.Linear(backbone.embed_dim, num_classes)
        with torch.no_grad():
            keys = sample_keys(seed, 0, torch.arange(num_classes), "head")
            self.head.weight.copy_(HEAD_STD * normal(keys, backbone.embed_dim, "weight"))
            self.head.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (B, C)."""
        backbone = self.backbone
        embedding = backbone.feature_map(images).mean(dim=(2, 3)) if self.uses_tokens else backbone(images)
        logits: Tensor = self.head(self.norm(embedding))
        return logits


def layer_ids(model: nn.Module) -> dict[str, int]:
    """Layer number of every parameter of a ViT classifier with L blocks.

    Tokens, position and patch embedding 0; block b (from 0) b + 1; everything else L + 1.

    Raises:
        ConfigError: If there is no block, or a parameter whose layer its name does not tell.
    """
    names = [name for name, _ in model.named_parameters()]
    blocks = {name: int(found.group(1)) for name in names if (found := BLOCK.search(name))}
    first = {name for name in names if name not in blocks and (TOKEN.search(name) or PATCHES.search(name))}
    last = {name for name in names if name not in blocks and name not in first and LAST.search(name)}
    unknown = [name for name in names if name not in blocks and name not in first and name not in last]
    if unknown or not blocks:
        raise ConfigError(
            "Layer-wise decay needs a ViT with parameters named `blocks.N.`, tokens, `patch_embed`, `norm` and `head`, "
            f"got {f'the unknown {unknown[:3]}' if unknown else 'no blocks'} in {type(model).__name__}. Rename them in "
            "the backbone, or set the protocol's layer_decay to 1."
        )
    top = max(blocks.values()) + 2
    return {name: blocks[name] + 1 if name in blocks else 0 if name in first else top for name in names}


def layer_groups(model: nn.Module, layer_decay: float) -> list[ParameterGroup]:
    """Parameter groups of a ViT classifier: rate factor layer_decay^(L + 1 - layer), no weight decay for tokens."""
    ids = layer_ids(model) if layer_decay != 1.0 else {name: 0 for name, _ in model.named_parameters()}
    last = max(ids.values())
    groups: dict[tuple[int, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((ids[name], bool(TOKEN.search(name))), []).append((name, parameter))
    return [
        ParameterGroup(members, lr_factor=layer_decay ** (last - layer), weight_decay=0.0 if is_token else None)
        for (layer, is_token), members in sorted(groups.items(), key=lambda item: item[0])
    ]


@register_protocol("finetune", version=1)
class FineTune(Protocol):
    """Fine-tuning on a copy of the backbone; rate chosen on validation, retrained on train + validation.

    With a label fraction, train AND validation keep only that share of their labels, so no hidden labels
    tune the rate. The network of the last epoch is tested, once. Each fraction has its own metrics:
    `top1` for all labels, `top1_1pct` for 1 %. The image lists are stored beside the predictions.

    Args:
        label_fractions: Shares of the labels, each in (0, 1].
        epochs: Length of the final training; at least 200 steps are done.
        search_epochs: Length of each training of the search; at least 200 steps, too.
        base_lrs: Peak learning rates per 256 images to choose from; None takes those of the backbone's
            kind. One value is used as it is, without a search.
        global_batch_size: Images a step over all ranks; fewer images make one batch.
        layer_decay: Rate factor from layer to layer of a ViT.
        weight_decay: AdamW's weight decay of a ViT.
    """

    needs = "backbone"

    def __init__(
        self,
        *,
        label_fractions: tuple[float, ...] = (1.0,),
        epochs: int = 20,
        search_epochs: int = 5,
        base_lrs: tuple[float, ...] | None = None,
        global_batch_size: int = 128,
        layer_decay: float = 0.65,
        weight_decay: float = 0.05,
    ) -> None:
        if not label_fractions or not all(0 < fraction <= 1 for fraction in label_fractions):
            raise ConfigError(f"`label_fractions` must be in (0, 1], got {list(label_fractions)} (protocol finetune).")
        if epochs < 1 or search_epochs < 1 or global_batch_size < 1:
            raise ConfigError(
                "`epochs`, `search_epochs` and `global_batch_size` must be >= 1, got "
                f"{epochs}, {search_epochs} and {global_batch_size} (protocol finetune)."
            )
        if base_lrs is not None and (not base_lrs or min(base_lrs) < 0):
            raise ConfigError(f"`base_lrs` must be numbers >= 0, got {list(base_lrs)} (protocol finetune).")
        if not 0 < layer_decay <= 1:
            raise ConfigError(f"`layer_decay` must be in (0, 1], got {layer_decay} (protocol finetune).")
        self.label_fractions = tuple(label_fractions)
        self.epochs = epochs
        self.search_epochs = search_epochs
        self.base_lrs = base_lrs
        self.global_batch_size = global_batch_size
        self.layer_decay = layer_decay
        self.weight_decay = weight_decay

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `top1` and `top5` of every fraction."""
        data = context.dataset
        train, validation = data.split("train"), data.split("validation")
        for name, store in (("train", train), ("validation", validation)):
            check_labels(torch.from_numpy(store.labels), data.num_classes, name)
        rows: list[MetricRow] = []
        models: dict[str, tuple[nn.Module, str, dict[str, Any]]] = {}
        for fraction in self.label_fractions:
            suffix = "" if fraction == 1 else f"_{100 * fraction:g}pct"
            models[suffix] = self._fit(context, JoinedStore(train, validation), len(train), fraction, suffix)
        test = data.split("test")  # only now: every choice is made
        labels = torch.from_numpy(test.labels.copy())
        check_labels(labels, data.num_classes, "test")
        predictions = {}
        for suffix, (model, selected_on, details) in models.items():
            ranking = rank_classes(_scores(model, test, context))
            predictions[f"top1{suffix}"] = ranking[:, 0]
            rows += self.accuracy_rows(
                ranking, labels, data.num_classes, suffix=suffix, selected_on=selected_on, details=details
            )
        self.save_predictions(context, labels, predictions)
        return rows

    def _fit(
        self, context: EvaluationContext, store: JoinedStore, num_train: int, fraction: float, suffix: str
    ) -> tuple[nn.Module, str, dict[str, Any]]:
        """The final model, the split that chose its rate, and what to say about it."""
        data = context.dataset
        labels = torch.from_numpy(store.labels)
        subset: dict[str, Tensor] = {}
        for split, start, stop in (("train", 0, num_train), ("validation", num_train, len(labels))):
            subset[split] = start + label_subset(
                labels[start:stop], fraction, fingerprint=data.fingerprint, split=split, seed=context.seed
            )
        if context.writes:
            lists = {"train": subset["train"].tolist(), "validation": (subset["validation"] - num_train).tolist()}
            facts = {"dataset": data.name, "fingerprint": data.fingerprint, "fraction": fraction, "seed": context.seed}
            write_json(context.work_dir / f"finetune_labels{suffix}.json", {**facts, **lists})

        kind = "vit" if context.backbone().kind == "vit" else "cnn"
        base_lrs = self.base_lrs or BASE_LRS[kind]
        best, accuracies, selected_on = 0, [], "none"
        if len(base_lrs) > 1:
            selected_on = "validation"
            truth = labels[subset["validation"]]
            for base_lr in base_lrs:
                model = self._train(context, store, subset["train"], base_lr, self.search_epochs)
                scores = _scores(model, store, context, subset["validation"])
                hits = (rank_classes(scores)[:, 0] == truth) & scores.isfinite().all(dim=1)
                accuracies.append(float(hits.double().mean()))
            best = accuracies.index(max(accuracies))
        both = torch.cat([subset["train"], subset["validation"]])
        model = self._train(context, store, both, base_lrs[best], self.epochs)
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise DivergedError(
                f"Fine-tuning must end with finite weights, got NaN or infinity at base_lr {base_lrs[best]:g}. Give "
                "the protocol smaller base_lrs.",
                step=model.num_steps,
            )
        return (
            model,
            selected_on,
            {
                "label_fraction": fraction,
                "n_labels": len(both),
                "n_train": len(subset["train"]),
                "n_validation": len(subset["validation"]),
                "base_lr": base_lrs[best],
                "base_lrs": list(base_lrs),
                "base_lr_at_grid_edge": len(base_lrs) > 1 and best in (0, len(base_lrs) - 1),
                "validation_top1": accuracies,
                "epochs": self.epochs,
                "search_epochs": self.search_epochs,
                "num_steps": model.num_steps,
                "global_batch_size": min(self.global_batch_size, len(both)),
                **(
                    {"optimizer": "adamw", "layer_decay": self.layer_decay, "weight_decay": self.weight_decay}
                    if kind == "vit"
                    else {"optimizer": "sgd"}
                ),
                "batch_norm": "train",
                "views": "supervised",
                "classes_missing_in_train": missing_classes(labels[both], data.num_classes),
            },
        )

    def _train(
        self, context: EvaluationContext, store: JoinedStore, index: Tensor, base_lr: float, epochs: int
    ) -> Classifier:
        """Train a fresh copy on the given images; the last epoch's network."""
        model = Classifier(context.backbone(), context.dataset.num_classes, context.seed).to(context.device)
        model.requires_grad_(True).train()
        if is_distributed():
            convert_batch_norm(model)
        batch_size = min(self.global_batch_size, len(index))
        steps_per_epoch = len(index) // batch_size
        epochs = max(epochs, -(-MIN_STEPS // steps_per_epoch))
        recipe = self._recipe(model.backbone.kind, base_lr, batch_size, epochs)
        if model.backbone.kind == "vit":
            groups = layer_groups(model, self.layer_decay)
        else:
            groups = [ParameterGroup(list(model.named_parameters()))]
        optimizer = build_optimizer(groups, recipe)
        views = context.views(recipe.views)
        step = 0
        for epoch in range(epochs):
            order = index[epoch_permutation(context.seed, epoch, len(index))]
            batches = [
                batch.tensor_split(world_size())[rank()]
                for batch in order[: steps_per_epoch * batch_size].split(batch_size)
            ]
            loader = view_batches(
                store,
                views,
                batches,
                epoch=epoch,
                seed=context.seed,
                device=context.device,
                num_workers=context.num_workers,
            )
            for batch in loader:
                labels = torch.from_numpy(store.labels[batch.index.cpu().numpy()]).to(context.device)
                apply_schedule(optimizer, recipe, step, epochs * steps_per_epoch, steps_per_epoch)
                optimizer.zero_grad()
                with uneven_batches():
                    loss = batch_mean(F.cross_entropy(model(batch.views[0]), labels, reduction="none"))
                loss.backward()  # type: ignore[no-untyped-call]
                _average_gradients(model)
                optimizer.step()
                step += 1
        model.num_steps = step
        return model

    def _recipe(self, kind: str, base_lr: float, batch_size: int, epochs: int) -> Recipe:
        common: dict[str, Any] = {"views": "supervised", "base_lr": base_lr, "global_batch_size": batch_size}
        if kind == "vit":
            lr = base_lr * batch_size / 256
            return Recipe(
                **common,
                optimizer="adamw",
                weight_decay=self.weight_decay,
                warmup_epochs=0.05 * epochs,  # 5 of 100
                end_lr_factor=min(1.0, 1e-6 / lr) if lr else 0.0,
                epochs=epochs,
            )
        return Recipe(**common, optimizer="sgd", nesterov=True, weight_decay=0.0, warmup_epochs=0.0, epochs=epochs)


def _average_gradients(model: nn.Module) -> None:
    if is_distributed():
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size()


def _scores(model: nn.Module, store: Any, context: EvaluationContext, index: Tensor | None = None) -> Tensor:
    """Logits of some images of a store in evaluation mode, (M, C)."""
    return run_on_store(
        model,
        store,
        context.views("eval"),
        width=context.dataset.num_classes,
        index=index,
        batch_size=context.batch_size,
        device=context.device,
        num_workers=context.num_workers,
    )
