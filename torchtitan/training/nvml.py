"""What NVIDIA's management library tells of a GPU; nothing where the package nvidia-ml-py, the driver or the GPU lacks it."""

import time
from collections.abc import Callable
from typing import Any

import torch


class ManagedDevice:
    """One GPU as its driver manages it.

    Attributes:
        found: whether the driver answers for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        uuid = torch.cuda.get_device_properties(device).uuid  # its number here may be another than the driver's
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:  # no driver that is managed, or a slice of a device
            self._handle = None

    @property
    def found(self) -> bool:
        return self._handle is not None

    def joules(self) -> float | None:
        """Energy since the driver was loaded."""
        value = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None if value is None else value / 1e3

    def watts(self) -> float | None:
        """Power at present."""
        value = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle))
        return None if value is None else value / 1e3

    def description(self) -> dict[str, Any]:
        """Driver, and clocks in MHz: at present and the highest."""
        questions = {
            "driver": lambda nvml, handle: _text(nvml.nvmlSystemGetDriverVersion()),
            "sm_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "sm_max_mhz": lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "memory_max_mhz": lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }
        answers = {name: self._ask(question) for name, question in questions.items()}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        if self._handle is None:
            return None
        try:
            return question(self._nvml, self._handle)
        except self._nvml.NVMLError:  # as of a device that does not count its energy
            return None


class EnergyMeter:
    """Energy that one GPU takes from the meter's start on: by its counter, or else by its power between two readings.

    Attributes:
        works: whether the device gives either.
    """

    def __init__(self, device: ManagedDevice, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            device: as its driver manages it.
            now: reads the time, in seconds.
        """
        self._device, self._now = device, now
        self._counted = device.joules()
        self._watts = device.watts() if self._counted is None else None
        self._read_at = now()
        self._joules = 0.0
        self.works = self._counted is not None or self._watts is not None

    def read(self) -> float:
        """Joules since the start; those of the last reading if the device does not answer now."""
        if self._counted is not None:
            if (counted := self._device.joules()) is not None:
                self._joules += max(counted - self._counted, 0.0)  # it begins anew when the driver is loaded again
                self._counted = counted
        elif self._watts is not None and (watts := self._device.watts()) is not None:
            now = self._now()
            self._joules += (watts + self._watts) / 2 * (now - self._read_at)
            self._watts, self._read_at = watts, now
        return self._joules


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
