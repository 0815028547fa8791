"""A trained network, converted exactly, fine-tuned with tensor dropout, merged, and served by onnxruntime.

Run it with: python examples/convert_finetune_export.py [FOLDER for the ONNX file]

It needs the extras digits and onnx. About 10 seconds on two cores.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tensor_dropout as td
from tensor_dropout.exporting import export_onnx
from tensor_dropout_lab.data import load_data


def build() -> nn.Module:
    """Any network with a pooled linear head: yours."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(network: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """An ordinary loop."""
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(64):
            loss = F.cross_entropy(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()


def main(folder: Path) -> float:
    """Return the largest relative difference between onnxruntime's outputs and the fine-tuned network's."""
    torch.manual_seed(0)
    digits = load_data("digits")
    x, y = digits.prepare(digits.train.inputs), digits.train.targets
    held_x, held_y = digits.prepare(digits.validation.inputs), digits.validation.targets

    def accuracy() -> float:
        with torch.no_grad():
            return float((network(held_x).argmax(1) == held_y).float().mean())

    network = build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    train(network, optimizer, x, y, epochs=8)
    print(f"trained:                         validation accuracy {100 * accuracy():.1f} %")

    # Spatial ranks above 1 start with a zero slab of the core: the same function, with room to grow.
    dropout = td.TensorDropout(0.8)
    report = td.tensorize_(network, x[:2], rank=(10, 3, 3, 10), dropout=dropout, optimizer=optimizer)
    print(f"converted:                       validation accuracy {100 * accuracy():.1f} %")
    print(report)

    train(network, optimizer, x, y, epochs=5)  # the same optimizer: it holds the new factors
    print(f"fine-tuned with tensor dropout:  validation accuracy {100 * accuracy():.1f} %")

    with torch.no_grad():
        before = network(held_x)
        td.merge_(network)  # nothing of tensor_dropout is left in it
        merged = float((network(held_x) - before).abs().max() / before.abs().max())
    served = export_onnx(network, held_x[:8], folder / "network.onnx")
    print(f"merged: outputs within {merged:.0e}; onnxruntime: within {served:.0e}; {folder / 'network.onnx'}")
    return max(merged, served)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
