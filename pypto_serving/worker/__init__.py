"""L2: the process that owns a device. Started by `python -m pypto_serving.worker`."""
