"""Energy and clocks as NVIDIA's management library tells them, by a stand-in for it; and the description of hardware."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from torchtitan.training.hardware_description import cpu_name, describe_hardware
from torchtitan.training.nvml import EnergyMeter, ManagedDevice

CUDA = torch.device("cuda", 1)


class FakeDriver(ModuleType):
    """pynvml with one GPU; a question without an answer raises as an unsupported one does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.answers, self.initialised = answers, False

    def nvmlInit(self):
        if "init" in self.answers:
            raise self.NVMLError
        self.initialised = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.initialised
        if uuid != "GPU-abc-1":
            raise self.NVMLError
        return "the handle"

    def _answer(self, name, handle="the handle"):
        assert handle == "the handle"
        if name not in self.answers:
            raise self.NVMLError
        return self.answers[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer("millijoules", handle)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("milliwatts", handle)

    def nvmlSystemGetDriverVersion(self):
        return self._answer("driver")

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return self._answer(f"clock{kind}", handle)

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return self._answer(f"max{kind}", handle)


@pytest.fixture
def driver(monkeypatch):
    def install(uuid="abc-1", **answers):
        found = FakeDriver(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        properties = SimpleNamespace(uuid=uuid, total_memory=80 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return found

    return install


def test_energy_is_the_growth_of_the_counter(driver):
    nvml = driver(millijoules=5_000_000, milliwatts=1)
    meter = EnergyMeter(ManagedDevice(CUDA))
    assert meter.works and meter.read() == 0.0
    nvml.answers["millijoules"] = 5_250_500
    assert meter.read() == 250.5
    del nvml.answers["millijoules"]
    assert meter.read() == 250.5  # the device does not answer for once
    nvml.answers["millijoules"] = 5_300_000
    assert meter.read() == 300.0
    nvml.answers["millijoules"] = 1_000  # the driver was loaded again
    assert meter.read() == 300.0
    nvml.answers["millijoules"] = 2_000
    assert meter.read() == 301.0


def test_without_a_counter_power_is_integrated(driver):
    nvml, seconds = driver(milliwatts=100_000), [10.0]
    meter = EnergyMeter(ManagedDevice(CUDA), now=lambda: seconds[0])
    assert meter.works
    nvml.answers["milliwatts"], seconds[0] = 300_000, 14.0
    assert meter.read() == pytest.approx(4 * 200)
    del nvml.answers["milliwatts"]
    seconds[0] = 15.0
    assert meter.read() == pytest.approx(800)
    nvml.answers["milliwatts"], seconds[0] = 500_000, 16.0
    assert meter.read() == pytest.approx(800 + 2 * 400)


@pytest.mark.parametrize("case", ["no package", "no driver", "a slice of a device", "no counter, no power"])
def test_what_is_not_told_has_no_key_and_no_warning(case, driver, monkeypatch):
    answers = {} if case == "no counter, no power" else {"millijoules": 1, "milliwatts": 1, "driver": "1"}
    driver("other" if case == "a slice of a device" else "abc-1", **answers, **({"init": 1} if case == "no driver" else {}))
    if case == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device = ManagedDevice(CUDA)
        assert not EnergyMeter(device).works and device.description() == {}
    assert device.found == (case == "no counter, no power")


def test_a_run_on_the_cpu_asks_no_driver(driver):
    nvml = driver(millijoules=1)
    assert not EnergyMeter(ManagedDevice(torch.device("cpu"))).works and not nvml.initialised


def test_the_driver_and_the_clocks_are_described(driver):
    driver(driver=b"570.1", clock1=1200, max1=1980, clock2=2600, max2=2619)
    wanted = {"driver": "570.1", "sm_mhz": 1200, "sm_max_mhz": 1980, "memory_mhz": 2600, "memory_max_mhz": 2619}
    assert ManagedDevice(CUDA).description() == wanted
    driver(driver="570.1", max1=1980)
    assert ManagedDevice(CUDA).description() == {"driver": "570.1", "sm_max_mhz": 1980}


def test_hardware_is_described_on_either_device(driver, monkeypatch):
    found = describe_hardware(torch.device("cpu"), 2)
    assert found["num_devices"] == 2 and found["threads"] == torch.get_num_threads() and found["cpu"]
    assert found["torch"] == torch.__version__ and found["memory_gib"] > 0.1 and "cuda" not in found
    driver()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    found = describe_hardware(CUDA, 8)
    assert found["device"] == "NVIDIA H100" and found["memory_gib"] == 80 and found["num_devices"] == 8 and "cuda" in found


def test_the_cpu_is_named_by_its_maker(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Fine CPU @ 3 GHz\nflags : a b\n")
    assert cpu_name(tmp_path / "cpuinfo") == "A Fine CPU @ 3 GHz"
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    assert cpu_name(tmp_path / "cpuinfo") == cpu_name(tmp_path / "missing") != ""
