"""What tells others that there are NPUs, where the emulated devices are called so; torch has loaded them by itself."""

__version__ = "0"


def npu_fusion_attention(*_args, **_options):
    """Stand where transformers imports it from, though it calls it for its flash attention alone."""
    raise NotImplementedError("the emulated devices have no kernel for attention")
