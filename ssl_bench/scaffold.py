"""`ssl-bench new-method`: write a method file and the skeleton of its oracle test."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ssl_bench.errors import ConfigError

METHOD = '''"""{title}: one sentence on what attracts, what repels and what prevents collapse.

Source: authors, year, arXiv number; the authors' code and the commit that was read.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ssl_bench.distributed import batch_mean
from ssl_bench.methods.base import SSLMethod, register_method
from ssl_bench.nn.backbone import Backbone
from ssl_bench.nn.heads import mlp
from ssl_bench.records import Batch, LossOutput, Recipe


@register_method("{name}", family="my-family", version=1, paper="Authors, year", arxiv="0000.00000")
class {title}(SSLMethod):
    """State the formula, its normalization, and which of paper and code is followed where they differ.

    Args:
        backbone: The network to pretrain.
        projection_dim: Width of the projection.
    """

    recipes = {{
        "small": Recipe(
            views="simclr",
            optimizer="adam",
            base_lr=2e-3,
            weight_decay=1e-6,
            warmup_epochs=0.5,
            epochs=4,
            global_batch_size=128,
            source="ours: say what chose it",
        ),
    }}
    loss_is_sample_mean = True  # set to False if the loss couples the samples of a batch

    def __init__(self, backbone: Backbone, *, projection_dim: int = 64) -> None:
        super().__init__(backbone)
        self.projector = mlp(backbone.embed_dim, (backbone.embed_dim, projection_dim))

    def loss(self, views: tuple[Tensor, ...], batch: Batch) -> LossOutput:
        """Mean cosine distance of two views: a placeholder that collapses; write your objective here.

        A mean over samples goes through `batch_mean`; statistics of the global batch need
        `gather_with_grad` or `all_reduce_mean_with_grad` (ssl_bench.distributed).
        """
        z_a, z_b = (self.projector(self.backbone(view)) for view in views)  # (B, P) each
        total = batch_mean(1 - F.cosine_similarity(z_a, z_b))
        return LossOutput(total)
'''

TEST = '''"""{title} against an oracle written from the paper's equations, never from the code under test."""

import pytest


def oracle(z_a, z_b):
    """The paper's equation in float64 numpy or plain loops."""
    raise NotImplementedError


def test_{name}_equals_the_oracle():
    pytest.fail("Write the oracle of {name} from the paper, then compare `{title}.loss` with it on random views.")
'''


def new_method(name: str, root: Path | None = None) -> list[Path]:
    """Write `ssl_bench/methods/<name>.py` and `tests/reference/test_<name>.py`.

    Args:
        name: Registry key and file name: lower-case words joined by underscores.
        root: Checkout to write into; by default the one this package runs from.

    Returns:
        The two files written.

    Raises:
        ConfigError: If the name is not a valid key, or a file is already there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"A method's name must be lower-case words joined by underscores, such as 'my_method', got {name!r}."
        )
    root = root or Path(__file__).parent.parent
    paths = [root / "ssl_bench" / "methods" / f"{name}.py", root / "tests" / "reference" / f"test_{name}.py"]
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path.name} must not exist yet, but {path} does. Choose another name, or edit it.")
        if not path.parent.is_dir():
            raise ConfigError(
                f"The folder {path.parent} must exist: run this in a checkout installed with `pip install -e .`, or "
                "put the method into your own package under the entry-point group 'ssl_bench.methods'."
            )
    title = "".join(word.capitalize() for word in name.split("_"))
    for path, template in zip(paths, (METHOD, TEST), strict=True):
        path.write_text(template.format(name=name, title=title), encoding="utf-8")
    return paths
