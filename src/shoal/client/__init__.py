"""The Python API: functions called on a pool's workers."""
