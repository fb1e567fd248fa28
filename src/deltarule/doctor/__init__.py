"""`deltarule doctor`: are the shipped kernels right on this GPU?"""

from deltarule.doctor.command import DoctorRun, diagnose

__all__ = ["DoctorRun", "diagnose"]
