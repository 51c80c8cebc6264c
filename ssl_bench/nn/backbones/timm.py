"""Any image model of timm, by name, without its classifier."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor

from ssl_bench.errors import ConfigError, RegistryError
from ssl_bench.nn.backbone import Backbone, register_backbone


@register_backbone("timm", version=1)
class Timm(Backbone):
    """A timm model with its classifier removed: the embedding is what the classifier would see.

    A model with a patch embedding and a flat stack of blocks counts as a ViT, every other as a CNN. Models
    built for one image size (most transformers) are built for the data's. Stems stay timm's own, which on
    small images throws away resolution: prefer `resnet18` or `vit_tiny` there.

    Args:
        in_channels: Image channels; with `pretrained`, timm folds the first convolution's weights to them.
        image_size: Side of the images in pixels.
        model: timm's name, such as "resnet50" or "vit_small_patch16_224".
        patch_size: Side of a patch of a vision transformer; None keeps the model's.
        pretrained: Start from timm's published weights (downloads them).
    """

    net: Any

    def __init__(
        self, *, in_channels: int, image_size: int, model: str, patch_size: int | None = None, pretrained: bool = False
    ) -> None:
        super().__init__()
        import timm  # here, since it takes seconds to import

        if not timm.is_model(model):
            near = ", ".join(difflib.get_close_matches(model, timm.list_models(), n=3)) or "nothing"
            raise RegistryError(f"Unknown timm model {model!r}. Near it: {near}; timm.list_models() names all.")
        arguments: dict[str, Any] = {} if patch_size is None else {"patch_size": patch_size}
        config = timm.get_pretrained_cfg(model)
        self.fixed_size = image_size if config is not None and config.fixed_input_size else None
        if self.fixed_size is not None:
            arguments["img_size"] = image_size
        try:
            net: Any = timm.create_model(model, pretrained=pretrained, num_classes=0, in_chans=in_channels, **arguments)
        except (TypeError, AssertionError) as error:
            raise ConfigError(f"timm cannot build {model!r} with {arguments} for {image_size} px: {error}.") from error
        if hasattr(net, "patch_embed") and hasattr(net, "blocks"):
            self.kind = "vit"
        self.embed_dim = int(getattr(net, "head_hidden_size", None) or net.num_features)
        self.net = net
        self.check_image_size(image_size)

    def check_image_size(self, image_size: int) -> None:
        """Refuse a size that a model of fixed size was not built for, or that its patches do not tile."""
        if self.fixed_size not in (None, image_size):
            raise ConfigError(
                f"This timm model takes only the {self.fixed_size} px it was built for, got {image_size}. Choose "
                "another backbone, or views of one size."
            )
        patch = getattr(getattr(self.net, "patch_embed", None), "patch_size", None)
        if isinstance(patch, tuple) and image_size % patch[0]:
            raise ConfigError(
                f"The image size must be a multiple of the patch size, got {image_size} and {patch[0]}. Set the "
                "backbone's patch_size."
            )

    def freeze_patch_embedding(self) -> None:
        """Keep the random patch projection of a ViT fixed (MoCo v3)."""
        self.net.patch_embed.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings, (B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.net(images)
        return embedding

    def feature_map(self, images: Tensor) -> Tensor:
        """Features before pooling; tokens are laid out as a square, (B, C, H, W) -> (B, F, h, w)."""
        features: Tensor = self.net.forward_features(images)
        if features.dim() == 4:
            return features.movedim(-1, 1) if str(getattr(self.net, "output_fmt", "")) == "NHWC" else features
        tokens = features[:, int(getattr(self.net, "num_prefix_tokens", 0) or 0) :]  # (B, h w, F)
        side = round(tokens.shape[1] ** 0.5)
        feature_map: Tensor = tokens.mT.unflatten(2, (side, side))
        return feature_map
