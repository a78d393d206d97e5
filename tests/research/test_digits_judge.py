import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from research.digits_judge import DigitsJudge


class Split:
    """A dataset as data/base.py has it, over arrays."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        images, labels = torch.from_numpy(self.images[indices]), torch.from_numpy(self.labels[indices])
        return {"images": images.float(), "class": labels}


@pytest.fixture(scope="module")
def train() -> Split:
    return _random_split()[0]


@pytest.fixture(scope="module")
def held_out() -> Split:
    return _random_split()[1]


@pytest.fixture(scope="module")
def judge(train, held_out) -> DigitsJudge:
    return DigitsJudge.from_dataset(train, held_out)


def _random_split() -> tuple[Split, Split]:
    digits = load_digits()
    images, labels = (digits.images / 8 - 1)[:, None], digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    return tuple(Split(images[part], labels[part]) for part in (order[:1500], order[1500:]))


def balanced(split: Split, per_digit: int) -> Split:
    generator = np.random.default_rng(1)
    chosen = [generator.choice(np.flatnonzero(split.labels == digit), per_digit) for digit in range(10)]
    return Split(split.images[np.concatenate(chosen)], split.labels[np.concatenate(chosen)])


def test_held_out_digits_are_recognised_and_score_exactly_as_real(judge, held_out):
    scores = judge.judge(held_out.images, held_out.labels)
    assert scores["accuracy"] >= 0.98
    for name in ("accuracy", "frechet_distance", "copies", "nearest_distance_median"):
        assert scores[name] == pytest.approx(scores[f"{name}_real"], rel=1e-5)
    assert scores["copies"] == pytest.approx(0.01, abs=1 / 297)
    assert scores["variety"] == pytest.approx(1) and scores["variety_lowest"] == pytest.approx(1)
    assert all(type(value) is float for value in scores.values())


def test_features_are_the_hidden_layer_of_the_perceptron(judge, held_out):
    pixels, perceptron = held_out.images.reshape(297, 64), judge._perceptron
    logits = judge._features(pixels) @ perceptron.coefs_[1] + perceptron.intercepts_[1]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, perceptron.predict_proba(pixels), rtol=1e-6)


def test_training_images_are_all_copies(judge, train):
    scores = judge.judge(train.images, train.labels)
    assert scores["copies"] == 1 and scores["nearest_distance_median"] == pytest.approx(0, abs=1e-5)
    assert scores["nearest_distance_median_real"] > 1.5
    # Subsets of the reference itself: (1/297 - 1/1500) / (1/297 + 1/1500) = 0.67 of what independent digits score.
    assert scores["frechet_distance"] / scores["frechet_distance_real"] == pytest.approx(0.67, abs=0.25)


def test_shuffled_labels_are_right_by_chance(judge, train):
    digits = balanced(train, 100)
    scores = judge.judge(digits.images, np.random.default_rng(0).permutation(digits.labels))
    assert scores["accuracy"] == pytest.approx(0.1, abs=0.03)


def test_one_image_repeated_has_no_variety_and_lies_far_from_real(judge, held_out):
    labels = np.full(300, held_out.labels[0])
    scores = judge.judge(held_out.images[:1].repeat(300, axis=0), labels)
    assert scores["accuracy"] == 1
    assert scores["frechet_distance"] > 10 * scores["frechet_distance_real"]
    assert scores["variety"] == pytest.approx(0, abs=1e-6)


def test_one_image_per_digit_is_found_by_variety_and_distance(judge, train):
    labels = np.arange(10).repeat(100)
    means = np.stack([train.images[train.labels == digit].mean(axis=0) for digit in range(10)])
    scores = judge.judge(means[labels], labels)
    assert scores["accuracy"] == 1 and scores["copies"] == 0
    assert scores["frechet_distance"] > 5 * scores["frechet_distance_real"]
    assert scores["variety"] == pytest.approx(0, abs=1e-6)


def test_noise_is_not_recognised_and_lies_farthest(judge):
    noise = np.random.default_rng(0).uniform(-1, 1, (1000, 1, 8, 8))
    scores = judge.judge(noise, np.arange(1000) % 10)
    assert scores["accuracy"] < 0.2
    assert scores["frechet_distance"] > 100 * scores["frechet_distance_real"]
    assert scores["copies"] == 0


def test_distance_grows_with_the_noise_on_real_digits(judge, held_out):
    noise = np.random.default_rng(0).standard_normal(held_out.images.shape)
    noisy = [held_out.images + scale * noise for scale in (0, 0.1, 0.2, 0.4)]
    distances = [judge.judge(images, held_out.labels)["frechet_distance"] for images in noisy]
    assert distances[0] * 1.1 < distances[1] < distances[2] < distances[3]


def test_more_images_of_the_same_kind_do_not_lower_the_distance(judge, train):
    """The plain estimate would: real training digits at 500 and at 5,000 images differ by their number only."""
    few, many = (judge.judge(digits.images, digits.labels) for digits in (balanced(train, 50), balanced(train, 500)))
    assert few["frechet_distance_real"] == many["frechet_distance_real"]
    assert few["frechet_distance"] == pytest.approx(many["frechet_distance"], rel=0.3)


def test_a_small_set_is_compared_with_as_few_real_digits(judge, train):
    small = balanced(train, 10)
    scores, full = judge.judge(small.images, small.labels), judge.judge(train.images, train.labels)
    assert scores["frechet_distance_real"] > 2 * full["frechet_distance_real"]
    assert scores["frechet_distance"] < 2 * scores["frechet_distance_real"]


def test_only_the_digits_asked_for_are_compared(judge, held_out):
    some = np.isin(held_out.labels, [3, 5])
    scores = judge.judge(held_out.images[some], held_out.labels[some])
    assert scores["frechet_distance"] == pytest.approx(scores["frechet_distance_real"], rel=1e-5)


def test_two_judges_agree_to_the_last_bit(judge, train, held_out):
    again = DigitsJudge.from_dataset(train, held_out)
    digits = balanced(train, 40)
    assert again.judge(digits.images, digits.labels) == judge.judge(digits.images, digits.labels)


def test_values_beyond_the_range_are_judged_as_they_are_saved(judge, held_out):
    strong = held_out.images * 1.5
    scores = judge.judge(strong, held_out.labels)
    assert scores == judge.judge(strong.clip(-1, 1), held_out.labels)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda images, labels: (images * np.nan, labels), "20 of 20 images have values that are not finite"),
        (lambda images, labels: (images[:, :, :4], labels), "do not fit"),
        (lambda images, labels: (images, labels[:-1]), "do not fit"),
        (lambda images, labels: (images[:0], labels[:0]), "no images"),
        (lambda images, labels: (images, labels + 5), "labels .* are not among the training labels"),
        (lambda images, labels: (images[:11], np.arange(11) % 10), "fewer than two images"),
    ],
)
def test_images_that_cannot_be_judged_are_refused(judge, spoil, message):
    images, labels = spoil(np.zeros((20, 1, 8, 8)), np.arange(20) % 10)
    with pytest.raises(ValueError, match=message):
        judge.judge(images, labels)
