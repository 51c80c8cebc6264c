"""Few-shot episodes on frozen features: a few labelled images a class, many small draws of classes and images.

Source: the episodes of UniSiam (Lu et al. 2022, arXiv 2207.09176) and of ssl-transfer (Ericsson et al. 2021,
arXiv 2011.13377). Shapes: E episodes of W ways (classes), K shots (labelled images a class), Q queries a class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ssl_bench.errors import ConfigError
from ssl_bench.evaluation.context import EvaluationContext
from ssl_bench.evaluation.protocol import Protocol, labelled, register_protocol
from ssl_bench.evaluation.softmax import SoftmaxRegression, flushed_denormals
from ssl_bench.random import permutation, sample_keys
from ssl_bench.records import MetricRow

TOLERANCE = 1e-12  # relative, of the objective: scores are then right to its root


def draw_episodes(labels: Tensor, classes: Tensor, *, ways: int, per_class: int, episodes: int, seed: int) -> Tensor:
    """Places of the images of each episode, (E, W, per_class): classes, and images of a class, never repeat in one.

    Args:
        labels: Class of each image, (M,).
        classes: Classes to draw from, at least W of them, with at least `per_class` images each.
        ways: Classes an episode, W.
        per_class: Images a class.
        episodes: Number of episodes, E; more continue the same list.
        seed: Another seed gives other episodes.
    """
    keys = sample_keys(seed, 0, torch.arange(episodes), "episodes")
    drawn = classes[permutation(keys, len(classes), "classes")[:, :ways]]
    images = torch.empty(episodes, ways, per_class, dtype=torch.int64)
    for label in classes.tolist():
        episode, place = (drawn == label).nonzero(as_tuple=True)
        members = (labels == label).nonzero().flatten()
        order = permutation(keys[episode], len(members), f"class {label}")[:, :per_class]
        images[episode, place] = members[order]
    return images


def prototype_scores(supports: Tensor, queries: Tensor) -> Tensor:
    """Minus the squared distance of queries (J, D) to the mean of each class's supports (W, K, D), (J, W)."""
    return -(queries[:, None] - supports.mean(dim=1)).square().sum(dim=2)


def logistic_scores(supports: Tensor, queries: Tensor) -> Tensor:
    """Logits of queries (J, D) by softmax regression on the supports (W, K, D), with scikit-learn's C = 1, (J, W).

    The penalty is the same in every orthonormal basis and the weights are combinations of the supports, so the
    problem is solved in a basis of these: W K numbers a sample, whatever D.
    """
    ways, shots, _ = supports.shape
    basis, _ = torch.linalg.qr(supports.flatten(0, 1).T)
    labels = torch.arange(ways).repeat_interleave(shots)
    problem = SoftmaxRegression(supports.flatten(0, 1) @ basis, labels, ways)
    return problem.solve(1 / (ways * shots), tolerance=TOLERANCE).scores(queries @ basis)


def half_width(accuracies: Tensor) -> float:
    """Half of the 95 % interval of the mean of the episodes' accuracies, (E,): 1.96 deviations by the root of E.

    The deviation divides by E, as in the papers' codes, not by E - 1.
    """
    return 1.96 * float(accuracies.std(correction=0)) / math.sqrt(len(accuracies))


CLASSIFIERS = {"prototype": prototype_scores, "logistic": logistic_scores}


@register_protocol("few_shot", version=1)
class FewShot(Protocol):
    """Mean accuracy over episodes drawn from test, by nearest prototype and by logistic regression.

    Features are L2-normalized, for prototypes before the mean of a class is taken, which is not normalized again
    (ssl-transfer normalizes nothing; UniSiam takes the root of the normalized features, which must not be negative).
    Nothing is tuned. Fewer shots use the first images of the same draw, and the seed alone decides the episodes, so
    models of one seed are compared on the same ones. `ci95` in the details is that of the episodes' draw, not of
    pretraining. Pretraining has seen the classes of most datasets without their labels: few labels, no new classes.

    Args:
        ways: Classes an episode.
        shots: Labelled images a class, each reported under its own metrics.
        queries: Classified images a class.
        episodes: Number of episodes.
    """

    def __init__(
        self, *, ways: int = 5, shots: tuple[int, ...] = (1, 5), queries: int = 15, episodes: int = 600
    ) -> None:
        if ways < 2 or queries < 1 or episodes < 2:
            raise ConfigError(
                "`ways` and `episodes` must be >= 2 and `queries` >= 1, got "
                f"{ways}, {episodes} and {queries} (protocol few_shot)."
            )
        if not shots or min(shots) < 1 or len(set(shots)) < len(shots):
            raise ConfigError(f"`shots` must be different whole numbers >= 1, got {list(shots)} (protocol few_shot).")
        self.ways = ways
        self.shots = tuple(shots)
        self.queries = queries
        self.episodes = episodes

    def run(self, context: EvaluationContext) -> list[MetricRow]:
        """Rows `accuracy_prototype_<W>way_<K>shot` and `accuracy_logistic_<W>way_<K>shot`."""
        test = labelled(context, "test")
        most = max(self.shots)
        counts = torch.bincount(test.labels)
        classes = (counts >= most + self.queries).nonzero().flatten()
        few = ""
        accuracies: dict[tuple[str, int], Tensor] = {}
        if len(classes) < self.ways:
            few = (
                f"{self.ways}-way episodes need {self.ways} classes of {most + self.queries} test images, there are "
                f"{len(classes)}"
            )
        else:
            images = draw_episodes(
                test.labels,
                classes,
                ways=self.ways,
                per_class=most + self.queries,
                episodes=self.episodes,
                seed=context.seed,
            )
            accuracies = self._accuracies(normalize(test.features, eps=1e-12), images)
        details = {
            "ways": self.ways,
            "queries": self.queries,
            "episodes": self.episodes,
            "num_classes_drawn_from": len(classes),
            "normalized": "L2",
        }
        rows = []
        for name in CLASSIFIERS:
            for shots in self.shots:
                values = accuracies.get((name, shots))
                found = {} if values is None else {"ci95": half_width(values)}
                rows.append(
                    self.row(
                        f"accuracy_{name}_{self.ways}way_{shots}shot",
                        None if values is None else float(values.mean()),
                        n_test=int(counts[classes].sum()),
                        note="; ".join(filter(None, (test.note, few))),
                        details={**details, "shots": shots, **found},
                    )
                )
        return rows

    def _accuracies(self, features: Tensor, images: Tensor) -> dict[tuple[str, int], Tensor]:
        """Accuracy of each episode, (E,), by classifier and shots."""
        truth = torch.arange(self.ways).repeat_interleave(self.queries)
        found: dict[tuple[str, int], list[float]] = {(n, k): [] for n in CLASSIFIERS for k in self.shots}
        with flushed_denormals():
            for episode in images:
                samples = features[episode].double()  # (W, most + Q, D)
                queries = samples[:, max(self.shots) :].flatten(0, 1)
                for (name, shots), values in found.items():
                    scores = CLASSIFIERS[name](samples[:, :shots], queries)
                    values.append(float((scores.argmax(dim=1) == truth).double().mean()))
        return {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}
