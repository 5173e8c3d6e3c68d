"""L2: the process that owns a device, started by `python -m pypto_serving.worker`."""
