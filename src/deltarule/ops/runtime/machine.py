"""Which GPU, driver and versions run the kernels, and the files that are kept about them."""

import json
import os
import re
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deltarule.ops.dispatch import constant_when_compiled

NO_GPU = "no GPU (Triton's interpreter)"


def cache_folder() -> Path:
    """The user's folder for what deltarule finds out about a machine.

    It comes from the user's account alone: an environment variable must not choose the table that
    the kernels read, and with it the last bits of a result.
    """
    home = Path.home()
    if os.name == "posix":
        import pwd

        # What the system has on record for this user.
        with suppress(KeyError):
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    folders = {"win32": "AppData/Local", "darwin": "Library/Caches"}
    return home / folders.get(sys.platform, ".cache") / "deltarule"


@cache
def identity() -> dict[str, str]:
    """GPU, driver, Triton and package version: what a finding holds for."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU
    own = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
    versions = {"triton": triton_version(), "deltarule": own}
    return {"gpu": gpu, "driver": driver_version(), **versions}


def driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    if found:
        return found[1]
    if not torch.cuda.is_available():
        return "none"
    # What the driver supports at most, where it does not say its own number.
    return f"CUDA {vars(torch._C)['_cuda_getDriverVersion']()}"


def triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def findings_file() -> Path:
    """The file of what `deltarule doctor` found on this machine."""
    name = "_".join(re.sub(r"[^\w.]+", "-", value).strip("-") for value in identity().values())
    return cache_folder() / "doctor" / f"{name}.json"


def load_findings() -> dict[str, Any]:
    """Findings by the name of a configuration; empty if there are none that can be read."""
    try:
        found = json.loads(findings_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("machine") != identity():
        return {}
    findings = found.get("doctor")
    return findings if isinstance(findings, dict) else {}


@cache
def failures() -> dict[str, str]:
    return {
        name: str(verdict.get("error"))
        for name, verdict in load_findings().items()
        if isinstance(verdict, dict) and not verdict.get("passed")
    }


@constant_when_compiled
def anything_failed() -> bool:
    return bool(failures())
