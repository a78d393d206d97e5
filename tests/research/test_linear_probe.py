"""Linear probes: features against forwards by hand, classifiers against scikit-learn and torch, labels that stay away."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from research import linear_probe, probe_passes
from research.block_features import BlockFeatures, captured, conditions
from research.linear_classifiers import AdamClassifiers, choose_and_fit, fit_logistic
from research.probe_passes import Passes, chosen_images
from tests.objectives import timesteps
from torchtitan import philox
from torchtitan.conditions import Classes, Unconditional
from torchtitan.data.base import Dataset, UnreadableImage
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.experiments.folder import StudyError
from torchtitan.models.base import ProbePoint
from torchtitan.models.dit import FLAVORS, build
from torchtitan.models.edm2 import FAMILY as EDM2_FAMILY
from torchtitan.models.edm2 import EDM2Config, EDM2UNet
from torchtitan.models.layers import timestep_sinusoid

EDM = {"path": "edm", "prediction": "edm", "preconditioning": "edm", "timesteps": timesteps("lognormal_sigma")}
SMALL_UNET = EDM2Config(config="G", channels=8, channel_mults=[1, 2], num_blocks=1, attention_resolutions=[4], dropout=0.0)


def objective_of(**keys):
    return build_objective(DenoisingConfig(**keys), 0)


def transformer():
    torch.manual_seed(0)
    model = build(FLAVORS["debug"], (1, 8, 8), Classes(10))
    model.init_weights()
    for parameter in model.parameters():  # gates are 0 at the start, and blocks the identity
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def unet():
    torch.manual_seed(0)
    model = EDM2UNet(SMALL_UNET, (3, 8, 8), Unconditional())
    model.init_weights()
    nn.init.ones_(model.output_gain)
    return model.eval()


# ---------------------------------------------------------------------- probe points


@pytest.mark.parametrize(("flavor", "size", "ins", "outs", "out_4", "out_6", "side"), [
    ("cifar", 32, 11, 15, "level2_up", "level2_block1", 8), ("tiny_imagenet", 64, 19, 23, "level3_block3", "level2_up", 16),
])  # fmt: skip
def test_blocks_of_edm2_are_numbered_as_by_the_port(flavor, size, ins, outs, out_4, out_6, side):
    with torch.device("meta"):
        model = EDM2UNet(EDM2_FAMILY.flavors[flavor], (3, size, size), Unconditional())
        points = model.probe_points()
        names = [f"in_{k}" for k in range(1, ins + 1)] + ["middle_1", "middle_2"] + [f"out_{k}" for k in range(1, outs + 1)]
        assert list(points) == names
        assert points["out_4"].module == f"decoder.{out_4}" and points["out_6"].module == f"decoder.{out_6}"
        shapes = []
        model.get_submodule(points["out_6"].module).register_forward_hook(lambda *hook: shapes.append(hook[2].shape))
        model(torch.zeros(1, 3, size, size), torch.zeros(1))
    assert shapes == [(1, 256, side, side)]


def test_features_are_means_over_places_of_outputs_computed_by_hand():
    model, objective = transformer(), objective_of()
    images, numbers = philox.normal(1, "noise", torch.arange(3), (1, 8, 8)), torch.tensor([4, 7, 1 << 41])
    times = [0.0, 0.25]
    found = BlockFeatures(model, objective, ["block_3", "block_1"], times, seed=5).read(images, numbers, attempt=2)
    noise = philox.normal(5, "probe", numbers, (1, 8, 8), 2)
    for t, of_level in zip(times, found, strict=True):
        x_t = (1 - t) * images + t * noise
        patches = x_t.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, 16, 4)
        x, wanted = model.patch_embed(patches), {}
        c = F.silu(model.time_embed(timestep_sinusoid(torch.full((3,), 1000 * t), 256)) + model.label_embed.weight[10])
        for number, block in enumerate(model.layers, 1):
            x = block(x, c, model.rotary)
            wanted[f"block_{number}"] = x.mean(1)
        assert list(of_level) == ["block_3", "block_1"]
        for name, features in of_level.items():
            torch.testing.assert_close(features, wanted[name], rtol=1e-5, atol=1e-5)


def test_features_of_a_unet_are_those_of_its_maps_and_the_last_gives_the_output():
    model, objective = unet(), objective_of(**EDM)
    images, numbers = philox.normal(1, "noise", torch.arange(2), (3, 8, 8)), torch.arange(2)
    names = list(model.probe_points())
    found, = BlockFeatures(model, objective, names, [0.2]).read(images, numbers)
    sigma = 0.25
    x_t = images + sigma * philox.normal(0, "probe", numbers, (3, 8, 8))
    x = x_t / (sigma**2 + 0.25) ** 0.5
    maps = {}
    embedded = model.embedding(torch.full((2,), np.log(sigma) / 4, dtype=torch.float32), None)
    x = model.input(torch.cat((x, torch.ones(2, 1, 8, 8)), 1))
    skips = [x]
    for number, block in enumerate(model.encoder.values(), 1):
        x = maps[f"in_{number}"] = block(x, embedded, None)
        skips.append(x)
    ups = 0
    for name, block in model.decoder.items():
        x = block(x, embedded, None, skips.pop() if "block" in name else None)
        ups += not name.startswith("middle")
        maps[f"out_{ups}" if ups else f"middle_{int(name[-1]) + 1}"] = x
    assert list(maps) == names
    for name in names:
        torch.testing.assert_close(found[name], maps[name].mean((2, 3)), rtol=1e-4, atol=1e-5)


def test_noise_is_one_per_image_and_pass_whatever_the_batch():
    reader = BlockFeatures(unet(), objective_of(**EDM), ["out_2"], [0.3], seed=3)
    images = torch.zeros(4, 3, 8, 8)
    whole = reader.read(images, torch.arange(4))[0]["out_2"]
    single = reader.read(images[:1], torch.tensor([2]))[0]["out_2"]
    torch.testing.assert_close(whole[2], single[0], rtol=1e-4, atol=1e-5)
    again = reader.read(images[:1], torch.tensor([2]), attempt=1)[0]["out_2"]
    assert (again - single).abs().max() > 1e-3 and (whole[1] - whole[2]).abs().max() > 1e-3


def test_hooks_are_gone_after_a_forward_and_after_a_failure():
    model = transformer()
    points = model.probe_points()
    with captured(model, points) as found:
        model(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.tensor([10]))
    assert list(found) == list(points)
    with pytest.raises(ValueError, match="runs more than once"), captured(model, points):
        for _ in range(2):
            model(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.tensor([10]))
    assert not any(module._forward_hooks for module in model.modules())


# ---------------------------------------------------------------------- labels


class Spied(nn.Module):
    """The network, with all that it is given on record."""

    def __init__(self, model):
        super().__init__()
        self.model, self.given, self.condition_kind = model, [], model.condition_kind

    def probe_points(self):
        return {name: ProbePoint(f"model.{point.module}", 2) for name, point in self.model.probe_points().items()}

    def forward(self, x, t, condition):
        self.given.append((x, t, condition))
        return self.model(x, t, condition)


class Pictures(Dataset):
    """Noise with classes, some of which cannot be read."""

    def __init__(self, labels, unreadable=()):
        self.labels, self.unreadable, self.fetched = torch.as_tensor(labels), set(unreadable), []
        self.images = philox.normal(7, "noise", torch.arange(len(labels)), (1, 8, 8))

    def __len__(self):
        return len(self.labels)

    def fetch(self, indices):
        if bad := sorted(self.unreadable.intersection(indices.tolist())):
            raise UnreadableImage(bad[0], "x.png", "no image")
        self.fetched += indices.tolist()
        chosen = torch.from_numpy(indices)
        return {"images": self.images[chosen], "class": self.labels[chosen]}


def passes_of(folder, reader, train, test, num_passes=1):
    def source(images, numbers, attempt):
        return reader.read(images, numbers, attempt)[0]

    images = (chosen_images(dataset, None, 0, test=dataset is test) for dataset in (train, test))
    return Passes(source, *images, 10, num_passes, 16, 0, torch.device("cpu"), folder, "features")


@pytest.mark.parametrize("conditioning", ["null", "uniform"])
@pytest.mark.parametrize("probe", ["logistic", "port"])
def test_the_label_never_reaches_the_network(tmp_path, conditioning, probe):
    """Other labels for the same images change nothing that the network is given."""
    given = []
    for shift in (0, 3):
        labels = (torch.arange(50) + shift) % 10
        model = Spied(transformer())
        reader = BlockFeatures(model, objective_of(), ["block_2"], [0.1], conditioning=conditioning)
        passes = passes_of(tmp_path / str(shift), reader, Pictures(labels), Pictures(labels[:20]))
        passes.logistic("block_2") if probe == "logistic" else passes.port("block_2", True)
        given.append([torch.cat(values) for values in zip(*model.given, strict=True)])
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))
    classes = given[0][2]
    assert (classes == 10).all() if conditioning == "null" else set(classes.tolist()) == set(range(10))


def test_conditions_without_classes_are_none_and_drawn_ones_are_uniform():
    assert conditions(Unconditional(), "null", torch.arange(3), 0) is None
    counts = conditions(Classes(5), "uniform", torch.arange(10_000), 0).bincount()
    assert len(counts) == 5 and ((counts - 2000).abs() < 4 * (10_000 * 0.2 * 0.8) ** 0.5).all()


# ---------------------------------------------------------------------- passes


@pytest.mark.parametrize("probe", ["logistic", "port"])
def test_each_test_image_counts_once_and_unreadable_ones_not_at_all(tmp_path, monkeypatch, probe):
    monkeypatch.setattr(probe_passes, "IMAGES_PER_PART", 24)  # the last part is smaller, and its last batch
    train, test = Pictures(np.arange(60) % 10), Pictures(np.arange(37) % 10, unreadable=[5, 36])
    reader = BlockFeatures(transformer(), objective_of(), ["block_1"], [0.1])
    passes = passes_of(tmp_path, reader, train, test)
    counts = (passes.logistic("block_1") if probe == "logistic" else passes.port("block_1", False))[1]
    assert counts["tested"] == 35 and counts["left_out"] == 2
    assert sorted(test.fetched) == sorted(set(range(37)) - {5, 36})


def test_a_choice_of_images_has_each_once():
    chosen = chosen_images(Pictures(np.zeros(100, int)), 30, 4)
    assert len(set(chosen.positions.tolist())) == 30 and (np.diff(chosen.positions) > 0).all()
    assert chosen.positions.tolist() != list(range(30))
    assert not set(chosen.numbers(chosen.positions).tolist()) & set(
        chosen_images(chosen.dataset, None, 4, test=True).numbers(np.arange(100)).tolist())  # fmt: skip


def test_adam_resumed_after_an_epoch_is_the_same_bit_for_bit(tmp_path, monkeypatch):
    train, test = Pictures(np.arange(60) % 10), Pictures(np.arange(30) % 10)
    reader = BlockFeatures(transformer(), objective_of(), ["block_1", "block_3"], [0.1])
    wanted = passes_of(tmp_path / "whole", reader, train, test, 3).port("block_3", True)

    class Killed(Exception):
        pass

    real = AdamClassifiers.train

    def killed(self, features, labels, epoch):
        if epoch == 2:
            raise Killed
        real(self, features, labels, epoch)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(AdamClassifiers, "train", killed)
        passes_of(tmp_path / "killed", reader, train, test, 3).port("block_3", True)
    train.fetched.clear()
    found = passes_of(tmp_path / "killed", reader, train, test, 3).port("block_3", True)
    assert torch.equal(found[0].weight, wanted[0].weight) and torch.equal(found[0].bias, wanted[0].bias)
    assert found[1] == wanted[1] and len(train.fetched) == 16 + 60  # a batch that shows the sizes, and one epoch


# ---------------------------------------------------------------------- classifiers


def clusters(count, dim=6, classes=4, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    features = generator.normal(size=(classes, dim))[labels] + generator.normal(size=(count, dim))
    return torch.from_numpy(features), torch.from_numpy(labels)


@pytest.mark.parametrize("penalty", [1e-1, 1e-3])
def test_logistic_regression_is_that_of_scikit_learn(penalty):
    from sklearn.linear_model import LogisticRegression

    features, labels = clusters(300)
    wanted = LogisticRegression(C=1 / (300 * penalty), tol=1e-10, max_iter=10_000).fit(features.numpy(), labels.numpy())
    found = fit_logistic(features, labels, 4, penalty)
    np.testing.assert_allclose(found.weight.numpy(), wanted.coef_, atol=2e-3)
    centred = found.bias - found.bias.mean()  # a common constant has no effect
    np.testing.assert_allclose(centred.numpy(), wanted.intercept_ - wanted.intercept_.mean(), atol=2e-3)


def test_the_penalty_is_chosen_on_held_out_images_and_scales_do_not_matter():
    features, labels = clusters(400, dim=30)
    features[:, 8:] = torch.from_numpy(np.random.default_rng(1).normal(size=(400, 22)))  # which mean nothing
    held_out = torch.arange(400) % 5 == 4
    found = choose_and_fit(features[:60], labels[:60], 4, held_out[:60])
    assert found.penalty >= 1e-2  # few images, many features: a weak one fits noise
    assert choose_and_fit(features[:, :6], labels, 4, held_out).penalty <= 1e-2
    scaled = features * torch.logspace(-3, 3, 30, dtype=torch.float64) + 5.0
    scaled[:, 3] = 7.0  # does not vary
    plain = features.clone()
    plain[:, 3] = 0.0
    one, other = (choose_and_fit(each, labels, 4, held_out) for each in (plain, scaled))
    assert one.penalty == other.penalty and torch.equal(one.predict(plain), other.predict(scaled))


def test_classifiers_by_adam_are_torchs_linears_side_by_side():
    dims = {"a": 5, "b": 3}
    ours = AdamClassifiers(dims, 4, learning_rate=1e-2, epochs=3, seed=0, device=torch.device("cpu"))
    theirs = {name: nn.Linear(dim, 4) for name, dim in dims.items()}
    for name, classifier in ours.classifiers().items():
        assert classifier.weight.abs().max() <= dims[name] ** -0.5 and classifier.weight.std() > 0.3 * dims[name] ** -0.5
        theirs[name].load_state_dict({"weight": classifier.weight.clone(), "bias": classifier.bias.clone()})
    features, labels = clusters(64, dim=5)
    optimizers = {name: torch.optim.Adam(layer.parameters(), lr=1e-2) for name, layer in theirs.items()}
    schedules = {name: torch.optim.lr_scheduler.CosineAnnealingLR(each, 3) for name, each in optimizers.items()}
    for epoch in range(3):
        for rows in torch.arange(64).split(24):  # the last batch is smaller
            batch = {name: features[rows, :dim].float() for name, dim in dims.items()}
            ours.train(batch, labels[rows], epoch)
            for name, layer in theirs.items():
                optimizers[name].zero_grad()
                F.cross_entropy(layer(batch[name]), labels[rows]).backward()
                optimizers[name].step()
        for schedule in schedules.values():
            schedule.step()
    for name, classifier in ours.classifiers().items():
        torch.testing.assert_close(classifier.weight, theirs[name].weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(classifier.bias, theirs[name].bias, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- noise levels


def levels_of(path="edm", **options):
    given = dict.fromkeys(("levels", "sigmas", "times", "indices")) | options
    run = SimpleNamespace(kept={}, options=SimpleNamespace(**given))
    run.kept["untrained"] = SimpleNamespace(objective=objective_of(path=path, prediction="noise", timesteps=timesteps("uniform")))
    return linear_probe.noise_levels(run)


def test_levels_are_indices_of_the_ports_reversed_schedule():
    assert [level.sigma for level in levels_of()] == pytest.approx([0.0229345, 0.0599473, 0.1395165], rel=1e-5)
    assert [level.sigma for level in levels_of(levels=[18, 0, 1])] == pytest.approx([0, 0.002, 80])
    first, second = levels_of("rectified_flow", times=[0.2], sigmas=[4.0])
    assert first.sigma == pytest.approx(0.25) and second.t == pytest.approx(0.8)
    assert first.log_snr == pytest.approx(2 * np.log(4)) and levels_of(levels=[0])[0].log_snr == np.inf


def test_levels_of_a_ddpm_are_its_nearest_indices_each_once():
    path = objective_of(path="ddpm_linear", prediction="noise", timesteps=timesteps("uniform")).path
    found = levels_of("ddpm_linear", indices=[250, 3], sigmas=[1e-9])
    wanted = path.index_to_t(torch.tensor([0, 3, 250])).tolist()
    assert [level.t for level in found] == pytest.approx(wanted, rel=1e-12)
    assert len(levels_of("ddpm_linear", indices=[250, 250.3])) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"levels": [19]}, "--levels: 19 is not in 0..18"), ({"sigmas": [-0.1]}, "--sigmas: -0.1 is not"),
    ({"sigmas": [float("nan")]}, "--sigmas: nan is not"), ({"times": [1.0]}, r"--times: 1 is not in \[0, 1\)"),
    ({"indices": [5]}, "--indices: the run's path has none"),
])  # fmt: skip
def test_levels_that_the_run_has_not_are_refused(options, message):
    with pytest.raises(StudyError, match=message):
        levels_of(**options)
