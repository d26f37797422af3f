"""Shows other libraries that NPUs are present, while emulated devices use that name. torch has loaded the devices."""

__version__ = "0"


def npu_fusion_attention(*_args, **_options):
    """Exists because transformers imports it. transformers calls it only for flash attention."""
    raise NotImplementedError("the emulated devices have no kernel for attention")
