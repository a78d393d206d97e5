"""Plugins: a user's files train, resume, sample and export; a run's record is never executed; broken ones are one line."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.forked import ROOT, run_script

EXAMPLES = ROOT / "examples"
SMALL = (
    "--config", "digits", "--training.steps", "2", "--training.global_batch_size", "8", "--lr_scheduler.warmup_steps", "0",
    "--gns.num_bins", "2", "--gns.interval", "1", "--gns.log_interval", "2", "--validation.num_images", "8",
    "--metrics.log_freq", "1", "--sampling.num_steps", "2", "--sampling.images_per_class", "1", "--sampling.classes", "[0]",
)  # fmt: skip
NO_JUDGE = ("--evaluation.enable", "false")
OF_EXAMPLE = {
    "patch_mlp": ("--model.name", "patch_mlp", "--model.flavor", "small", *NO_JUDGE),
    "discs": ("--data.name", "discs", "--data.image_size", "8", "--data.num_workers", "1", *NO_JUDGE),
    "pseudo_huber": ("--objective.name", "pseudo_huber", "--objective.delta", "0.2", *NO_JUDGE),
    "mean_shift": ("--evaluation.metrics", "mean_shift,memorisation", "--evaluation.count", "16"),
}


def train(folder: Path, plugin: Path | str, *words: str):
    return run_script(str(ROOT / "train.py"), *SMALL, "--job.plugins", str(plugin), *words, folder=folder)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """Folder with the run outputs/mlp of a copy of the example's network, mlp_of_mine.py."""
    folder = tmp_path_factory.mktemp("mlp")
    shutil.copy(EXAMPLES / "patch_mlp.py", folder / "mlp_of_mine.py")
    found = train(folder, "mlp_of_mine.py", *OF_EXAMPLE["patch_mlp"], "--job.name", "mlp")
    assert found.returncode == 0, found.stdout + found.stderr
    return folder


@pytest.mark.parametrize("name", [name for name in OF_EXAMPLE if name != "patch_mlp"])
def test_example_trains(tmp_path, name):
    found = train(tmp_path, EXAMPLES / f"{name}.py", *OF_EXAMPLE[name], "--job.name", name)
    assert found.returncode == 0, found.stdout + found.stderr
    points = [json.loads(line) for line in (tmp_path / f"outputs/{name}/metrics.jsonl").read_text().splitlines()]
    logged = {"pseudo_huber": "linear_share/0", "mean_shift": "evaluation_metrics/mean_shift"}.get(name, "grad_norm")
    assert any(tag.startswith(logged) for point in points for tag in point), sorted(points[-1])


def test_example_loop_of_a_notebook_runs(tmp_path):
    text = (EXAMPLES / "notebook.py").read_text().replace("50", "2").replace('warmup_steps": 5', 'warmup_steps": 0')
    text = text.replace('"sampling.interval"', '"sampling.num_steps": 2, "sampling.interval"')
    (tmp_path / "notebook.py").write_text(text)
    found = run_script(str(tmp_path / "notebook.py"), folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "4 images of (8, 8)" in found.stdout and "{1: " in found.stdout


def test_examples_are_short():
    assert {path.name: lines for path in EXAMPLES.glob("*.py") if (lines := path.read_text().count("\n")) > 80} == {}


@pytest.mark.parametrize("command", [
    ("scripts/sample.py", "outputs/mlp", "--num-steps", "2"),
    ("scripts/checkpoint.py", "export", "outputs/mlp", "--format", "safetensors", "--output", "out.safetensors"),
    ("train.py", "--config", "outputs/mlp/config.toml", "--check-only"),
], ids=["sample", "export", "train"])
def test_code_that_a_run_names_is_executed_only_where_the_user_names_it(mlp, tmp_path, command):
    script, *words = command
    elsewhere = tmp_path / "foreign"
    shutil.copytree(mlp, elsewhere)
    stolen = elsewhere / "mlp_of_mine.py"  # the relative path of the record leads to it
    stolen.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n{stolen.read_text()}")
    record = elsewhere / "outputs/mlp/config.toml"
    for text in (record.read_text(), record.read_text().partition("\n")[2]):  # with and without the record's first line
        record.write_text(text)
        refused = run_script(str(ROOT / script), *words, folder=elsewhere)
        assert refused.returncode == 2
        assert "add --job.plugins mlp_of_mine.py" in refused.stderr and refused.stderr.count("\n") == 1
        assert not (tmp_path / "executed").exists()
    done = run_script(str(ROOT / script), *words, "--job.plugins", "mlp_of_mine.py", folder=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "executed").exists()


def test_weights_of_a_plugins_network_name_the_remedy(mlp):
    words = ("export", "outputs/mlp", "--format", "safetensors", "--output", "weights.safetensors")
    plugin = ("--job.plugins", "mlp_of_mine.py")
    assert run_script(str(ROOT / "scripts/checkpoint.py"), *words, *plugin, folder=mlp).returncode == 0
    refused = run_script(str(ROOT / "scripts/sample.py"), "weights.safetensors", folder=mlp)
    assert refused.returncode == 2 and "name its file in job.plugins" in refused.stderr
    drawn = ("weights.safetensors", "--num-steps", "2", *plugin)
    assert run_script(str(ROOT / "scripts/sample.py"), *drawn, folder=mlp).returncode == 0


def test_a_resume_says_that_the_plugin_is_another_file(mlp):
    (mlp / "elsewhere").mkdir()
    changed = mlp / "elsewhere/mlp_of_mine.py"
    changed.write_text((EXAMPLES / "patch_mlp.py").read_text() + "\n# changed\n")
    words = (*OF_EXAMPLE["patch_mlp"], "--job.name", "mlp", "--training.steps", "3")
    found = train(mlp, "elsewhere/mlp_of_mine.py", *words)
    assert found.returncode == 0, found.stderr
    assert "plugin elsewhere/mlp_of_mine.py: is another file than the checkpoint's" in found.stderr
    assert "resumed after step 2" in found.stderr
    summary = json.loads((mlp / "outputs/mlp/summary.json").read_text())
    assert list(summary["plugins"]) == ["elsewhere/mlp_of_mine.py"] and len(summary["plugins"]["elsewhere/mlp_of_mine.py"]) == 64


def test_help_lists_keys_of_a_plugin(mlp):
    found = run_script(str(ROOT / "train.py"), "--help", "model.patch_mlp", "--job.plugins", "mlp_of_mine.py", folder=mlp)
    assert found.returncode == 0 and "--model.num_layers" in found.stdout


@pytest.mark.parametrize(("name", "text", "said"), [
    ("missing.py", None, "missing.py: no such file"),
    ("broken.py", "import math\nmath.nothing", "broken.py, line 2: AttributeError"),
    ("syntax.py", "x = 1\ndef f(:", "syntax.py, line 2: SyntaxError: invalid syntax"),
    ("json.py", "", "another module is called json here (rename the file)"),
    (
        "other.py", "from torchtitan.diffusion.weightings import WEIGHTINGS\nclass Half: ...\nWEIGHTINGS['half'] = Half",
        "other.py, line 3: TypeError: the entry 'half' has to be a class that inherits WeightingConfig",
    ),
    (
        "half.py",
        "from torchtitan.diffusion.objectives import OBJECTIVES, Objective\nclass No(Objective): ...\nOBJECTIVES['no'] = No",
        "half.py, line 3: TypeError: No lacks Config, loss",
    ),
    (
        "table.py", "from torchtitan.models import MODELS\nMODELS['half'] = {}",
        "table.py, line 2: TypeError: the entry 'half' has to be a ModelFamily",
    ),
    ("two-words.py", "", "is no name of a Python module"),
    ("nobody", None, "no installed package has a plugin of this name"),
])  # fmt: skip
def test_a_plugin_that_cannot_be_loaded_is_one_line(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    found = train(tmp_path, name, "--check-only")
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert f"command line: --job.plugins: {name}" in found.stderr and said in found.stderr
    assert not (tmp_path / "outputs").exists()


LION = """
import torch
from torchtitan.training.config import UPDATE_RULES, UpdateRule
class Lion(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"m": torch.zeros_like(p), "n": 1}
                p.data.add_(p.grad.sign(), alpha=-group["lr"])
UPDATE_RULES["lion"] = UpdateRule(1, build=lambda groups, config: Lion(groups, {"lr": config.lr}))
"""


@pytest.mark.parametrize(("words", "text", "said"), [
    (OF_EXAMPLE["patch_mlp"], (r"(?m)^( +)super\(\).__init__\(\)$", r"\g<0>\n\1self.register_buffer('freqs', torch.arange(4.0))"),
     "PatchMLP: init_weights leaves freqs without values"),
    (OF_EXAMPLE["patch_mlp"], (r"def init_buffers", "def no_buffers"), "PatchMLP lacks init_buffers"),
    (OF_EXAMPLE["patch_mlp"], (r"return (x\.to\(torch\..*)", r"return \1, None"), "patch_mlp: forward returns tuple, not"),
    (OF_EXAMPLE["discs"], ("return self.length", "return 0"), "discs: has no images"),
    (("--optimizer.name", "lion", *NO_JUDGE), LION, "the optimizer keeps state 'n', and checkpoints hold its state's tensors"),
])  # fmt: skip
def test_a_plugin_that_would_train_or_resume_on_what_is_not_kept_is_refused(tmp_path, words, text, said):
    if not isinstance(text, str):
        (name,) = [name for name, given in OF_EXAMPLE.items() if given is words]
        text, count = re.subn(*text, (EXAMPLES / f"{name}.py").read_text())
        assert count
    (tmp_path / "mine.py").write_text(text)
    found = train(tmp_path, "mine.py", *words)
    assert found.returncode in (1, 2) and said in found.stderr and "Traceback" not in found.stderr, found.stderr


def test_an_objective_that_returns_another_type_is_one_line(tmp_path):
    text = (EXAMPLES / "pseudo_huber.py").read_text()
    (tmp_path / "half.py").write_text(re.sub(r"return LossTerms\((\w+), .*", r"return \1", text))
    found = train(tmp_path, "half.py", "--objective.name", "pseudo_huber")
    assert found.returncode == 1 and "objective pseudo_huber: loss() returns Tensor (return LossTerms)" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_density_of_the_guide_trains_and_without_a_method_is_one_line(tmp_path):
    guide = (EXAMPLES.parent / "CONTRIBUTING.md").read_text()
    (block,) = [each for each in re.findall(r"^   ```python\n(.*?)^   ```$", guide, re.M | re.S) if "DENSITIES[" in each]
    text = textwrap.dedent(block)
    (tmp_path / "power.py").write_text(text)
    words = ("--objective.timesteps.name", "power", "--objective.timesteps.a", "3")
    found = train(tmp_path, "power.py", *words, "--objective.spread", "stratified")
    assert found.returncode == 0, found.stdout + found.stderr
    namespace: dict = {}
    exec(text, namespace)
    density, u = namespace["Power"](3.0), torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    at = torch.logit(density.quantile(u)).requires_grad_()
    (slope,) = torch.autograd.grad(density.distribution(at).sum(), at)
    assert torch.allclose(density.distribution(at), u) and torch.allclose(density.log_sigma_density(at), slope)
    for old, new, said in (
        ("def log_sigma_density", "def density", "Power has no method log_sigma_density (see SmoothDensity)"),
        ("return self.a *", "return", "log_sigma_density times the slope of logit(quantile(u)) 0.333 instead of 1"),
        ("** self.a", "** 2", "Power: distribution(logit(quantile(0.462))) is 0.597"),
    ):
        (tmp_path / "power.py").write_text(text.replace(old, new))
        found = train(tmp_path, "power.py", *words, "--check-only")
        assert found.returncode == 2 and found.stderr.count("\n") == 1 and said in found.stderr, found.stderr


def test_a_package_names_its_plugin_by_an_entry_point(tmp_path):
    (tmp_path / "rule_of_a_package.py").write_text(
        "from torchtitan.training.config import UPDATE_RULES, UpdateRule\nUPDATE_RULES['Nothing'] = UpdateRule(0)\n"
    )
    record = tmp_path / "packaged-1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.2\n")
    (record / "entry_points.txt").write_text("[torchtitan_dit.plugins]\nrules = rule_of_a_package\n")
    code = (
        "from torchtitan_dit import configure, load_plugins; from torchtitan.settings.plugins import loaded_plugins\n"
        "c = configure('digits', {'job.plugins': ['rules'], 'optimizer.name': 'Nothing', 'gns.enable': False})\n"
        "assert c.optimizer.rule.averages == 0 and loaded_plugins() == {'rules': '1.2'}"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
