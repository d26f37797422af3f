"""A DataLoader whose samples are decoded on the CPU. Run: autosplit loader examples/loader.py."""

import zlib

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Compressed(Dataset[torch.Tensor]):
    """Compressed images that are decoded one by one, like image files."""

    def __init__(self, samples: int, pixels: int = 256) -> None:
        image = torch.arange(3 * pixels * pixels, dtype=torch.uint8).numpy().tobytes()
        self.images = [zlib.compress(image)] * samples
        self.shape = (3, pixels, pixels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.frombuffer(bytearray(zlib.decompress(self.images[index])), dtype=torch.uint8)
        return F.interpolate(image.view(1, *self.shape).float() / 255, size=112, mode="bilinear", antialias=True)[0]


loader = DataLoader(Compressed(1024), batch_size=32, shuffle=True)
