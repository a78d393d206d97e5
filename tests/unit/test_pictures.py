import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from torchtitan.gns import pictures as gns_pictures
from torchtitan.gns.config import DRAWN
from torchtitan.gns.decayed import WINDOW_SHARES, DecayedSums
from torchtitan.gns.pool import Agreement, finest_known
from torchtitan.gns.statistics import PairSums
from torchtitan.gns.step_sums import PARTS, StepSums
from torchtitan.pictures import style
from torchtitan.pictures.grids import ACCENT, EMPTY, GAP, MARGIN, NOT_FINITE, image_grid, save_animation


def as_array(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def box_of(picture: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """First and last pixel + 1 of a colour that fills one solid rectangle: (left, top, right, bottom)."""
    y, x = np.nonzero((as_array(picture) == colour).all(axis=-1))
    box = x.min(), y.min(), x.max() + 1, y.max() + 1
    assert len(x) == (box[2] - box[0]) * (box[3] - box[1])
    return tuple(int(edge) for edge in box)


def plain_images(colours: list[tuple[int, int, int]], height: int = 8, width: int = 8) -> torch.Tensor:
    values = torch.tensor(colours, dtype=torch.float32) / 127.5 - 1
    return values[:, :, None, None].expand(-1, -1, height, width)


COLOURS = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (250, 250, 10), (250, 10, 250), (10, 250, 250)]


@pytest.mark.parametrize(
    ("height", "width", "cell"),
    [(8, 8, (64, 64)), (16, 8, (64, 128)), (28, 28, (84, 84)), (32, 32, (64, 64)), (80, 100, (100, 80))],
)
def test_images_lie_row_by_row_enlarged_by_a_whole_factor(height, width, cell):
    picture = image_grid(plain_images(COLOURS, height, width), rows=2, columns=3)
    for place, colour in enumerate(COLOURS):
        left = MARGIN + place % 3 * (cell[0] + GAP)
        top = MARGIN + place // 3 * (cell[1] + GAP)
        assert box_of(picture, colour) == (left, top, left + cell[0], top + cell[1])
    assert picture.size == (2 * MARGIN + 3 * cell[0] + 2 * GAP, 2 * MARGIN + 2 * cell[1] + GAP)


def test_every_pixel_is_enlarged_to_an_exact_block_of_its_value():
    values = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    picture = as_array(image_grid(values, 1, 1))[MARGIN : MARGIN + 64, MARGIN : MARGIN + 64]
    expected = np.round((values[0, 0].numpy().astype(np.float64) + 1) * 127.5).repeat(8, axis=0).repeat(8, axis=1)
    for channel in range(3):
        np.testing.assert_array_equal(picture[..., channel], expected)


def test_values_outside_the_range_are_clipped_not_wrapped():
    images = torch.tensor([-3.0, 3.0]).reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
    picture = as_array(image_grid(images, 1, 2))
    assert (picture[MARGIN, MARGIN] == 0).all() and (picture[MARGIN, MARGIN + 64 + GAP] == 255).all()


def test_places_without_an_image_and_damaged_pixels_are_shown_as_such():
    images = plain_images(COLOURS[:3]).clone()
    images[1, 2, 0:2, :] = float("nan")
    picture = image_grid(images, 2, 2)
    assert box_of(picture, EMPTY) == (MARGIN + 64 + GAP, MARGIN + 64 + GAP, MARGIN + 128 + GAP, MARGIN + 128 + GAP)
    assert box_of(picture, NOT_FINITE) == (MARGIN + 64 + GAP, MARGIN, MARGIN + 128 + GAP, MARGIN + 16)


def test_latents_are_stretched_over_the_grid_channel_by_channel():
    ramp = torch.linspace(0, 1, 1024).reshape(1, 1, 32, 32)
    latents = torch.cat([5 * ramp + 40, -0.01 * ramp, ramp.flip(3), 1e6 * ramp], dim=1)
    cell = as_array(image_grid(latents, 1, 1))[MARGIN:-MARGIN, MARGIN:-MARGIN].astype(int)
    assert cell[0, 0, 0] == 0 and cell[-1, -1, 0] == 255
    assert cell[0, 0, 1] == 255 and cell[-1, -1, 1] == 0
    np.testing.assert_allclose(cell[..., 0], 255 - cell[..., 1], atol=1)
    two_channels = as_array(image_grid(latents[:, :2], 1, 1))[MARGIN:-MARGIN, MARGIN:-MARGIN]
    np.testing.assert_array_equal(two_channels[..., 0], two_channels[..., 2])
    assert as_array(image_grid(torch.zeros(1, 4, 8, 8), 1, 1)).shape == (88, 88, 3)


def test_letters_with_accents_are_drawn_and_those_that_the_font_lacks_are_question_marks():
    def drawn(text: str, row: str = "") -> bytes:
        picture = image_grid(plain_images(COLOURS[:1]), 1, 1, [row or text], text, [text])
        return as_array(picture).tobytes()

    texts = ["Hünde süß", "Hönde söß", "Hunde sus", "Собака", "Кошка", "H?nde s?ß"]
    assert len(set(map(drawn, texts))) == len(texts)
    assert drawn("Hu\u0308nde su\u0308ß") == drawn("Hünde süß")
    assert drawn("犬\n\U0001f436") == drawn("? ?", "1: ? ?")


def save_plain(path, shade: int):
    Image.new("RGB", (200, 100), (shade, 0, 0)).save(path)
    return path


def shade_of(frame: Image.Image) -> int:
    return int(as_array(frame)[50, 100, 0])


def progress_of(frame: Image.Image) -> float:
    last_row = as_array(frame)[-1].astype(int)
    return float((np.abs(last_row - ACCENT).max(axis=-1) < 8).mean())


def test_animation_runs_in_the_order_of_steps_with_a_progress_bar(tmp_path):
    steps = [300, 0, 100, 200]
    frames = [(step, save_plain(tmp_path / f"{step}.png", 50 + step // 2)) for step in steps]
    assert save_animation(frames, tmp_path / "new" / "training.gif") == 4
    with Image.open(tmp_path / "new" / "training.gif") as animation:
        assert animation.n_frames == 4 and animation.info["loop"] == 0
        durations = []
        for position, step in enumerate(sorted(steps)):
            animation.seek(position)
            durations.append(animation.info["duration"])
            assert abs(shade_of(animation) - (50 + step // 2)) <= 2
            assert progress_of(animation) == pytest.approx(step / 300, abs=0.01)
    assert durations == [600, 600, 600, 3100]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["training.gif"]


def test_damaged_and_missing_pictures_are_named_and_left_out(tmp_path, caplog, monkeypatch):
    frames = [(step, save_plain(tmp_path / f"{step}.png", 50 + step)) for step in (1, 2, 3, 4)]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 200, 3), dtype=np.uint8))
    noise.save(frames[1][1])
    whole = frames[1][1].read_bytes()
    frames[1][1].write_bytes(whole[: len(whole) // 2])
    frames[2][1].write_bytes(b"")
    (tmp_path / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 200 100\n%%EndComments\nshowpage\n")
    frames += [(5, tmp_path / "missing.png"), (6, tmp_path / "script.png")]
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", lambda *arguments, **options: pytest.fail("a picture starts a program"))
        assert save_animation(frames, tmp_path / "training.gif") == 2
    for name in ("2.png", "3.png", "missing.png", "script.png"):
        assert any(name in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 4
    with Image.open(tmp_path / "training.gif") as animation:
        assert animation.n_frames == 2


def test_long_trainings_show_sixty_frames_with_the_first_and_the_last(tmp_path):
    frames = [(step, save_plain(tmp_path / f"{step}.png", step)) for step in range(200)]
    assert save_animation(frames, tmp_path / "training.gif") == 60
    with Image.open(tmp_path / "training.gif") as animation:
        assert animation.n_frames == 60
        assert shade_of(animation) <= 2
        animation.seek(59)
        assert abs(shade_of(animation) - 199) <= 2


def logged(step: int, values: list[float], upper: list[float | None]) -> dict:
    """Point as a run logs it: an infinite upper end is left out."""
    point: dict = {"step": step}
    for k, (value, end) in enumerate(zip(values, upper, strict=True)):
        prefix = f"gns/adam/composite/{k}"
        point |= {f"{prefix}/b_simple": value, f"{prefix}/lower": 0.5 * value}
        if end is not None:
            point[f"{prefix}/upper"] = end
    return point


def test_a_noise_scale_without_an_upper_end_is_coloured_and_drawn_as_none():
    points = [logged(step, [20.0, 9e9], [40.0, None if step < 3 else 1e10]) for step in (1, 2, 3)]
    figure = Figure()
    gns_pictures._draw_map(area := figure.subplots(), figure, points, "adam", [0.0, 0.5, 1.0], "over training")
    grey, coloured = (np.ma.filled(mesh.get_array(), np.nan) for mesh in area.collections)
    assert np.isfinite(coloured).tolist() == [[True] * 3, [False, False, True]]
    assert np.isfinite(grey).tolist() == [[False] * 3, [True, True, False]]
    assert figure.axes[1].get_ylabel() == "noise scale (composite) [samples]"  # the curve may be the sketch's


def test_the_noise_scale_has_panels_only_for_what_is_known(monkeypatch):
    monkeypatch.setattr(style, "as_image", lambda figure: figure)

    def drawn(steps: int, signal: float, points: list[dict], geometries=("plain",)) -> Figure:
        fine, agreement = with_agreement(steps, signal)
        found = [fine.estimate(), *agreement.estimates("plain", 0)]
        edges, masses, names = torch.linspace(0, 1, 9)[1:-1], torch.full((8,), 0.125), {"plain": "sketch", "adam": "sketch"}
        return gns_pictures.draw_noise_scale(points, edges, dict.fromkeys(geometries, found), 64, names, masses)

    points = [{"step": step, **{f"gns/plain/composite/0/{name}": 20.0 for name in DRAWN}} for step in (1, 2)]
    known, unknown = drawn(40, 4.0, points), drawn(40, 0.0, [])
    titles = [panel.get_title() for panel in known.axes if panel.get_title()]
    assert titles == [
        "8 noise levels: 8 with a value", "plain geometry, over training (grey: no upper end)",
        "plain geometry, agreement of bins",
    ]
    both = drawn(40, 0.0, [], ("adam", "plain"))
    for panel in (known.axes[0], *both.axes):
        (step,) = [patch for patch in panel.patches if hasattr(patch, "get_data")]  # the samples of a step: 64 in 8 bins
        assert step.get_data().values.tolist() == [8.0] * 8
    assert both.axes[1].get_title() == "plain geometry (sketch)"
    (only,) = unknown.axes
    assert "with only a lower end (arrows)" in only.get_title()


def measured_step(seed: int, signal: float) -> StepSums:
    """Step of 8 samples in each of 8 bins: gradients of 30 elements, of noise 30 and one common mean of square `signal`."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(8, 8, 30, generator=generator, dtype=torch.float64) + (signal / 30) ** 0.5
    count, sums = torch.full((8,), 8.0, dtype=torch.float64), gradients.sum(1)
    squares, products = torch.zeros(len(PARTS), 1, 8).double(), torch.zeros(len(PARTS), 1, 8, 8).double()
    squares[-1], products[-1] = gradients.square().sum((1, 2)), sums @ sums.T
    pairs = torch.outer(count, count) - count.diag()
    return StepSums(count, count, pairs, squares, products, pairs, products, torch.zeros_like(products))


def with_agreement(steps: int, signal: float) -> tuple[DecayedSums, Agreement]:
    bins, agreement = DecayedSums(8, 1e9, WINDOW_SHARES), Agreement(8, 1, half_life=1e9)
    for step in range(steps):
        sums = measured_step(step, signal)
        bins.add(PairSums(sums.count, sums.squares[-1, 0], sums.all_products[-1, 0], sums.pairs))
        agreement.add(sums)
    return bins, agreement


@pytest.mark.parametrize(("signal", "bins"), [(4.0, 8), (0.5, 4), (0.22, 2), (0.0, None)])
def test_agreement_is_that_of_the_finest_bins_in_which_it_is_known(signal, bins):
    """The cosines are 1, to their error."""
    fine, agreement = with_agreement(40, signal)
    values = finest_known([fine.estimate(), *agreement.estimates("plain", 0)])
    assert bins == (None if values is None else len(values))
    if values is not None:
        levels = [fine.estimate(), *agreement.estimates("plain", 0)]
        figure = Figure()
        gns_pictures._draw_agreement(panel := figure.subplots(), figure, levels, [k / 8 for k in range(9)], "agreement")
        assert (values[values.isfinite()] - 1.0).abs().max() < 1.0
        wanted = [f"{k / bins:.2f}" for k in range(bins)]
        assert [label.get_text() for label in panel.get_xticklabels()] == wanted


def test_agreement_goes_on_from_its_state():
    _, agreement = with_agreement(5, 1.0)
    resumed = Agreement(8, 1, half_life=1e9)
    resumed.load_state_dict(json.loads(json.dumps(agreement.state_dict())))
    assert resumed.state_dict() == agreement.state_dict()
    assert resumed.estimates("plain", 0)[0].samples.tolist() == agreement.estimates("plain", 0)[0].samples.tolist()
    assert agreement.estimates("plain", 0)[1].signal.isfinite().all()
